"""A run whose evaluation of one step fails on one rank; then, with step 0, that run goes on.

Run by test_failing.py.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import EvalLoader, HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import TrainLoader
from hybridtrain.loop.callbacks import EarlyStopping
from hybridtrain.loss import Accuracy, cross_entropy
from hybridtrain.observe import MetricsFile

folder, engine, who, failing = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
EVALUATED = (2, 4, 6)


class Failing(Accuracy):
    """A metric that fails on one rank in one step."""

    trainer: Trainer | None = None

    def compute(self) -> torch.Tensor:
        assert self.trainer is not None
        if failing and (self.trainer.world.rank, self.trainer.step) == (who, failing):
            raise ArithmeticError("boom")
        return super().compute()


def data(samples: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=g)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=g))


def made(name: str) -> Trainer:
    """Returns a trainer; with the engine `local` two replicas have different samples."""
    world = World.from_env(2, "cpu", timeout_s=60, engine=engine)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 3))
    model = HybridModel(net, world, chunks=2)
    metric = Failing()
    metric.trainer = trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        cross_entropy,
        TrainLoader(data(16, 0), 5, world, seed=1),
        evaluation=EvalLoader(data(11, 9), 4, world),
        metrics={"flaky": metric},
        steps=6,
        eval_every=2,
        checkpoint_every_steps=2,
        best="loss",
        store=CheckpointStore(folder / name / "checkpoints"),
        callbacks=[EarlyStopping(patience=9), MetricsFile(folder / name / "metrics.jsonl")],
    )
    return trainer


def evaluated(name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]


if failing:
    made(str(failing)).fit()
    print("the end was reached")
else:
    whole = made("whole")
    whole.fit()
    expected = whole.model.state_dict()
    for step in [step for step in EVALUATED if (folder / str(step)).is_dir()]:
        again = made(str(step))
        assert again.store is not None
        assert again.store.steps()[-1] == step
        again.resume(again.store.newest())
        assert not again.finished
        again.fit()
        assert again.finished
        for key, value in again.model.state_dict().items():
            assert torch.equal(value, expected[key]), (step, key)
        assert again.callbacks[0].state_dict() == whole.callbacks[0].state_dict()
        assert again.summary()["best"] == whole.summary()["best"]
        if again.world.is_main:
            assert evaluated(str(step)) == evaluated("whole"), step
            assert [found for found, _ in evaluated(str(step))] == list(EVALUATED)
    again.world.close()
    print("all went on")
