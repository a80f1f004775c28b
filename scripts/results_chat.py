"""Fine-tunes a chat model with LoRA, and the same in plain PEFT: `results_chat.py FOLDER`.

Nothing is downloaded. The conversations ask what a function of Python's library does; the answer is
the beginning of its docstring. The base is a Llama of about a million parameters with random values
and a tokenizer of these texts. `recipe=sft_chat model.lora=null` trains it on one half of the
modules. Then `recipe=sft_chat` trains an adapter on the other half, in two stages. The plain loop
is transformers and PEFT, with the same batches and the same first values of the adapter.

Losses and the picture go to docs/assets/results_chat.json and results_chat.png. What FOLDER has is
not trained again. Needs `pip install matplotlib`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import ASSETS
from torch import Tensor, nn

from hybridtrain import World
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.components import build_lr_schedule, build_model, build_optimizer
from hybridtrain.cli.run.run_data import load_data
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.options import LoaderOptions

# fmt: off
FIRST = (
    "argparse", "ast", "asyncio", "bisect", "calendar", "collections", "csv", "datetime",
    "decimal", "difflib", "email", "fractions", "ftplib", "glob", "heapq", "html", "http.client",
    "inspect", "json", "locale", "logging", "mailbox", "math", "mimetypes", "multiprocessing",
    "optparse",
)
SECOND = (
    "os", "os.path", "pathlib", "pickle", "platform", "plistlib", "pprint", "random", "re",
    "sched", "shelve", "shlex", "shutil", "socket", "sqlite3", "ssl", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "tokenize",
    "tracemalloc", "types", "typing", "unittest", "urllib.parse", "uuid", "weakref", "wsgiref",
    "zipfile",
)
# fmt: on
"""The modules that the base is trained on, and those of the adapter."""

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMON = [
    *("recipe=sft_chat", "model.dtype=float32", "world.devices=cpu", "data.max_len=96"),
    *("data.batch_size=16", "trainer.epochs=null", "trainer.log_every=1", "monitor.report=false"),
    *("trainer.eval_every=null", "checkpoint.every_steps=null"),
]
BASE = [
    *("model.source=./random", "data.path=first.jsonl", "model.lora=null", "data.learn=all"),
    *("optim.lr=2e-3", "trainer.steps=200", "run_name=base"),
]
ADAPTER = ["model.source=./base", "data.path=second.jsonl", "optim.lr=2e-3", "trainer.steps=200"]


def prepare() -> None:
    """Makes the conversations and the random model in the working directory."""
    if Path("random/model.safetensors").exists():
        return
    chats = {"first": conversations(FIRST), "second": conversations(SECOND)}
    for name, turns in chats.items():
        lines = [json.dumps({"messages": messages}) + "\n" for messages in turns]
        Path(f"{name}.jsonl").write_text("".join(lines))
    write_llama(Path("random"), [m["content"] for m in chain.from_iterable(chats["first"])])


def conversations(modules: tuple[str, ...]) -> list[list[dict[str, str]]]:
    """Returns a question and an answer for each documented function and class of the modules."""
    found = {}
    for module in modules:
        for path, thing in documented(importlib.import_module(module), module):
            answer = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            if 20 < len(answer) < 400:
                found[answer] = (
                    f"What is {path}?" if inspect.isclass(thing) else f"What does {path} do?"
                )
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for answer, question in found.items()
    ]


def documented(owner: Any, path: str) -> list[tuple[str, Any]]:
    """Returns the public functions and classes of a module, and the methods of its classes."""
    things = []
    for name in sorted(vars(owner)):
        thing = getattr(owner, name, None)
        if name.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        things.append((f"{path}.{name}", thing))
        if inspect.isclass(thing) and inspect.ismodule(owner):
            things += documented(thing, f"{path}.{name}")
    return things


def write_llama(folder: Path, texts: list[str], width: int = 128, layers: int = 4) -> None:
    """Writes a small Llama with random weights, and a tokenizer of the texts with a template."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    pieces.train_from_iterator(texts, vocab_size=2000, special_tokens=special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=3 * width, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def by_command(words: list[str], run_name: str) -> tuple[list[float], dict[str, float]]:
    """Trains by the command; returns the loss of each step and the evaluation at the end."""
    run = Path("outputs") / run_name
    if not (run / "summary.json").exists():
        subprocess.run([sys.executable, "-m", "hybridtrain", *COMMON, *words], check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    return [x["train/loss"] for x in lines if "train/loss" in x], summary["eval"]


def make_base() -> None:
    """Trains the base and writes it as transformers does."""
    if Path("base").exists():
        return
    by_command(BASE, "base")
    command = [
        sys.executable,
        "-m",
        "hybridtrain",
        "export",
        "run_name=base",
        "format=transformers",
    ]
    subprocess.run(command, check=True)
    (folder,) = Path("outputs/base/export").glob("step_*")
    folder.rename("base")


def by_peft(words: list[str]) -> tuple[list[float], float]:
    """Trains the same with transformers and PEFT; returns the loss of each step and at the end."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = compose_config([*COMMON, *words])
    world, given = World(), config.model["lora"]
    data = load_data(config, world)
    torch.manual_seed(config.seed)
    first = build_model(config, data).state_dict()
    # eager: plain transformers leaves out the mask of a batch without padding in others
    base = AutoModelForCausalLM.from_pretrained("base", attn_implementation="eager")
    net = get_peft_model(
        base,
        LoraConfig(
            r=given["rank"],
            lora_alpha=given["alpha"],
            target_modules=given["targets"],
            task_type="CAUSAL_LM",
        ),
    )
    values = {f"base_model.model.{name}": v for name, v in first.items() if ".lora_" in name}
    assert not net.load_state_dict(values, strict=False).unexpected_keys
    options = LoaderOptions(collate=data.collate)
    size = config.data["batch_size"]
    batches = TrainLoader(data.train, size, world, seed=config.seed, options=options)
    steps = config.trainer.steps
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = build_optimizer(config.optim, trained)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, steps)
    losses = []
    net.train()
    for inputs, targets in islice(chain.from_iterable(repeat(batches)), steps):
        loss = mean_loss(net, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, config.trainer.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    net.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in EvalLoader(data.eval, size, world, options=options):
            learnt = int((targets != -100).sum())
            total, count = total + mean_loss(net, inputs, targets).item() * learnt, count + learnt
    return losses, total / count


def mean_loss(net: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    """Returns the mean loss over the tokens of the answers."""
    return F.cross_entropy(net(**inputs).logits.flatten(0, 1), targets.flatten())


def draw(ours: list[float], plain: list[float], path: Path) -> None:
    """Draws the loss of both trainings, and how far they are apart."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    steps = range(1, len(ours) + 1)
    left.plot(steps, ours, "-", label="hybridtrain, two stages", linewidth=1.2)
    left.plot(steps, plain, "--", label="plain PEFT", linewidth=1.2)
    left.set(title="sft_chat", xlabel="step", ylabel="training loss")
    left.legend()
    apart = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
    right.semilogy(steps, [max(value, 1e-9) for value in apart], linewidth=1.0)
    right.set(title="difference of the two losses", xlabel="step")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Trains both ways, writes and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    os.chdir(parser.parse_args().folder)
    prepare()
    make_base()
    ours, evaluation = by_command(ADAPTER, "sft_chat")
    plain, at_end = by_peft(ADAPTER)
    apart = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
    summary = json.loads(Path("outputs/sft_chat/summary.json").read_text())
    environment = summary["environment"]
    results = {
        "words": [*COMMON, *ADAPTER],
        "environment": {key: environment[key] for key in ("torch", "Python", "devices")},
        "conversations": {
            n: len(Path(f"{n}.jsonl").read_text().splitlines()) for n in ("first", "second")
        },
        "steps": len(ours),
        "first loss": {"hybridtrain": ours[0], "plain": plain[0]},
        "evaluation": {"hybridtrain": evaluation["loss"], "plain": at_end},
        "largest difference": {"first 100 steps": max(apart[:100]), "all": max(apart)},
    }
    (ASSETS / "results_chat.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(ours, plain, ASSETS / "results_chat.png")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
