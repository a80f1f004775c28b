"""Logical replicas of one process: the order of their batches and of the sums of gradients."""

import math
from dataclasses import replace

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parameter import Parameter

from hybridtrain import HybridModel, World
from hybridtrain._base.shares import Share, Shares
from hybridtrain._base.summation_tree import owned_by, subtrees, sums_of_halves, total
from hybridtrain.data import Batch, OwnLoader, StreamLoader, TrainLoader, in_order_of_replicas
from hybridtrain.errors import BatchError, ConfigError, DataError, WorldError
from hybridtrain.pipeline.replicas import GradientSums

replicas_and_processes = st.integers(1, 40).flatmap(
    lambda replicas: st.tuples(st.just(replicas), st.integers(1, replicas))
)


def world_of(replicas):
    return World(fixed_replicas=replicas)


def added(one, other):
    return f"({one}+{other})"


@given(replicas_and_processes)
def test_the_order_of_additions_does_not_depend_on_the_number_of_processes(shape):
    replicas, processes = shape
    sums = {}
    for process in range(processes):
        waiting = []
        for replica in owned_by(process, processes, replicas):
            node, value = (replica, replica + 1), str(replica)
            while waiting and (waiting[-1][0], node) in sums_of_halves(replicas):
                left, of_left = waiting.pop()
                node, value = sums_of_halves(replicas)[left, node], added(of_left, value)
            waiting.append((node, value))
        assert [node for node, _ in waiting] == subtrees(
            owned_by(process, processes, replicas), replicas
        )
        sums |= dict(waiting)
    leaves = {(replica, replica + 1): str(replica) for replica in range(replicas)}
    assert total(sums, replicas, added) == total(leaves, replicas, added)


@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
def test_gradients_of_one_process_are_added_in_the_tree_s_order_and_few_are_kept(replicas):
    parameters = [Parameter(torch.zeros(50)), Parameter(torch.zeros(7, 3))]
    sums = GradientSums(parameters, world_of(replicas), None)
    generator = torch.Generator().manual_seed(0)
    gradients = [
        [torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(replicas)
    ]
    most = 0
    for replica, of_replica in enumerate(gradients):
        sums.begin(replica)
        for parameter, gradient in zip(parameters, of_replica, strict=True):
            parameter.grad = gradient.clone()
        most = max(most, sums.kept)
    sums.add_alone()
    sums.finish()
    assert most <= math.ceil(math.log2(replicas))
    for place, parameter in enumerate(parameters):
        leaves = {(r, r + 1): gradients[r][place] for r in range(replicas)}
        assert parameter.grad.equal(total(leaves, replicas, torch.add))
        in_order = sum(gradients[r][place] for r in range(replicas))
        assert replicas < 4 or not parameter.grad.equal(in_order)  # else the order is not tested


def test_a_parameter_that_only_some_replicas_use_gets_the_sum_of_theirs():
    used, other = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    sums = GradientSums([used, other], world_of(4), None)
    for replica in range(4):
        sums.begin(replica)
        used.grad = torch.ones(1)
        if replica < 3:
            other.grad = torch.tensor([10.0**replica])
    sums.add_alone()
    sums.finish()
    assert (used.grad.item(), other.grad.item()) == (4, 111)


def test_a_step_that_ends_before_the_last_replica_is_refused():
    parameter = Parameter(torch.zeros(1))
    sums = GradientSums([parameter], world_of(2), None)
    sums.begin(0)
    parameter.grad = torch.ones(1)
    with pytest.raises(BatchError, match="in_order_of_replicas"):
        sums.add_alone()


def test_gradients_that_nobody_dropped_are_added_once():
    parameter = Parameter(torch.zeros(3))
    sums = GradientSums([parameter], world_of(2), None)
    parameter.grad = torch.full((3,), 100.0)
    for replica in range(2):
        sums.begin(replica)
        parameter.grad = torch.ones(3) if parameter.grad is None else parameter.grad + 1
    sums.add_alone()
    sums.finish()
    assert parameter.grad.tolist() == [102.0] * 3


@given(st.integers(2, 5), st.integers(1, 6))
def test_the_batches_of_a_step_are_given_replica_by_replica(width, count):
    batches = []
    for number in range(count):
        shares = [Share(3 + place, 10 * number + place) for place in range(width)]
        names = [f"{share.replica}.{number}" for share in shares]
        inputs, targets = Shares(names, shares), Shares([None] * width, shares)
        batches.append(
            Batch(inputs, targets, sum(s.samples for s in shares), 99, number + 1 == count)
        )
    ordered = in_order_of_replicas(batches)
    assert in_order_of_replicas(ordered) == ordered
    assert [len(batch.inputs.parts) for batch in ordered] == [width] * count
    parts = [part for batch in ordered for part in batch.inputs.parts]
    assert parts == [f"{3 + place}.{number}" for place in range(width) for number in range(count)]
    for turn, batch in enumerate(ordered):
        assert batch.samples == sum(share.samples for share in batch.inputs.shares)
        for part, share in zip(batch.inputs.parts, batch.inputs.shares, strict=True):
            assert part == f"{share.replica}.{turn + share.ahead}"


def test_batches_that_are_not_in_the_order_of_replicas_are_refused():
    world = world_of(2)
    model = HybridModel(nn.Linear(4, 2), world)
    loader = TrainLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2)), 4, world
    )
    for number, (inputs, targets) in enumerate(loader):
        if number:
            with pytest.raises(BatchError, match="in_order_of_replicas"):
                model.train_step(inputs, targets, nn.functional.mse_loss)
        else:
            model.train_step(inputs, targets, nn.functional.mse_loss, sync=False)


