"""Two replicas with unequal shares of each batch train as one process on the whole batches."""

import sys
import tempfile
from itertools import count
from pathlib import Path

import pytest
import torch
from support.compare import CLOSE, assert_same, assert_same_on_all_ranks
from support.launch import Cells
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import Loader, TrainLoader
from hybridtrain.loop import evaluate
from hybridtrain.loss import accuracy

torch.set_num_threads(1)
cells = Cells()

SHARES = [1, 2.5]
# 4 batches of an epoch: of the last one, of a single sample, the slow replica has none
SAMPLES, BATCH, STEPS = 34, 11, 7


def data():
    g = torch.Generator().manual_seed(3)
    targets = torch.randint(4, (SAMPLES,), generator=g)
    targets[::5] = -100  # the replicas' counts are not in proportion to their samples
    return TensorDataset(torch.randn(SAMPLES, 6, generator=g), targets)


class Pairs(IterableDataset):
    def __iter__(self):
        return iter(data())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def model_of(world, **options):
    return HybridModel(net(), world, **{"chunks": 3} | options)


def trainer(world, steps=STEPS, folder=None, source=None, **options):
    model = model_of(world, **options)
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        nn.CrossEntropyLoss(),
        Loader(source or data(), BATCH, world, seed=1),
        steps=steps,
        clip_norm=0.5,
        store=CheckpointStore(folder) if folder else None,
        checkpoint_every_steps=3 if folder else None,
    )


def weights(ours):
    return {name: value.clone() for name, value in ours.model.state_dict().items()}


def unequal(**settings):
    return World.from_env(
        devices="cpu", timeout_s=60, replica_shares=SHARES, **{"nb_part": 1} | settings
    )


def expected(**kwargs):
    """Returns the weights of one process that is fed whole batches."""
    alone = trainer(World(), **kwargs)
    alone.fit()
    return weights(alone)


def compare(world, ours, plain, what):
    assert_same(weights(ours), plain, what, **CLOSE)
    assert_same_on_all_ranks(world, weights(ours), what)


@cells.add("each replica gets its share of every batch, the last one too")
def _(world):
    shares = unequal()
    loader = TrainLoader(data(), BATCH, shares, shuffle=False)
    mine = [batch.samples for batch in loader.batches()]
    assert shares.gather(mine) == [[3, 3, 3, 0], [8, 8, 8, 1]]


for _kind, _source in {"samples by number": None, "a stream": Pairs()}.items():

    @cells.add(f"unequal shares of {_kind} train as one process on the whole batches")
    def _(world, source=_source):
        ours = trainer(shares := unequal(), source=source)
        ours.fit()
        compare(shares, ours, expected(source=source), "weights")


@cells.add("unequal shares and an unequal cut together train as one process")
def _(world):
    shares = unequal(nb_part=2)
    ours = trainer(shares, device_speeds=[1, 4])
    assert ours.model.plan.counts == [1, 4]
    ours.fit()
    compare(shares, ours, expected(), "weights")


@cells.add("a run goes on with other shares and with none where it was")
def _(world):
    shares = unequal()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shares.broadcast(name))
        trainer(shares, 3, folder).fit()
        for world_after in (World.from_env(devices="cpu", replica_shares=[3, 1]), world):
            ours = trainer(world_after)
            ours.resume(folder / "step_00000003")
            ours.fit()
            compare(shares, ours, expected(), "weights")
        shares.gather(None)  # the folder goes with the process that made it


@cells.add("an evaluation over unequal shares counts every sample once")
def _(world):
    from hybridtrain.data import EvalLoader

    shares = unequal()
    inputs, targets = data().tensors
    targets = targets.clamp(min=0)
    loader = EvalLoader(TensorDataset(inputs, targets), 8, shares)
    assert shares.gather(loader.samples) == [10, 24]
    model = model_of(shares)
    result = evaluate(model, loader, nn.CrossEntropyLoss(), {"accuracy": accuracy()})
    with torch.no_grad():
        outputs = model.net.eval()(inputs)
    assert result["samples"] == SAMPLES
    torch.testing.assert_close(result["loss"], float(F.cross_entropy(outputs, targets)))


@cells.add("measured speeds are the same in all processes, and none if the devices are equal")
def _(world):
    across = World.from_env(2, "cpu", timeout_s=60, engine="distributed")
    for slowdown, speeds in ((1, None), (2, [2, 1])):
        ticks = count(step=0.002 * (slowdown if world.rank else 1))
        with pytest.MonkeyPatch.context() as patch:  # each process has a clock of its own
            patch.setattr(
                "hybridtrain.pipeline.device_speeds.perf_counter", lambda ticks=ticks: next(ticks)
            )
            model = model_of(across, device_speeds="auto")
        assert model.options.device_speeds == speeds
        assert model.plan.counts == ([3, 2] if speeds is None else [4, 1])


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
