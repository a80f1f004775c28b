"""Runs on streams and on loaders of one's own: a resumed one ends with bitwise equal weights."""

import itertools

import pytest
import torch
from support.streams import ShuffledStream
from support.training import Recorder, assert_same_run, rich_net
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hybridtrain import HybridModel, Loader, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader, OwnLoader, StreamLoader
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.launch import Phase, activity
from hybridtrain.loss import cross_entropy
from hybridtrain.options import LoaderOptions

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

SAMPLES = 22  # in batches of 4, 6 an epoch


def sample(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, generator=generator), number % 3


class Plain(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from (sample(100 * self.epoch + i) for i in range(SAMPLES))


class Shuffled(ShuffledStream, Plain):
    """Its samples do not depend on the epoch, but their order does."""

    def __init__(self):
        super().__init__(SAMPLES)

    def read(self, index):
        return sample(index)


class Batched(Shuffled):
    """The same in batches of 2, as a loader; none is short, so a state is never past the last."""

    def __iter__(self):
        samples = super().__iter__()
        while batch := list(itertools.islice(samples, 2)):
            yield default_collate(batch)


class Table(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


class Buckets:
    """Batches of samples of similar size, in another order each epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from ([2 * i, 2 * i + 1] for i in order)


def stream_of(data, workers=0):
    return lambda world: StreamLoader(data(), 4, world, options=LoaderOptions(workers=workers))


def shuffled(_):
    torch.manual_seed(5)
    return DataLoader(Table(), 2, shuffle=True)


TRAIN = {
    "stream": stream_of(Plain),
    "stream in workers": stream_of(Plain, 2),
    "stream with a state": stream_of(Shuffled),
    "stream with a state in workers": stream_of(Shuffled, 2),
    "own loader": lambda _: DataLoader(Table(), batch_sampler=Buckets()),
    "own loader that shuffles": shuffled,
    "own loader with a state": lambda _: Batched(),
}


def trainer(kind, **options):
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(rich_net(), world, chunks=1, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options = {"steps": 9, "log_every": 2, **options}
    recorder = Recorder()
    trainer = Trainer(
        model, optimizer, cross_entropy, TRAIN[kind](world), callbacks=[recorder], accumulate=2,
        evaluation=EvalLoader(Plain(), 4, world), **options,
    )  # fmt: skip
    trainer.recorder = recorder
    return trainer


@pytest.mark.parametrize("step", [3, 7])
@pytest.mark.parametrize("kind", TRAIN)
@pytest.mark.quick_cases(1)
def test_a_resumed_run_equals_the_uninterrupted_one(kind, step, tmp_path):
    whole = trainer(kind)
    whole.fit()
    first = trainer(kind, store=CheckpointStore(tmp_path))
    first.total_steps = step
    first.fit()
    again = trainer(kind)
    for parameter in again.model.parameters():
        nn.init.zeros_(parameter)
    again.resume(first.store.newest())
    torch.manual_seed(1234)
    again.fit()
    assert_same_run(again, whole)
    assert again.summary()["eval"] == whole.summary()["eval"]
    assert again.summary()["eval"]["samples"] == SAMPLES


def test_a_run_on_a_loader_of_ones_own_resumes_from_a_checkpoint_without_generators(tmp_path):
    first = trainer("own loader", store=CheckpointStore(tmp_path))
    first.total_steps = 3
    del first.states["data"]
    first.fit()
    again = trainer("own loader")
    again.resume(first.store.newest())
    assert (again.epoch, again.batch) == (0, 6)


@pytest.mark.parametrize("kind", ["stream with a state", "own loader with a state"])
@pytest.mark.quick_cases(1)
def test_a_run_saved_before_its_first_step_goes_on(kind, tmp_path):
    whole = trainer(kind)
    whole.fit()
    first = trainer(kind, store=CheckpointStore(tmp_path))
    first.save()
    again = trainer(kind)
    again.resume(first.store.newest())
    again.fit()
    assert_same_run(again, whole)


@pytest.mark.parametrize("kind", TRAIN)
@pytest.mark.quick_cases("stream with a state")
def test_a_step_that_has_failed_is_taken_by_the_next_fit(kind):
    whole = trainer(kind)
    whole.fit()
    ours = trainer(kind)
    step, calls = ours._training_step, iter(range(100))

    def fails_in_the_fifth(*args):
        if next(calls) == 4:
            raise ValueError("the fifth")
        return step(*args)

    ours._training_step = fails_in_the_fifth
    with pytest.raises(ValueError, match="the fifth"):
        ours.fit()
    before = ours.train.epoch, ours.train.batch
    ours.fit()
    assert (ours.step, before) == (9, (1, 2) if "stream" in kind else before)
    assert_same_run(ours, whole)


def test_a_run_begins_at_the_start_of_its_loader_which_stays_where_it_was():
    world = World.from_env(nb_part=2, devices="cpu")
    loader = Loader(Table(), 4, world)
    next(iter(loader))  # a look at a batch
    seen = []
    for _ in range(2):
        model = HybridModel(rich_net(), world, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        ours = Trainer(model, optimizer, cross_entropy, loader, steps=3, log_every=1)
        ours.fit()
        seen.append((ours.epoch, ours.batch, ours.summary()["train_loss"]))
    assert seen[0] == seen[1]
    assert seen[0][:2] == (0, 3)
    assert (loader.epoch, loader.batch) == (0, 1)


def test_epochs_of_a_stream_without_length_are_refused():
    with pytest.raises(ConfigError, match=r"^epochs=2 needs the length of the training.*steps="):
        trainer("stream", steps=None, epochs=2)


def test_a_step_does_not_reach_into_the_next_epoch_of_a_stream():
    ours = trainer("stream")
    ours.fit()
    # 22 samples an epoch, two batches of 4 a step; the last batch of an epoch has 2
    assert [samples for _, samples in ours.recorder.steps] == [8, 8, 6] * 3
    assert (ours.epoch, ours.batch) == (3, 0)


def test_anything_else_that_is_passed_to_train_on_is_refused():
    world = World.from_env(devices="cpu")
    model = HybridModel(rich_net(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DataError, match=r"generator is not a loader: .*__iter__"):
        Trainer(model, optimizer, cross_entropy, (i for i in range(3)), steps=1)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_stream_may_take_as_long_as_it_needs_to_its_place(own):
    phases = []

    class Watched(Plain):
        def __iter__(self):
            for each in super().__iter__():
                phases.append(str(activity.work))
                yield each

    world = World.from_env(devices="cpu")
    source = DataLoader(Watched(), 4) if own else Watched()
    loader = OwnLoader(source, world) if own else StreamLoader(source, 4, world)
    for batch, expected in ((0, "step 1: data"), (3, "setup")):
        activity.now(Phase.DATA, 1)
        loader.seek(0, batch * loader.batch_size)
        stream = loader.stream()
        next(stream)
        stream.close()
        assert set(phases) == {expected}
        phases.clear()
    activity.set(None)
