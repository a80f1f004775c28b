"""Runs AWS's example scripts of smp: with the import changed, and as a plain loop.

Those in `aws_scripts` are written in the structure of AWS's: the same calls of smp in the same
order, with small models and data.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import runpy
import sys
import types
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hybridtrain.smp as smp
from hybridtrain.smp import __main__ as runner
from hybridtrain.smp import runtime
from support import smp_plain
from support.small_data import write_mnist

SCRIPTS = Path(__file__).with_name("aws_scripts")
_LIBRARY = re.compile(r"smdistributed\.modelparallel(\.torch)?")

NEO = {
    "GPTJConfig": "GPTNeoConfig",
    "gptj": "gptneo",
    "n_positions=": "max_position_embeddings=",
    "n_embd=": "hidden_size=",
    "n_layer=": "num_layers=",
    "n_head=": "num_heads=",
    "resid_pdrop=": "resid_dropout=",
    "embd_pdrop=": "embed_dropout=",
    "attn_pdrop=": "attention_dropout=",
    "rotary_dim=8": 'attention_types=[[["global", "local"], 2]], intermediate_size=64',
}
"""What AWS's example of GPT-Neo has in the place of GPT-J's."""


def source(name: str) -> str:
    """Returns the text of an example, as for smdistributed."""
    if name == "train_gptneo_simple":
        text = (SCRIPTS / "train_gptj_simple.py").read_text()
        head, make, rest = text.partition("def make_config")
        for one, other in NEO.items():
            make_part, main, tail = rest.partition("def main")
            rest = make_part.replace(one, other) + main + tail.replace("gptj", "gptneo")
            head = head.replace(one, other) if one in ("GPTJConfig", "gptj") else head
        return head + make + rest
    return (SCRIPTS / f"{name}.py").read_text()


def changed(text: str) -> str:
    """Returns a script with smdistributed's name changed."""
    return _LIBRARY.sub("hybridtrain.smp", text)


@dataclass
class Run:
    """What a script has computed: means over micro-batches in their order, and the weights."""

    losses: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)


def _execute(text: str, folder: Path, arguments: list[str]) -> Run:
    """Runs a script in this process, in `folder`."""
    run = Run()
    plain_mean = smp.StepOutput.reduce_mean

    def reduce_mean(self: Any) -> torch.Tensor:
        run.losses.append(plain_mean(self).clone())
        return run.losses[-1]

    script = folder / f"script_{os.environ.get('RANK', '0')}.py"
    script.write_text(text)
    before = list(sys.argv), list(sys.path), dict(os.environ)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(SCRIPTS))
    os.environ |= {"SM_MODEL_DIR": str(folder / "model"), "SM_NUM_GPUS": "1"}
    os.environ |= {f"SM_CHANNEL_{n.upper()}": str(folder / n) for n in ("train", "test")}
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    smp.StepOutput.reduce_mean = reduce_mean  # type: ignore[method-assign]
    try:
        with chdir(folder):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        smp.StepOutput.reduce_mean = plain_mean  # type: ignore[method-assign]
        sys.argv, sys.path[:] = before[0], before[1]
        os.environ.clear()
        os.environ.update(before[2])
    return run


def run(
    name: str, folder: Path, arguments: list[str], parameters: dict[str, Any], *, aliases: bool
) -> Run:
    """Runs an example as a script of hybridtrain.smp.

    Args:
        name: of the script.
        folder: with its data.
        arguments: of its command line.
        parameters: in the environment, for `smp.init()`.
        aliases: run it unchanged, as `python -m hybridtrain.smp` does.
    """
    runtime._runtime = None
    begun: dict[str, Any] = {}
    partition = smp.DistributedModel.partition

    def and_state(self: Any, *args: Any) -> None:
        partition(self, *args)
        begun.update({n: t.clone() for n, t in self.state_dict().items()})

    text = source(name)
    modules = dict(sys.modules)
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(parameters)
    smp.DistributedModel.partition = and_state  # type: ignore[method-assign]
    try:
        if aliases:
            runner.provide_modules()
        done = _execute(text if aliases else changed(text), folder, arguments)
    finally:
        smp.DistributedModel.partition = partition  # type: ignore[method-assign]
        _restore(modules)
    model = smp.ranks.current().model
    assert model is not None
    done.start, done.weights = begun, model.state_dict()
    return done


def plain(
    name: str, folder: Path, arguments: list[str], microbatches: int, start: dict[str, Any]
) -> Run:
    """Runs the same example as a plain loop, in the place of this process's replica."""
    module = smp_plain.module(
        microbatches,
        smp.dp_rank(),
        smp.dp_size(),
        smp.get_mp_group()[0],
        smp.get_dp_process_group(),
        start,
    )
    own = "smdistributed.modelparallel.torch"
    library = types.SimpleNamespace(torch=module, __version__="plain")
    modules = dict(sys.modules)
    runner.provide_modules()
    package: Any = importlib.import_module("smdistributed")
    package.modelparallel = library
    sys.modules["smdistributed.modelparallel"] = library  # type: ignore[assignment]
    sys.modules[own], sys.modules[f"{own}.optimizers"] = module, module.optimizers
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(smp.get_mp_group()[0])
    try:
        done = _execute(source(name), folder, arguments)
    finally:
        _restore(modules)
        os.environ.pop("LOCAL_RANK") if before is None else os.environ.update(LOCAL_RANK=before)
    done.weights = module.models[0].state_dict()
    return done


def _restore(modules: dict[str, Any]) -> None:
    for name in [n for n in sys.modules if n.startswith(("smdistributed", "torchnet"))]:
        sys.modules.pop(name)
    sys.modules |= {n: m for n, m in modules.items() if n not in sys.modules}


def write_tokens(folder: Path) -> None:
    """Writes the data of the GPT examples."""
    generator = torch.Generator().manual_seed(5)
    for name in ("train", "test"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        with gzip.open(folder / name / "0.json.gz", "wt") as file:
            for _ in range(96):
                # a text that can be learnt: each token is the one before plus a small step
                steps = torch.randint(0, 3, (16,), generator=generator)
                file.write(json.dumps({"input_ids": (steps.cumsum(0) % 64).tolist()}) + "\n")
    (folder / "model").mkdir(exist_ok=True)


BERT = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0, "return_dict": False},
}


def write_sentences(folder: Path) -> None:
    """Writes the data of the BERT example."""
    (folder / "config.json").write_text(json.dumps(BERT))
    (folder / "input").mkdir(exist_ok=True)
    random = np.random.default_rng(3)
    for part in range(2):
        np.savez(
            folder / "input" / f"training_{part}.npz",
            input_ids=random.integers(0, 60, (80, 16)),
            input_mask=np.ones((80, 16), int),
            segment_ids=np.repeat([[0] * 8 + [1] * 8], 80, 0),
            masked_lm_positions=np.stack([random.permutation(16)[:4] for _ in range(80)]),
            masked_lm_ids=random.integers(0, 60, (80, 4)),
            next_sentence_labels=random.integers(0, 2, 80),
        )


def write_digits(folder: Path) -> None:
    """Writes the data of the MNIST example."""
    write_mnist(folder / "data", n_train=520)
