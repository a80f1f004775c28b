"""Trains with fixed numbers of logical replicas; run by test_number_of_processes.py."""

import contextlib
import hashlib
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader, Loader, TrainLoader, next_step
from hybridtrain.loop import evaluate
from hybridtrain.loop.callbacks import EMA
from hybridtrain.loss import accuracy
from hybridtrain.step import OptimizerStep, ShardedOptimizer

BATCH, CLASSES, STEPS = 45, 5, 6

# The settings that differ from `DEFAULTS`; most numbers of replicas do not divide evenly.
CASES = {
    "batch norm and dropout": {},
    "several batches in a step": {"accumulate": 3, "replicas": 5},
    "statistics of a whole batch": {"batch_norm": "deferred", "replicas": 7, "accumulate": 2},
    "two stages that are recomputed": {"recompute": "always", "nb_part": 2, "replicas": 6},
    "layers that are recomputed": {"recompute": ["2", "3"], "nb_part": 2},
    "gpipe": {"schedule": "gpipe", "nb_part": 2},
    "zb-h1": {"schedule": "zb-h1", "nb_part": 2, "replicas": 5},
    "zb-v": {"schedule": "zb-v", "stages_per_device": 2, "nb_part": 2, "replicas": 5},
    "v-min": {"schedule": "v-min", "stages_per_device": 2, "nb_part": 2, "replicas": 5},
    "bf16": {"precision": "bf16"},
    "fp16 with a scale that adapts": {"precision": "fp16"},
    "a sharded optimizer": {"shard": "optimizer", "replicas": 6},
    "replicas without samples": {"norm": nn.LayerNorm, "samples": 48, "replicas": 7},
    "a stream": {"stream": True, "replicas": 5, "norm": nn.LayerNorm},
    "a stream with workers": {"stream": True, "replicas": 5, "norm": nn.LayerNorm, "workers": 2},
    "weights of classes": {"weight": [0.1, 0.7, 0.33, 1.9, 0.77], "replicas": 5},
    "tied stages": {"tied": True, "nb_part": 2, "replicas": 5},
    "a buffer that forwards change": {"counts": True, "replicas": 5, "accumulate": 2},
}
QUICK = [
    "several batches in a step",
    "replicas without samples",
    "a stream",
    "tied stages",
]
# those for which nothing but the engine differs
DISTRIBUTED = ["batch norm and dropout", "zb-h1", "tied stages", "several batches in a step"]

DEFAULTS = {
    "replicas": 4,
    "nb_part": 1,
    "accumulate": 1,
    "samples": 127,
    "norm": nn.BatchNorm1d,
    "stream": False,
    "workers": 0,
    "weight": None,
    "tied": False,
    "counts": False,
}


class Pairs(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[number] for number in range(len(self.dataset)))


class Scaled(nn.Module):
    """Computes with a buffer and an attribute that its forward changes in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.scale = self.scale * 1.01 + 0.001 * x.detach().mean()
            self.calls += 1
        return x * (1 + 0.01 * self.calls) * self.scale


class Residual(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return x + self.linear(x)


def model_of(case, world):
    torch.manual_seed(0)
    middle = nn.Linear(64, 64)
    net = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        case["norm"](64),
        nn.Dropout(0.3),
        Residual(middle),
        Scaled() if case["counts"] else nn.ReLU(),
        Residual(middle if case["tied"] else nn.Linear(64, 64)),
        nn.Dropout(0.2),
        nn.Linear(64, CLASSES),
    )
    settings = {k: v for k, v in case.items() if k not in DEFAULTS}
    return HybridModel(net, world, **{"chunks": 2} | settings)


def data_of(case):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(case["samples"], 16, generator=generator)
    targets = torch.randint(0, CLASSES, (case["samples"],), generator=generator)
    targets[::3] = -100
    dataset = TensorDataset(inputs, targets)
    return Pairs(dataset) if case["stream"] else dataset


def digest(model, optimizer):
    """Returns a digest of the weights, the buffers and the optimizer's state."""
    state = {**model.state_dict(), **dict(enumerate(moments(model, optimizer)))}
    content = b"".join(v.numpy().tobytes() for v in state.values() if isinstance(v, torch.Tensor))
    return hashlib.sha256(content).hexdigest()[:16]


def moments(model, optimizer):
    """Returns the tensors of the state, in the order of the parameters; of one process alone."""
    if isinstance(optimizer, ShardedOptimizer) or model.world.processes_per_replica > 1:
        return []
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return [state[key] for state in states for key in sorted(state)]


def trained(base, name):
    """Trains two epochs, and returns a digest of the model and one of losses and metrics."""
    case = DEFAULTS | CASES[name]
    world = replace(base, fixed_replicas=case["replicas"])
    if base.engine == "local":
        world = world.divided(case["nb_part"], "cpu")
    model = model_of(case, world)
    if case.get("shard"):
        optimizer = ShardedOptimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight = case["weight"]
    loss = F.cross_entropy if weight is None else nn.CrossEntropyLoss(torch.tensor(weight))
    step = OptimizerStep(model, optimizer, clip_norm=1.0)
    dataset = data_of(case)
    loader = Loader(dataset, BATCH, world, workers=case["workers"])
    evaluation = EvalLoader(dataset, BATCH, world)
    metrics = {
        "accuracy": accuracy(),
        "auroc": torchmetrics.AUROC("multiclass", num_classes=CLASSES, ignore_index=-100),
    }
    reported = []
    for _ in range(2):
        with contextlib.closing(loader.batches()) as batches:
            while group := next_step(batches, case["accumulate"]):
                step.run(group, loss)
                reported.append(step.mean_loss())
        reported.append(evaluate(model, evaluation, loss, metrics))
    return digest(model, optimizer), repr(reported)


def trainer(folder, replicas, until):
    world = World.from_env(devices="cpu", replicas=replicas, timeout_s=60)
    case = DEFAULTS | {"replicas": replicas}
    model = model_of(case, world)
    dataset = data_of(case)
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        F.cross_entropy,
        TrainLoader(dataset, BATCH, world),
        evaluation=EvalLoader(dataset, BATCH, world),
        metrics={"accuracy": accuracy()},
        callbacks=[EMA(0.9, evaluates=True)],
        steps=until,
        eval_every=3,
        checkpoint_every_steps=3,
        accumulate=2,
        clip_norm=0.5,
        store=CheckpointStore(folder),
    )


def main(folder, engine, *names):
    warnings.simplefilter("ignore")
    folder = Path(folder)
    if engine == "trainer":
        run, until, since = names
        each = trainer(folder / run, 5, int(until))
        if int(since):
            each.resume(folder / run / f"step_{int(since):08d}")
        result = each.fit()
        if each.world.is_main:
            (folder / f"{run}.json").write_text(json.dumps(result))
        each.world.close()
        return
    with World.from_env(
        nb_part=1 if engine == "local" else 2, engine=engine, devices="cpu", timeout_s=60
    ) as world:
        results = {name: trained(world, name) for name in names}
        if world.is_main:
            (folder / f"{engine}_{world.size}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