def test_what_a_process_with_several_replicas_cannot_keep_is_refused():
    world = world_of(3)
    net = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"find_unused_parameters=True"):
        HybridModel(net, world, find_unused_parameters=True)
    with pytest.raises(ConfigError, match=r"broadcast_buffers=False"):
        HybridModel(net, world, broadcast_buffers=False)
    batches = [(torch.randn(3, 4), torch.randn(3, 2))]
    with pytest.raises(DataError, match="TrainLoader"):
        OwnLoader(batches, world)
    with pytest.raises(DataError, match="divided=False"):
        StreamLoader(iter_dataset(batches), 3, world, divided=True)
    model = HybridModel(net, world)
    with pytest.raises(BatchError, match="TrainLoader"):
        model.train_step(*batches[0], nn.functional.mse_loss)
    embedding = HybridModel(nn.Sequential(nn.Embedding(5, 2, sparse=True)), world)
    ids = torch.arange(3)
    shares = [Share(replica, 1) for replica in range(3)]
    inputs = Shares(list(ids.split(1)), shares)
    targets = Shares([torch.zeros(1, 2)] * 3, shares)
    with pytest.raises(ConfigError, match=r"sparse gradient.*replicas="):
        embedding.train_step(inputs, targets, nn.functional.mse_loss)


def test_a_stream_of_the_hub_gives_all_samples_to_several_replicas_or_is_refused():
    rows = {"x": torch.arange(24.0).unsqueeze(1).tolist(), "y": list(range(24))}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
    collate = lambda items: (  # noqa: E731
        torch.tensor([item["x"] for item in items]),
        torch.tensor([item["y"] for item in items]),
    )
    loader = StreamLoader(stream, 4, world_of(2), collate=collate)
    seen = [y for _, targets in loader for part in targets.parts for y in part.tolist()]
    assert sorted(seen) == list(range(24))
    with pytest.raises(DataError, match="workers=1"):
        StreamLoader(stream, 4, world_of(2), collate=collate, workers=2)


def small_step(world, **settings):
    """Returns a model with a batch norm, and two batches of its loader."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = HybridModel(net, world, **settings)
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
    return model, list(TrainLoader(dataset, 8, world, shuffle=False))


def test_statistics_of_a_whole_batch_leave_the_batch_norm_as_it_was():
    model, ((inputs, targets), _) = small_step(world_of(2), batch_norm="deferred")
    model.train_step(inputs, targets, nn.functional.mse_loss)
    assert model.net[1].track_running_stats
    assert model.net[1].num_batches_tracked == 1


def test_a_step_that_was_given_up_leaves_no_trace_in_the_next_one():
    found = []
    for gives_up in (False, True):
        model, (first, second) = small_step(world_of(2))
        shares = [Shares(part.parts[:1], part.shares[:1]) for part in first]
        if gives_up:  # in the middle of its batches
            buffers = [b.clone() for b in model.net.buffers()]
            model.train_step(*shares, nn.functional.mse_loss, sync=False)
            model.zero_grad()
            for buffer, before in zip(model.net.buffers(), buffers, strict=True):
                buffer.copy_(before)
        model.train_step(*second, nn.functional.mse_loss)
        found.append([*(p.grad for p in model.net.parameters()), *model.net.buffers()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_inputs_and_targets_with_other_numbers_of_shares_are_refused():
    model, ((inputs, targets), _) = small_step(world_of(2))
    fewer = Shares(targets.parts[:1], targets.shares[:1])
    with pytest.raises(BatchError, match="1 and 2 shares"):
        model.train_step(inputs, fewer, nn.functional.mse_loss)


def iter_dataset(pairs):
    class Dataset(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(pairs)

    return Dataset()


@pytest.mark.parametrize("replicas", [0, -1, True, "4"])
def test_a_number_of_replicas_that_is_none_is_refused(replicas):
    with pytest.raises(WorldError, match=f"replicas={replicas}"):
        World.from_env(devices="cpu", replicas=replicas)


def test_more_copies_of_the_model_than_replicas_are_refused():
    with pytest.raises(WorldError, match=r"replicas=2 is less than the 4 copies"):
        replace(World(size=4), fixed_replicas=2).divided(1, "cpu")
