"""Ranks whose data or settings differ: each is told at the start what differs, and where."""

import logging
import re
import socket
import sys
import tempfile
from contextlib import chdir
from functools import cache, partial

import pytest
import torch
from support.launch import Cells
from support.nets import floats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from hybridtrain import EvalLoader, HybridModel, Loader, Session, Trainer, World
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


@cache
def pipeline():
    return World.from_env(2, "cpu", engine="distributed")


def own_loop(world, net, make_optimizer, loss):
    model = HybridModel(net, world, chunks=2)
    optimizer = make_optimizer(model.parameters())
    for _ in range(2):
        model.train_step(floats(4, 4), floats(4, 4, seed=1), loss)
        optimizer.step()


def with_session(world, net, make_optimizer, loss):
    session = Session(world=world, chunks=2)
    loader = DataLoader(arrays(8), batch_size=8)
    _, optimizer, loader = session.prepare(net, make_optimizer(net.parameters()), loader)
    for batch in loader:
        session.forward_backward(*batch, loss)
        optimizer.step()


def with_trainer(world, net, make_optimizer, loss):
    model = HybridModel(net, world, chunks=2)
    loader = Loader(arrays(8), 8, world)
    Trainer(model, make_optimizer(model.parameters()), loss, loader, steps=1).fit()


def scaled(factor):
    return lambda output, targets: F.mse_loss(output, targets) * factor


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def in_groups(**settings):
    return lambda params: torch.optim.SGD([{"params": list(params), **settings}], lr=0.1)


DROPOUT, OPTIMIZER, LOSS = (partial(nn.Dropout, 0.0), partial(torch.optim.SGD, lr=0.1), F.mse_loss)
# what differs, the place of the setting in a script, the other rank's setting, and what is said
OTHERS = [
    ("rate of a dropout", 0, partial(nn.Dropout, 0.5), "p= of the layer '1' (Dropout)", "0.0 0.5"),
    ("class of a layer", 0, nn.Identity, "the class of the layer '1'", "Dropout Identity"),
    ("learning rate", 1, partial(torch.optim.SGD, lr=1.0), "lr= of the optimizer", "0.1 1.0"),
    ("optimizer", 1, torch.optim.Adam, "the class of the optimizer", "SGD Adam"),
    ("loss", 2, F.l1_loss, "the loss", "mse_loss l1_loss"),
    ("setting of a loss", 2, nn.HuberLoss(delta=2.0), "delta= of the loss HuberLoss", "1.0 2.0"),
    ("code of a loss", 2, lambda a, b: (a - b).abs().mean(), "the code of the loss <lambda>", None),
]
FIRST = {"setting of a loss": nn.HuberLoss(), "code of a loss": scaled(0.3)}


def add_setting(name, place, other, what, values, level, engine):
    @cells.add(f"another {name} on one rank is an error: {level.__name__}, engine={engine}")
    def _(world):
        parts = [DROPOUT, OPTIMIZER, LOSS]
        parts[place] = other if world.rank else FIRST.get(name, parts[place])
        world = pipeline() if engine == "distributed" else world
        net = nn.Sequential(nn.Linear(4, 4), parts[0](), nn.Linear(4, 4))
        with pytest.raises(ConfigError) as raised:
            level(world, net, *parts[1:])
        said = str(raised.value)
        assert said.startswith(f"{what} differs between the ranks: "), said
        assert values is None or on_each_rank(values.split()) in said, said


for level in (own_loop, with_session, with_trainer):
    for engine in ("local", "distributed"):
        for other in OTHERS:
            if level is not own_loop or other[1] != 1:  # see test_uncaught.py
                add_setting(*other, level, engine)


@cells.add("another schedule of learning rates on one rank is an error before the second update")
def _(world):
    model = HybridModel(nn.Linear(4, 4), world)
    optimizer = OPTIMIZER(model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=(0.5, 0.1)[world.rank])
    options = {"lr_schedule": rates, "steps": 3}
    trainer = Trainer(model, optimizer, F.mse_loss, Loader(arrays(), 4, world), **options)
    with pytest.raises(ConfigError, match="lr= of parameter group 0") as raised:
        trainer.fit()
    assert on_each_rank((0.05, 0.1 * 0.1)) in str(raised.value)


def warnings_of(script, *arguments):
    """Returns what a script warns of in this process."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hybridtrain").addHandler(handler)
    script(*arguments)
    logging.getLogger("hybridtrain").removeHandler(handler)
    return [text for text in records if "differs between the ranks" in text]


@cells.add("other parameter groups on one rank of a stage are an error, of another stage a warning")
def _(world):
    optimizer, net = in_groups(weight_decay=0.5 * world.rank), nn.Linear(4, 4)
    groups = "weight_decay= of parameter group 0 of the optimizer differs between the ranks: "
    with pytest.raises(ConfigError, match=groups) as raised:
        with_session(world, net, optimizer, F.mse_loss)
    assert on_each_rank((0.0, 0.5)) in str(raised.value)
    net = nn.Sequential(net, nn.Linear(4, 4))
    warned = warnings_of(with_session, pipeline(), net, optimizer, F.mse_loss)
    assert len(warned) == world.is_main
    assert all(text.startswith(groups + on_each_rank((0.0, 0.5))) for text in warned)


@cells.add("another number in a module or a loss of the script on one rank is a warning")
def _(world):
    number = 0.5 + world.rank
    for module, loss, what in [
        (Scale(number), F.mse_loss, "factor= of the layer '0' (Scale)"),
        (Scale(1.0), scaled(number), "a number in the loss <lambda>"),
    ]:
        net = nn.Sequential(module, nn.Linear(4, 4))
        warned = warnings_of(own_loop, world, net, OPTIMIZER, loss)
        assert [text.startswith(what) for text in warned] == [True] * world.is_main
        assert all(on_each_rank((0.5, 1.5)) in text for text in warned)


class KnowsItsRank(nn.Linear):
    def __init__(self, world):
        super().__init__(4, 4)
        self.rank, self.is_main, self.host = world.rank, world.is_main, f"node{world.rank}"

    def extra_repr(self):
        return self.host


@cells.add("a model and a loss that know their rank are accepted, and ranks without an optimizer")
def _(world):
    class NoOptimizer:
        def step(self):
            pass

    def loss(output, targets, _rank=world.rank):
        return F.mse_loss(output, targets)

    def optimizer(params):
        return NoOptimizer() if world.rank else OPTIMIZER(params)

    own_loop(world, KnowsItsRank(world), optimizer, partial(loss, _rank=world.rank))


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
