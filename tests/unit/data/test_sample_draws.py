"""What a sample draws is a function of the seed, the epoch and the sample."""

import itertools
import random

import numpy as np
import pytest
import torch
from support.loaders import world_of
from torch.utils.data import Dataset, default_collate

from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.options import LoaderOptions


class Drawn(Dataset):
    """Sample i is i and what it draws, by `torch.rand`, in place, a permutation and a dropout."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        torchs = (torch.rand(2), torch.empty(2).uniform_(), torch.randperm(5).float())
        dropped = torch.nn.functional.dropout(torch.ones(4), 0.5)  # takes no generator
        return torch.tensor(index), torch.cat([*torchs, dropped])


class DrawnElsewhere(Drawn):
    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor([random.random(), np.random.random()])


def batches(dataset=None, replica=0, replicas=1, seed=3, start=(0, 0), count=9, **options):
    world = world_of(replica, replicas)
    loader = TrainLoader(dataset or Drawn(), 8, world, seed=seed, options=LoaderOptions(**options))
    loader.seek(start[0], start[1] * 8)
    stream = loader.stream()
    try:
        return [(batch.inputs, batch.targets) for batch in itertools.islice(stream, count)]
    finally:
        stream.close()


def assert_equal(one, other):
    assert len(one) == len(other)
    for (x, y), (x_other, y_other) in zip(one, other, strict=True):
        assert torch.equal(x, x_other)
        assert torch.equal(y, y_other)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.quick_cases(1)
def test_a_resume_inside_an_epoch_draws_what_an_uninterrupted_run_does(workers):
    whole = batches()
    assert_equal(batches(start=(1, 2), count=4, workers=workers), whole[5:])


def test_replicas_draw_what_one_process_does():
    parts = [batches(replica=i, replicas=2, workers=i) for i in range(2)]
    joined = [
        tuple(torch.cat(pair) for pair in zip(*two, strict=True))
        for two in zip(*parts, strict=True)
    ]
    assert_equal(joined, batches())


def test_epochs_seeds_and_samples_draw_other_numbers():
    drawn = [y for of_seed in (3, 4) for _, y in batches(seed=of_seed)]
    rows = torch.cat(drawn)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 2 * 9 * 8


def test_evaluations_draw_the_same_numbers_each_time():
    loader = EvalLoader(Drawn(), 8, world_of(0, 1))
    assert_equal([*loader], [*loader])


def test_a_collate_that_draws_draws_the_same_after_a_resume():
    def masked(items):
        x, y = default_collate(items)
        return x, y * torch.rand(y.shape)

    assert_equal(batches(start=(0, 2), count=3, collate=masked), batches(collate=masked)[2:5])


def test_in_worker_processes_draws_of_python_and_numpy_are_the_same_after_a_resume():
    whole = batches(DrawnElsewhere(), workers=1)
    assert_equal(batches(DrawnElsewhere(), start=(1, 1), count=2, workers=2), whole[4:6])
    assert len({tuple(row.tolist()) for _, y in whole for row in y}) == 72


def test_the_default_generator_of_the_run_is_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    batches()
    assert torch.equal(torch.rand(4), expected)
