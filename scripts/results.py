"""Trains recipes to a result, and the same in plain PyTorch: `python scripts/results.py FOLDER`.

Real data come from packages of Debian, which `apt-get download` fetches into FOLDER: Fashion-MNIST
(dataset-fashion-mnist, in the format of MNIST) and the six novels of Jane Austen
(r-cran-janeaustenr). The digits and the source of Python are there anyway.

Each recipe runs as a command, in two stages. The plain loop takes the recipe's model, data and
optimizer in one piece, batch by batch the same, with autograd and nothing of the engine. Results
and curves go to docs/assets/results.json and results.png. What FOLDER has is not trained again.
Needs `pip install rdata matplotlib`.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
import zlib
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridtrain import World
from hybridtrain._base.text_table import markdown_table
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.components import build_lr_schedule, build_model, build_optimizer
from hybridtrain.cli.run.run_data import load_data
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.data.splits import DataSplits
from hybridtrain.options import LoaderOptions

ASSETS = Path(__file__).resolve().parents[1] / "docs/assets"
DEBIAN = ("dataset-fashion-mnist", "r-cran-janeaustenr")
CPU = ["world.devices=cpu", "trainer.log_every=10", "checkpoint.every_steps=null"]
SMALL_GPT2 = [f"model.config.{key}" for key in ("n_layer=4", "n_head=4", "n_embd=128")]

RECIPES = {
    "digits": [],
    "mnist_basicnet": ["data.root=fashion", "trainer.epochs=3"],
    "python_source_gpt": [],
    "gpt_text_files": ["data.path=novels", "trainer.steps=600"],
    "gpt2_text": [
        *("data.path=paragraphs.jsonl", "data.tokenizer=./bert", "data.max_len=128"),
        *(*SMALL_GPT2, "trainer.steps=600", "optim.lr=1e-3", "lr_schedule.warmup_steps=50"),
    ],
    "bert_classifier": [
        *("data.path=paragraphs.jsonl", "model.source=./bert", "optim.lr=5e-4"),
        *("data.max_len=96", "trainer.epochs=3", "trainer.metrics=null"),
    ],
}
"""The recipes, and what is set otherwise to reach a result on two cores of a CPU."""


def prepare() -> None:
    """Makes the data in the working directory."""
    if Path("bert").exists():
        return
    subprocess.run(["apt-get", "download", *DEBIAN], check=True)
    for package in Path().glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, "debian"], check=True)
    raw = Path("fashion/MNIST/raw")
    raw.mkdir(parents=True, exist_ok=True)
    for file in Path("debian/usr/share/datasets/fashion-mnist").iterdir():
        subprocess.run(["cp", file, raw], check=True)
    subprocess.run(["gunzip", "-f", *raw.glob("*.gz")], check=True)
    novels = read_novels(Path("debian/usr/lib/R/site-library/janeaustenr/data"))
    Path("novels").mkdir(exist_ok=True)
    texts = []
    for name, lines in novels.items():
        text = "\n".join(lines)
        Path(f"novels/{name}.txt").write_text(text)
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
        texts += [{"text": part, "label": name} for part in paragraphs if len(part) > 80]
    Path("paragraphs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    write_bert(Path("bert"), [each["text"] for each in texts])


def read_novels(folder: Path) -> dict[str, list[str]]:
    """Returns the lines of each character vector in a database of R."""
    import rdata

    def value(packed: bytes) -> Any:
        return rdata.conversion.convert(rdata.parser.parse_data(packed))

    places = value(gzip.decompress((folder / "Rdata.rdx").read_bytes()))["variables"]
    whole, found = (folder / "Rdata.rdb").read_bytes(), {}
    for name, (start, length) in places.items():
        part = whole[int(start) : int(start) + int(length)]
        size, kind = struct.unpack(">Ic", part[:5])
        plain = lzma.decompress(part[5:]) if kind == b"Z" else zlib.decompress(part[4:])
        assert len(plain) == size
        found[name] = [str(line) for line in value(plain)]
    return found


def write_bert(
    folder: Path, texts: list[str], width: int = 128, layers: int = 4, dropout: float = 0.1
) -> None:
    """Writes a small BERT with random weights, and a tokenizer of the texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(texts, vocab_size=8000)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", eos_token="[SEP]",
    )  # fmt: skip
    fast.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(fast), hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=512, num_labels=6,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)


