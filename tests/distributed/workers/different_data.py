"""Ranks whose data sets or loaders differ: each is told at the start what differs, and where."""

import re
import socket
import sys
import tempfile
from contextlib import chdir

import pytest
import torch
from support.launch import Cells
from support.nets import floats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from hybridtrain import EvalLoader, HybridModel, Loader, Session, Trainer
from hybridtrain.data import InMemoryDataset
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.schedule import make_schedule, write_csv

cells = Cells()


class Numbered(Dataset):
    """Samples that it makes when they are read: of what it reads, it can tell the number alone."""

    def __init__(self, samples):
        self.length = samples

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return floats(4, seed=index), floats(4, seed=index)


class Files(Numbered):
    """The same, of files."""

    def __init__(self, files):
        super().__init__(len(files))
        self.files = files


def on_each_rank(values):
    """The end of an error that names `values`, one for each rank, and the host."""
    host = socket.gethostname()
    return ", ".join(f"{value} on rank {rank} ({host})" for rank, value in enumerate(values))


def train(world, samples, of_eval, **options):
    model = HybridModel(nn.Linear(4, 4), world)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        F.mse_loss,
        Loader(Numbered(samples), 20, world),
        evaluation=EvalLoader(Numbered(of_eval), 20, world),
        **options,
    )
    return trainer.fit()


def add_lengths(name, lengths, loader, **options):
    @cells.add(name)
    def _(world):
        of_train, of_eval = (of_split[world.rank] for of_split in lengths)
        differing = next(each for each in lengths if len(set(each)) > 1)
        values = on_each_rank([f"{each} samples" for each in differing])
        with pytest.raises(DataError) as raised:
            train(world, of_train, of_eval, **options)
        assert str(raised.value).startswith(
            f"the number of samples of Numbered in {loader} differs between the ranks: {values}"
        )


for lengths, options in [
    ((400, 300), {"epochs": 2}),
    ((400, 40), {"epochs": 2}),
    ((300, 400), {"epochs": 2}),
    ((400, 300), {"steps": 60}),
]:
    ending = next(iter(options))
    add_lengths(
        f"{lengths[0]} and {lengths[1]} samples to train on are an error before the first step, "
        f"with {ending}",
        [lengths, (20, 20)],
        "TrainLoader",
        **options,
    )
for lengths in [(60, 40), (60, 100)]:
    add_lengths(
        f"{lengths[0]} and {lengths[1]} samples to evaluate on are an error before the first step",
        [(40, 40), lengths],
        "EvalLoader",
        steps=2,
    )


def arrays(samples=40, seed=0):
    return TensorDataset(floats(samples, 4, seed=seed), floats(samples, 4, seed=seed + 1))


def files(folder, *names):
    return Files([(f"{folder}/{name}", 0) for name in names])


def other_arrays(world):
    return arrays(seed=world.rank)


def other_arrays_in_memory(world):
    return InMemoryDataset(*arrays(seed=world.rank).tensors)


def a_part_of_the_samples(world):
    return Subset(arrays(80), range(world.rank, 80, 2))


def a_split_without_a_seed(world):
    torch.manual_seed(world.rank)
    return random_split(arrays(80), [60, 20])[0]


def other_files(world):
    return files("/data", "a/1.png", "b/2.png" if world.rank else "b/3.png")


def files_in_another_order(world):
    names = ["a/1.png", "a/2.png", "b/1.png"]
    return files("/data", *(reversed(names) if world.rank else names))


def other_labels(world):
    return Files([("/data/a/1.png", world.rank), ("/data/b/1.png", 1)])


def a_joined_set_of_other_files(world):
    return ConcatDataset([Numbered(3), other_files(world)])


for make in (
    other_arrays,
    other_arrays_in_memory,
    a_part_of_the_samples,
    a_split_without_a_seed,
    other_files,
    files_in_another_order,
    other_labels,
    a_joined_set_of_other_files,
):

    @cells.add(f"equally many samples that differ are an error: {make.__name__.replace('_', ' ')}")
    def _(world, make=make):
        for loader in (Loader, EvalLoader):
            with pytest.raises(DataError, match=r"the samples of \w+ in \w+ differ between"):
                loader(make(world), 2, world)


@cells.add("a session refuses a DataLoader whose data set has another length on another rank")
def _(world):
    loader = DataLoader(Numbered(40 - 10 * world.rank), batch_size=4)
    with pytest.raises(DataError, match="number of samples of Numbered in TrainLoader differs"):
        Session(world=world).prepare(nn.Linear(4, 4), loader)


for setting, values in {
    "batch_size": (4, 8),
    "seed": (0, 1),
    "shuffle": (True, False),
    "drop_last": (True, False),
    "first_batches": (None, 2),
}.items():

    @cells.add(f"another {setting}= on another rank is an error")
    def _(world, setting=setting, values=values):
        settings = {"batch_size": 4, setting: values[world.rank]}
        with pytest.raises(ConfigError) as raised:
            Loader(arrays(), settings.pop("batch_size"), world, **settings)
        assert str(raised.value) == (
            f"{setting}= of TrainLoader differs between the ranks: {on_each_rank(values)}"
        )


for option, values in {"steps": (2, 3), "clip_norm": (None, 1.0)}.items():

    @cells.add(f"another {option}= of a trainer on another rank is an error")
    def _(world, option=option, values=values):
        model = HybridModel(nn.Linear(4, 4), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"steps": 2, option: values[world.rank]}
        with pytest.raises(ConfigError) as raised:
            Trainer(model, optimizer, nn.MSELoss(), Loader(arrays(), 4, world), **options)
        assert str(raised.value) == (
            f"{option}= of TrainerOptions differs between the ranks: {on_each_rank(values)}"
        )


@cells.add("another schedule under the same name on one rank is an error on all ranks")
def _(world):
    names = ("1f1b", "gpipe")
    with chdir(tempfile.mkdtemp()):  # a path that is the same on each host, and the file is not
        write_csv(make_schedule(names[world.rank], 1, 4), "mine.csv")
        tables = on_each_rank(f"table {make_schedule(name, 1, 4).digest}" for name in names)
        told = f"schedule=mine.csv .*{re.escape(tables)}"
        with pytest.raises(ConfigError, match=told):
            HybridModel(nn.Linear(4, 4), world, chunks=4, schedule="mine.csv")


@cells.add("the file of a schedule that one rank does not have is an error on all ranks")
def _(world):
    with chdir(tempfile.mkdtemp()):
        if world.rank == 0:
            write_csv(make_schedule("1f1b", 1, 4), "there.csv")
        told = "schedule=there.csv .* on rank 0 .*there.csv: .* on rank 1"
        with pytest.raises(ConfigError, match=told):
            HybridModel(nn.Linear(4, 4), world, chunks=4, schedule="there.csv")


@cells.add("the same samples are accepted, from files in another folder on each rank")
def _(world):
    folder = f"/scratch/{world.rank}/job"
    for same in (arrays(), Numbered(8), files(folder, "a/1.png", "b/2.png"), files(folder, "1")):
        assert EvalLoader(same, 2, world).samples == (len(same) + 1 - world.rank) // 2
        assert len(Loader(same, 1, world)) == len(same)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
