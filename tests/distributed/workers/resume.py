"""Trains with the Trainer, whole and in halves. Run by test_resume.py, which imports it too."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torchmetrics
from support.training import cosine
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.utilities import dim_zero_cat

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.loop import evaluate
from hybridtrain.loss import accuracy, cross_entropy

STEPS = 6


def data(samples: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(samples, 6, generator=g), torch.randint(3, (samples,), generator=g)
    )


def trainer(folder: Path, nb_part: int, seed: int = 0) -> Trainer:
    """Returns a trainer on 16 samples in batches of 5.

    Two replicas have 3 and 2 samples of each batch; of the last one, the second has none.
    """
    world = World.from_env(nb_part=nb_part, devices="cpu", timeout_s=60)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    model = HybridModel(net, world, chunks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Trainer(
        model,
        optimizer,
        cross_entropy,
        TrainLoader(data(16, 0), 5, world, seed=1),
        evaluation=EvalLoader(data(11, 9), 4, world),
        metrics={"accuracy": accuracy()},
        lr_schedule=cosine(2, STEPS)(optimizer),
        steps=STEPS,
        accumulate=1,
        clip_norm=0.5,
        store=CheckpointStore(folder),
    )


def run(folder: Path, nb_part: int, until: int, since: int = 0) -> dict:
    """Trains up to step `until`, from the checkpoint of step `since` unless it is 0."""
    # a process that resumes begins with other weights, different on every rank
    mine = trainer(folder, nb_part, seed=since)
    if since:
        mine.resume(folder / f"step_{since:08d}")
    mine.total_steps = until
    return mine.fit()


def main(folder: Path) -> None:
    run(folder / "whole", 2, STEPS)
    run(folder / "two_then_one", 2, STEPS // 2)
    run(folder / "one_then_two", 2, STEPS, since=STEPS // 2)
    # every rank loads what rank 0 reads
    last = trainer(folder / "one_then_two", 2, seed=99 + World.from_env(devices="cpu").rank)
    last.resume(folder / "one_then_two" / f"step_{STEPS:08d}")
    states = last.world.gather(last.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    moments = last.world.gather(last.optimizer.state_dict()["state"])
    for number, entry in moments[0].items():
        assert all(torch.equal(value, moments[1][number][key]) for key, value in entry.items())
    rounds = evaluations(last)
    if last.world.is_main:
        (folder / "evaluations.json").write_text(json.dumps(rounds))
    last.world.close()


class Collected(torchmetrics.Metric):
    """Keeps whole outputs, of two dimensions, which a replica without samples has none of."""

    def __init__(self):
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.outputs.append(outputs)
        self.targets.append(targets)

    def compute(self):
        assert dim_zero_cat(self.targets).dtype == torch.int64
        return dim_zero_cat(self.outputs).sum()


def evaluations(ours: Trainer) -> list[dict]:
    """The evaluation on 5 samples and on 1, where the second replica has none, and its reference.

    A warning is an error.
    """
    inputs, targets = data(5, 9).tensors
    with torch.no_grad():
        outputs = ours.model.net.eval()(inputs)
    rounds = []
    for samples in (5, 1):
        loader = EvalLoader(TensorDataset(inputs[:samples], targets[:samples]), 4, ours.world)
        metrics = {
            "ours": accuracy(),
            "theirs": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
            "collected": Collected(),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = evaluate(ours.model, loader, cross_entropy, metrics)
        right = float((outputs.argmax(1) == targets)[:samples].double().mean())
        expected = {
            "samples": samples,
            "loss": float(cross_entropy(outputs[:samples], targets[:samples])),
            "ours": right,
            "theirs": right,
            "collected": float(outputs[:samples].sum()),
        }
        rounds.append({"found": ours.world.gather(result), "expected": expected})
    return rounds


if __name__ == "__main__":
    main(Path(sys.argv[1]))