def by_recipe(recipe: str, words: list[str]) -> list[dict[str, Any]]:
    """Trains a recipe by its command; returns the lines of its metrics."""
    command = [sys.executable, "-m", "hybridtrain", f"recipe={recipe}", *CPU, *words]
    run = Path("outputs") / recipe
    if not (run / "summary.json").exists():
        subprocess.run(command, check=True)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plain(recipe: str, words: list[str]) -> list[dict[str, Any]]:
    """Trains the same in one piece, with PyTorch alone; returns the same values."""
    done = Path(f"plain_{recipe}.json")
    if done.exists():
        known: list[dict[str, Any]] = json.loads(done.read_text())
        return known
    config = compose_config([f"recipe={recipe}", *CPU, *words])
    world = World()
    data = load_data(config, world)
    torch.manual_seed(config.seed)
    net = build_model(config, data)
    load_base(config, net)
    options = LoaderOptions(collate=data.collate)
    batches = TrainLoader(
        data.train, config.data["batch_size"], world, seed=config.seed, options=options
    )
    trainer = config.trainer
    steps = trainer.steps or trainer.epochs * batches.batches_per_epoch
    optimizer = build_optimizer(config.optim, net.parameters())
    schedule = build_lr_schedule(config.lr_schedule, optimizer, steps)
    lines, recent = [], []
    net.train()
    epochs = chain.from_iterable(repeat(batches))
    for step, (inputs, targets) in enumerate(islice(epochs, steps), start=1):
        loss = loss_of(config, net, inputs, targets)[0]
        loss.backward()
        if trainer.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), trainer.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if step % 10 == 0:  # as the recipe logs it: the mean of the steps since the last line
            lines.append({"step": step, "train/loss": sum(recent) / len(recent)})
            recent.clear()
    mean, accuracy = held_out(config, net, data)
    lines.append({"step": steps, "eval/loss": mean, "eval/accuracy": accuracy})
    done.write_text(json.dumps(lines))
    return lines


def load_base(config: Config, net: nn.Module) -> None:
    """Loads the weights of `init_from`, those that the folder has."""
    given = config.init_from
    if given is not None:
        folder = given if isinstance(given, str) else given["path"]
        weights = load_file(Path(folder) / "model.safetensors")
        net.load_state_dict(weights, strict=False)


def held_out(config: Config, net: nn.Module, data: DataSplits) -> tuple[float, float]:
    """Returns the mean loss and the accuracy on the held-out samples."""
    net.eval()
    options = LoaderOptions(collate=data.collate)
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for inputs, targets in EvalLoader(
            data.eval, config.data["batch_size"], World(), options=options
        ):
            loss, right, count = loss_of(config, net, inputs, targets)
            sums += torch.tensor([loss * count, right, count])
    mean, accuracy = (sums[:2] / sums[2]).tolist()
    return mean, accuracy


def loss_of(
    config: Config, net: nn.Module, inputs: Any, targets: Tensor
) -> tuple[Tensor, int, int]:
    """Returns the mean loss, and how many of how many predictions are right."""
    output = net(**inputs) if isinstance(inputs, dict) else net(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.flatten()
    loss_fn = F.nll_loss if config.trainer.loss == "nll" else F.cross_entropy
    right = int((logits.argmax(-1) == targets).sum())
    return loss_fn(logits, targets), right, int((targets != -100).sum())


def draw(curves: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Draws the loss of both trainings, a picture for each recipe."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained")
    names = ("hybridtrain, two stages", "plain PyTorch")
    for axis, (recipe, both) in zip(axes.flat, curves.items(), strict=False):
        for name, lines, style in zip(names, both, ("-", "--"), strict=True):
            known = [(x["step"], x["train/loss"]) for x in lines if "train/loss" in x]
            axis.plot(*zip(*known, strict=True), style, label=name, linewidth=1.2)
        axis.set(title=recipe, xlabel="step", ylabel="training loss")
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Trains both ways, prints a table and writes the results."""
    os.chdir(sys.argv[1])
    prepare()
    curves, results = {}, {}
    for recipe, words in RECIPES.items():
        both = [by_recipe(recipe, words), plain(recipe, words)]
        curves[recipe] = both
        ends = [[line for line in lines if "eval/loss" in line][-1] for lines in both]
        summary = json.loads((Path("outputs") / recipe / "summary.json").read_text())
        measured, environment = summary["measured"], summary["environment"]
        results[recipe] = {
            "words": words,
            "environment": {key: environment[key] for key in ("torch", "Python", "devices")},
            "steps": ends[0]["step"],
            "step_ms": round(measured["step_ms"]),
            "memory_mib": [round(size / 2**20, 1) for size in measured["memory_bytes"]],
            **{
                name: {key: round(end[f"eval/{key}"], 4) for key in ("loss", "accuracy")}
                for name, end in zip(("hybridtrain", "plain"), ends, strict=True)
            },
        }
        print(recipe, json.dumps(results[recipe]))
        (ASSETS / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(curves, ASSETS / "results.png")
    print(table(results))


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the results as the table of docs/recipes.md."""
    head = ["recipe", "steps", "ms per step", "MiB of each stage"]
    lines = [[*head, "loss", "plain PyTorch", "accuracy", "plain PyTorch"]]
    for recipe, found in results.items():
        pairs = zip(found["hybridtrain"].values(), found["plain"].values(), strict=True)
        values = [f"{value:.4f}" for pair in pairs for value in pair]
        memory = " + ".join(map(str, found["memory_mib"]))
        lines.append([f"`{recipe}`", str(found["steps"]), str(found["step_ms"]), memory, *values])
    return markdown_table(lines)


if __name__ == "__main__":
    main()
