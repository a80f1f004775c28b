"""Batches of samples of similar length: every sample once, in an exact order, with exact resume."""

import itertools
import json

import pytest
import torch
from support.loaders import take, world_of
from torch.utils.data import Dataset

from hybridtrain.data import Loader, StreamLoader
from hybridtrain.errors import CheckpointError, DataError

LENGTHS = [(7 * number) % 23 + 1 for number in range(46)]


class Texts(Dataset):
    """The sample `number` has a length of `LENGTHS[number]`."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, number):
        return torch.tensor(number), torch.tensor(LENGTHS[number])

    def lengths(self):
        return LENGTHS


def loader(replica=0, replicas=1, batch_size=4, seed=0, grouped=True):
    world = world_of(replica, replicas)
    return Loader(Texts(), batch_size, world, seed=seed, group_by_length=grouped)


def epoch_of(source):
    return [inputs.tolist() for inputs, _ in source]


def spread(batches):
    return sum(max(LENGTHS[i] for i in batch) - min(LENGTHS[i] for i in batch) for batch in batches)


def test_a_batch_has_samples_of_similar_length_and_an_epoch_every_sample_once():
    batches, plain = epoch_of(loader()), epoch_of(loader(grouped=False))
    assert sorted(itertools.chain(*batches)) == list(range(len(LENGTHS)))
    assert [len(batch) for batch in batches] == [4] * 11 + [2]
    assert spread(batches[:-1]) < spread(plain[:-1]) / 4
    # short and long batches are mixed
    means = [sum(LENGTHS[i] for i in batch) for batch in batches[:-1]]
    assert means not in (sorted(means), sorted(means, reverse=True))


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_replicas():
    source = loader()
    first, second = epoch_of(source), epoch_of(source)
    assert first == epoch_of(loader())
    assert first != second
    assert first != epoch_of(loader(seed=1))
    halves = [epoch_of(loader(replica, 2)) for replica in (0, 1)]
    assert [one + other for one, other in zip(*halves, strict=True)] == first


def test_a_resumed_epoch_goes_on_with_the_batches_that_are_left():
    source = loader()
    done = take(source, 5)
    state = source.state_dict()
    other = loader()
    other.load_state_dict(state)
    left = take(other, 7)
    batches = [batch.inputs.tolist() for batch in [*done, *left]]
    assert batches == epoch_of(loader())


CHANGES = {
    "batch_size": ({}, {"batch_size": 8}, "batch_size=4, but this run has batch_size=8"),
    "grouped": ({}, {"grouped": False}, "group_by_length=True, but this run has group_by_length=F"),
    "not grouped": ({"grouped": False}, {}, "group_by_length=False, but this run has group_by_len"),
    "seed": ({}, {"seed": 1}, "seed=0, but this run has seed=1: resume with seed=0, change it"),
}


@pytest.mark.parametrize(("before", "after", "message"), CHANGES.values(), ids=CHANGES)
def test_an_epoch_does_not_go_on_in_another_order(before, after, message):
    source = loader(**before)
    take(source, 5)
    state = json.loads(json.dumps(source.state_dict()))
    with pytest.raises(CheckpointError, match=f"middle of an epoch in an order .* {message}"):
        loader(**after).load_state_dict(state)
    older = {key: value for key, value in state.items() if key != "order"}
    older |= {"grouped": True} if before == {} else {}  # as version 0.2 saved it
    loader(**before).load_state_dict(older)
    if after != {"seed": 1}:
        with pytest.raises(CheckpointError, match=message):
            loader(**after).load_state_dict(older)
    take(source, 7)  # to the end of the epoch
    loader(**after).load_state_dict(source.state_dict())


def test_data_without_lengths_is_refused_by_name():
    with pytest.raises(DataError, match=r"group_by_length=True: list has no method lengths\(\)"):
        Loader([(1, 2)] * 8, 4, world_of(0, 1), group_by_length=True)
    with pytest.raises(DataError, match=r"shuffle=False keeps the order"):
        Loader(Texts(), 4, world_of(0, 1), shuffle=False, group_by_length=True)
    with pytest.raises(DataError, match=r"needs a data set with access by index"):
        StreamLoader(iter([]), 4, world_of(0, 1), group_by_length=True)
