"""Trains three recipes, and the same in transformers' `Trainer`: `results_hf.py FOLDER`.

Three ways take the same model, batches, optimizer and schedule of the rate: the `Trainer` with the
whole model on a device of two threads; the `Trainer` after `pipelined(model)`, with two stages of
one thread each; and the recipe's command, also with two stages. Each runs in a process of its own.

The conversations and novels are those of results_chat.py and results.py, the images Fashion-MNIST.
All models start from random values. Results go to docs/assets/results_hf.json, and a table is
printed. What FOLDER has is not trained again. Needs `pip install rdata`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import results
import results_chat
import torch
from torch import Tensor, nn
from torchvision.datasets import MNIST

from hybridtrain import World, pipelined
from hybridtrain._base.text_table import markdown_table
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.components import build_lr_schedule, build_model, build_optimizer
from hybridtrain.cli.run.run_data import load_data
from hybridtrain.data import TrainLoader
from hybridtrain.options import LoaderOptions

COMMON = [
    *("world.devices=cpu", "trainer.log_every=1", "trainer.epochs=null", "trainer.eval_every=null"),
    *("checkpoint.every_steps=null", "monitor.report=false", "trainer.metrics=null"),
]
RECIPES = {
    "sft_chat": [
        *("model.source=./llama", "data.path=second.jsonl", "data.max_len=96"),
        *("data.batch_size=16", "model.dtype=float32", "optim.lr=2e-3", "trainer.steps=100"),
    ],
    "bert_classifier": [
        *("data.path=paragraphs.jsonl", "model.source=./bert_512", "data.max_len=96"),
        *("data.batch_size=32", "optim.lr=2e-4", "trainer.steps=40"),
        "lr_schedule.warmup_steps=10",
    ],
    "image_folder_vit": [
        *("data.root=images", "data.image_size=64", "data.batch_size=32", "data.workers=1"),
        *("optim.lr=3e-4", "lr_schedule.warmup_steps=10", "trainer.steps=30"),
    ],
}
"""The recipes, and what is set otherwise for two cores of a CPU."""
WAYS = {
    "trainer": "`Trainer`, 1 device",
    "pipelined": "`Trainer`, `pipelined`, 2 stages",
    "recipe": "recipe, 2 stages",
}
WARM_UP = 10
"""Steps whose time does not count: the first ones compare the stages with the unsplit model."""


def prepare() -> None:
    """Makes the data and the models in the working directory."""
    if Path("images").exists():
        return
    results.prepare()
    chats = results_chat.conversations(results_chat.SECOND)
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    Path("second.jsonl").write_text("".join(lines))
    texts = [message["content"] for message in chain.from_iterable(chats)]
    results_chat.write_llama(Path("llama"), texts, width=512, layers=8)
    rows = [json.loads(line)["text"] for line in Path("paragraphs.jsonl").read_text().splitlines()]
    results.write_bert(Path("bert_512"), rows, width=512, layers=8, dropout=0.0)
    for part, count in (("train", 4000), ("val", 500)):
        images = MNIST("fashion", train=part == "train")
        for number in range(count):
            image, label = images[number]
            folder = Path("images_", part, str(label))
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
    Path("images_").rename("images")


def by_recipe(recipe: str) -> dict[str, Any]:
    """Trains a recipe by its command; returns what `measure` returns."""
    words = [f"recipe={recipe}", *COMMON, *RECIPES[recipe]]
    run = Path("outputs") / recipe
    subprocess.run([sys.executable, "-m", "hybridtrain", *words], check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "losses": [line["train/loss"] for line in lines if "train/loss" in line],
        "eval": summary["eval"]["loss"],
        "step_ms": summary["measured"]["step_ms"],
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10,
    }


def by_trainer(recipe: str, *, is_pipelined: bool) -> dict[str, Any]:
    """Trains the same in transformers' `Trainer`; returns what `measure` returns."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    config = compose_config([f"recipe={recipe}", *COMMON, *RECIPES[recipe]])
    data = load_data(config, World())
    torch.manual_seed(config.seed)
    net = build_model(config, data)
    results.load_base(config, net)
    batches = TrainLoader(
        data.train, config.data["batch_size"], World(), seed=config.seed,
        options=LoaderOptions(collate=data.collate, workers=config.data.get("workers", 0)),
    )  # fmt: skip
    steps = config.trainer.steps
    if is_pipelined:
        net = pipelined(net, nb_part=2, chunks=4)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = build_optimizer(config.optim, trained)

    ends: list[float] = []

    class Times(TrainerCallback):
        """Writes down when each step ends."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    class OurBatches(Trainer):
        """The `Trainer` with the batches and the loss of the recipe."""

        def get_train_dataloader(self) -> Any:
            return list(islice(chain.from_iterable(repeat(batches)), steps))

        def compute_loss(self, model: nn.Module, inputs: Any, **kwargs: Any) -> Tensor:
            return results.loss_of(config, model, *inputs)[0]

        def _prepare_inputs(self, inputs: Any) -> Any:  # a pair is no dict
            return inputs

    arguments = TrainingArguments(
        "trainer", max_steps=steps, max_grad_norm=config.trainer.clip_norm or 0.0, logging_steps=1,
        logging_nan_inf_filter=False, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True, per_device_train_batch_size=config.data["batch_size"],
        label_names=["labels"],
    )  # fmt: skip
    trainer = OurBatches(
        net, arguments, callbacks=[Times()],
        optimizers=(optimizer, build_lr_schedule(config.lr_schedule, optimizer, steps)),
    )  # fmt: skip
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "eval": results.held_out(config, net, data)[0],
        "step_ms": 1e3 * median(b - a for a, b in pairwise(ends[WARM_UP:])),
        "peak_mib": peak,
    }


def measure(recipe: str, way: str) -> dict[str, Any]:
    """Returns the loss of each step, that of the held-out samples, ms per step and peak MiB."""
    if way == "recipe":
        return by_recipe(recipe)
    return by_trainer(recipe, is_pipelined=way == "pipelined")


def in_own_process(recipe: str, way: str) -> dict[str, Any]:
    """Returns what `measure` returns in a new process, unless it is known."""
    file = Path(f"{recipe}_{way}.json")
    if not file.exists():
        threads = "2" if way == "trainer" else "1"
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        command = [sys.executable, str(Path(__file__).resolve()), ".", recipe, way]
        subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def table(measured: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        [
            "recipe",
            "by",
            "steps",
            "ms per step",
            "peak MiB",
            "held-out loss",
            f"difference of a training loss, first {WARM_UP} steps",
            "all steps",
        ]
    ]
    for recipe, ways in measured.items():
        plain = ways["trainer"]["losses"]
        for way, found in ways.items():
            apart = [abs(a - b) for a, b in zip(found["losses"], plain, strict=True)]
            differences = [f"{max(apart[:WARM_UP]):.1e}", f"{max(apart):.1e}"]
            lines.append([
                f"`{recipe}`", WAYS[way], str(len(plain)), f"{found['step_ms']:.0f}",
                f"{found['peak_mib']:,.0f}", f"{found['eval']:.4f}",
                *(["", ""] if way == "trainer" else differences),
            ])  # fmt: skip
    return markdown_table(lines)


def main() -> None:
    """Trains all ways, prints the table and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("recipe", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("way", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.chdir(args.folder)
    if args.recipe is not None:
        found = measure(args.recipe, args.way)
        Path(f"{args.recipe}_{args.way}.json").write_text(json.dumps(found))
        return
    prepare()
    measured = {recipe: {way: in_own_process(recipe, way) for way in WAYS} for recipe in RECIPES}
    written = {
        recipe: {
            "words": [*COMMON, *RECIPES[recipe]],
            **{way: {**found, "losses": found["losses"][-10:]} for way, found in ways.items()},
        }
        for recipe, ways in measured.items()
    }
    (results.ASSETS / "results_hf.json").write_text(json.dumps(written, indent=1) + "\n")
    print(table(measured))


if __name__ == "__main__":
    main()
