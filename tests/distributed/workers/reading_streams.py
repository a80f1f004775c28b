"""Streams in pipelines of four processes, or two of two: the others learn what the first reads."""

import itertools
import multiprocessing
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.launch import Cells
from support.streams import ShuffledStream
from support.training import Recorder, assert_same
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from hybridtrain import HybridModel, OptimizerStep, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader, OwnLoader, StreamLoader
from hybridtrain.loop import predict
from hybridtrain.loss import accuracy, cross_entropy
from hybridtrain.options import LoaderOptions

torch.set_num_threads(1)
cells = Cells()

SAMPLES = 22  # in batches of 6 the last one is short
V = {"schedule": "zb-v", "stages_per_device": 2}


def net():
    """A net with dropout, without batch norm: some micro-batches have one sample."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 8)
    return nn.Sequential(*layers, nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def sample(number):
    drawn = torch.Generator().manual_seed(number)
    label = -100 if number % 3 == 0 else number % 3
    return torch.randn(6, generator=drawn), torch.tensor(label)


class Plain(IterableDataset):
    """Has other samples in each epoch."""

    def __init__(self, replica=0, replicas=1):
        self.epoch = self.reads = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(SAMPLES):
            self.reads += 1
            yield sample(100 * self.epoch + number)


class Stateful(ShuffledStream, Plain):
    """Its order goes on from epoch to epoch, so it can be resumed only from its state."""

    def __init__(self, replica=0, replicas=1):
        Plain.__init__(self)
        ShuffledStream.__init__(self, SAMPLES)

    def read(self, index):
        self.reads += 1
        return sample(index)


class Divided(Plain):
    """Each replica reads its own samples, the first one twice as many as the others."""

    def __init__(self, replica=0, replicas=1):
        super().__init__()
        self.replica, self.at = replica, 0

    def __iter__(self):
        last = SAMPLES if self.replica == 0 else SAMPLES // 2
        while self.at < last:
            self.at += 1
            self.reads += 1
            yield sample(1000 * self.replica + 100 * self.epoch + self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Passes(Divided):
    """Counts its passes itself, so it can be resumed only from its state."""

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


class Batches(Stateful):
    """A custom loader: batches of different sizes and of each replica, with a state."""

    def __init__(self, replica=0, replicas=1):
        super().__init__()
        self.generator.manual_seed(replica)

    def __iter__(self):
        samples, sizes = super().__iter__(), {0: 5, 5: 3, 8: 6, 14: 4, 18: 4}
        while self.at < SAMPLES:
            yield default_collate(list(itertools.islice(samples, sizes[self.at])))
        assert next(samples, None) is None  # which ends the epoch


class Drawn(Plain):
    """A custom loader without a state: it draws its order from its generator in each epoch."""

    def __init__(self, replica=0, replicas=1):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5 + replica)

    def __iter__(self):
        for numbers in torch.randperm(SAMPLES, generator=self.generator).split(5):
            self.reads += 1
            yield default_collate([sample(int(number)) for number in numbers])


OWN = (Batches, Drawn)


def second(samples):
    return default_collate(samples[1:2])


class Children(Recorder):
    """Also counts the worker processes of each step."""

    def __init__(self):
        super().__init__()
        self.children = set()

    def on_step(self, run, samples):
        super().on_step(run, samples)
        self.children.add(len(multiprocessing.active_children()))


def model_of(world, everywhere=False, **options):
    model = HybridModel(net(), world, **{"chunks": 2, "seed": 3, "split": "uniform", **options})
    if everywhere:
        model.pipeline.readers = tuple(range(world.processes_per_replica))
    return model


def loader_of(kind, world, **options):
    data = kind(world.data_parallel_rank, world.data_parallel_size)
    if kind in OWN:
        return OwnLoader(data, world)
    options.setdefault("divided", issubclass(kind, Divided))
    return StreamLoader(data, 6, world, options=LoaderOptions(**options))


def trainer_of(kind, world, everywhere=False, loading=None, store=None, options=None, **settings):
    model = model_of(world, everywhere, **(options or {}))
    evaluated = {} if kind in OWN else dict(loading or {})
    data = (Plain if kind in OWN else kind)(world.data_parallel_rank, world.data_parallel_size)
    made = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), 0.02),
        cross_entropy,
        loader_of(kind, world, **(loading or {})),
        evaluation=EvalLoader(
            data, 6, world, options=LoaderOptions(divided=issubclass(kind, Divided), **evaluated)
        ),
        metrics={"accuracy": accuracy()},
        callbacks=[recorder := Children()],
        log_every=1,
        store=store,
        **(settings or {"steps": 6}),
    )
    made.recorder = recorder
    return made


def check_same(ours, theirs):
    assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights")
    assert (ours.step, ours.samples, ours.epoch) == (theirs.step, theirs.samples, theirs.epoch)
    assert ours.recorder.reproducible() == theirs.recorder.reproducible()


def reads_of(trainer):
    return trainer.train.dataset.reads + trainer.evaluation.dataset.reads


CASES = {
    "a stream": (Plain, {}, {"epochs": 2}),
    "accumulated batches": (Plain, {}, {"accumulate": 3, "steps": 4}),
    "the last batch is dropped": (Stateful, {"drop_last": True}, {}),
    "a stream with a state": (Stateful, {}, {}),
    "a stream that divides itself": (Divided, {}, {"steps": 10}),
    "fewer samples in a batch than were read": (Plain, {"collate": second}, {}),
    "a custom loader": (Batches, {}, {"steps": 7}),
}


class OfLength(Plain):
    def __len__(self):
        return SAMPLES


for name, (kind, loading, settings) in CASES.items():
    kind = OfLength if "epochs" in settings else kind

    @cells.add(
        f"only the ends of a pipeline of four read, and the run is the same: {name}",
        thorough=name != "a stream",
    )
    def _(world, kind=kind, loading=loading, settings=settings):
        world = World.from_env(4, "cpu", engine="distributed")
        ours = trainer_of(kind, world, loading=loading, **settings)
        ours.fit()
        assert (reads_of(ours) == 0) == (world.rank in (1, 2))
        theirs = trainer_of(kind, world, everywhere=True, loading=loading, **settings)
        theirs.fit()
        assert reads_of(theirs)
        check_same(ours, theirs)


@cells.add("a pipeline of four in one process has the same run on a stream", thorough=True)
def _one_process(world):
    world = World.from_env(4, "cpu", engine="distributed")
    ours = trainer_of(Plain, world)
    ours.fit()
    theirs = trainer_of(Plain, World(devices=(torch.device("cpu"),) * 4))
    theirs.fit()
    assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights")


@cells.add("worker processes of a stream run only for the ends of a pipeline")
def _workers(world):
    world = World.from_env(4, "cpu", engine="distributed")
    ours = trainer_of(Plain, world, loading={"workers": 2})
    ours.fit()
    assert ours.recorder.children == ({0} if world.rank in (1, 2) else {2})
    theirs = trainer_of(Plain, world, everywhere=True)
    theirs.fit()
    check_same(ours, theirs)


for inner, kind in itertools.product(("pp", "dp"), (Plain, Divided, Batches)):

    @cells.add(
        f"in two Vs the first process of each reads {kind.__name__}: inner={inner}",
        thorough=True,
    )
    def _(world, inner=inner, kind=kind):
        world = World.from_env(2, "cpu", engine="distributed", inner=inner)
        settings = {"options": V, "steps": 9}
        ours = trainer_of(kind, world, **settings)
        ours.fit()
        assert (reads_of(ours) == 0) == (world.pipeline_rank == 1)
        theirs = trainer_of(kind, world, everywhere=True, **settings)
        theirs.fit()
        assert reads_of(theirs)
        check_same(ours, theirs)


class One(Plain):
    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 1, 2)


class Empty(Divided):
    """Has samples for the first replica alone."""

    def __iter__(self):
        yield from super().__iter__() if self.replica == 0 else ()


@cells.add("a replica without samples takes part where the second process does not read")
def _no_samples(world):
    world = World.from_env(2, "cpu", engine="distributed")
    settings = {"options": V, "steps": 5}
    for kind in (One, Empty):
        ours = trainer_of(kind, world, **settings)
        ours.fit()
        theirs = trainer_of(kind, world, everywhere=True, **settings)
        theirs.fit()
        check_same(ours, theirs)


@cells.add("four processes with two logical replicas read only at the ends")
def _logical(world):
    world = World.from_env(4, "cpu", engine="distributed", replicas=2)
    ours, theirs = trainer_of(Plain, world), trainer_of(Plain, world, everywhere=True)
    ours.fit()
    theirs.fit()
    assert (reads_of(ours) == 0) == (world.rank in (1, 2))
    check_same(ours, theirs)


for kind, at, end in (
    (Stateful, 3, 10),
    (Stateful, 4, 10),
    (Batches, 7, 10),
    (Drawn, 7, 12),
    (Divided, 5, 7),
):

    @cells.add(
        f"a run on {kind.__name__} that only some processes read resumes at step {at}, also in one "
        "process with other stages",
        thorough=(kind, at) != (Batches, 7),
    )
    def _(world, kind=kind, at=at, end=end):
        world = World.from_env(4, "cpu", engine="distributed")
        folder = Path(world.from_main(lambda: tempfile.mkdtemp()))
        alone = World(devices=(torch.device("cpu"),) * 2)
        whole = trainer_of(kind, world, steps=end)
        whole.fit()
        trainer_of(kind, world, steps=at, store=CheckpointStore(folder)).fit()
        for place in (world, alone):
            resumed = trainer_of(kind, place, steps=end)
            resumed.resume(folder)
            resumed.fit()
            assert_same(resumed.model.state_dict(), whole.model.state_dict(), "weights")
            assert resumed.samples == whole.samples
        # and a run of one process goes on in four
        world.gather(None)
        other = Path(world.from_main(lambda: tempfile.mkdtemp()))
        if world.is_main:
            trainer_of(kind, alone, steps=at, store=CheckpointStore(other)).fit()
        world.gather(None)
        resumed = trainer_of(kind, world, steps=end)
        resumed.resume(other)
        resumed.fit()
        assert (resumed.train.dataset.reads == 0) == (world.rank in (1, 2))
        assert_same(resumed.model.state_dict(), whole.model.state_dict(), "weights")
        if kind is Divided:  # now all read, from where the readers are
            inputs = next(resumed.train.stream()).inputs
            assert all(torch.equal(inputs, others) for others in world.gather(inputs))


@cells.add("replicas that divide a stream resume their own states where processes alternate")
def _states_of_replicas(world):
    world = World.from_env(2, "cpu", engine="distributed", inner="dp")
    folder = Path(world.from_main(lambda: tempfile.mkdtemp()))
    settings = {"options": V}
    whole = trainer_of(Passes, world, steps=13, **settings)
    whole.fit()
    assert (reads_of(whole) == 0) == (world.pipeline_rank == 1)
    trainer_of(Passes, world, steps=10, store=CheckpointStore(folder), **settings).fit()
    resumed = trainer_of(Passes, world, steps=13, **settings)
    resumed.resume(folder)
    resumed.fit()
    assert_same(resumed.model.state_dict(), whole.model.state_dict(), "weights")


@cells.add("the outputs of a stream are predicted where the middle processes read nothing")
def _predicted(world):
    world = World.from_env(4, "cpu", engine="distributed")
    model, everywhere = model_of(world), model_of(world, everywhere=True)
    data = Plain()
    outputs = predict(model, EvalLoader(data, 6, world))
    assert (data.reads == 0) == (world.rank in (1, 2))
    assert len(outputs) == SAMPLES
    assert torch.equal(outputs, predict(everywhere, EvalLoader(Plain(), 6, world)))


def own_loop(kind, world, everywhere):
    model = model_of(world, everywhere)
    loader = loader_of(kind, world)
    step = OptimizerStep(model, torch.optim.AdamW(model.parameters(), 0.02))
    for stop in (2, None, 1):  # leaves the first epoch early, and then the third
        for batch in itertools.islice(loader.batches(model.readers), stop):
            step.run([batch], cross_entropy)
    return model, loader


for kind in (Plain, Batches):

    @cells.add(
        f"a custom loop over {kind.__name__} reads where the model needs batches",
        thorough=kind is Plain,
    )
    def _(world, kind=kind):
        world = World.from_env(4, "cpu", engine="distributed")
        ours, loader = own_loop(kind, world, everywhere=False)
        assert (loader.dataset.reads == 0) == (world.rank in (1, 2))
        theirs, whole = own_loop(kind, world, everywhere=True)
        assert (loader.epoch, loader.batch) == (whole.epoch, whole.batch)
        assert_same(ours.state_dict(), theirs.state_dict(), "weights")


@cells.add("a pipeline of two processes exchanges nothing about its stream")
def _two(world):
    world = World.from_env(2, "cpu", engine="distributed")
    # each pair alone, as the only pipeline
    world.data_parallel_size, world.data_parallel_rank = 1, 0
    world.begin_max = world.begin_max_in_pipeline = lambda values: pytest.fail("a message")
    loader, data = loader_of(Plain, world), Plain()
    assert len(list(loader.batches((0, 1)))) == 4
    assert len(list(EvalLoader(data, 6, world).by_replica((0, 1)))) == 4
    assert loader.dataset.reads == data.reads == SAMPLES


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
