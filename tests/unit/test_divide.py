"""Every way to say where a model is cut, from HybridModel's arguments to its stages."""

import copy
import time
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridtrain import HybridModel, World, partition, set_partition
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph.chain import ChainBuilder
from hybridtrain.planning.costs import LayerProfiler
from hybridtrain.planning.objective import stage_costs
from hybridtrain.planning.plan import Plan, table

WIDTH, ROWS = 8, 6
MEASURED = ["time", "memory", "balanced"]


@pytest.fixture(autouse=True)
def _seeded(one_intra_op_thread):
    torch.manual_seed(0)


class Slow(nn.Linear):
    """A layer that takes longer than its parameters say."""

    def __init__(self, seconds):
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


class Net(nn.Module):
    """Its forward is no chain: the input is needed at the end."""

    def __init__(self, *seconds):
        super().__init__()
        self.layers = nn.ModuleList(Slow(s) for s in seconds)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y).relu()
        return self.last(x + y)


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def hybrid(net, stages, **options):
    return HybridModel(net, World.from_env(nb_part=stages), chunks=2, **options)


def names(model):
    return [[layer.name for layer in stage.layers] for stage in model.stages]


def assert_trains_as_whole(model, whole):
    x = rows()
    model.train_step(x, None, lambda out, _: out.square().mean())
    for part in x.split(ROWS // 2):
        (whole(part).square().mean() / 2).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("split", ["uniform", "size", *MEASURED])
def test_every_split_trains_as_the_whole_model(split):
    net = Net(0, 0, 0, 0)
    whole = copy.deepcopy(net)
    assert_trains_as_whole(hybrid(net, 3, split=split), whole)


def test_time_makes_the_slowest_stage_as_fast_as_can_be():
    net = Net(0.02, 0, 0, 0, 0.01, 0.01)
    model = hybrid(net, 2, split="time", example_inputs=rows())
    assert names(model)[0][-1] in ("layers.0", "layers.1", "layers.2", "layers.3")
    assert {"layers.4", "layers.5"} <= set(names(model)[1])


def test_memory_gives_the_early_stages_of_1f1b_fewer_layers():
    net = nn.Sequential(nn.Conv1d(1, 1, 1), *(nn.Tanh() for _ in range(11)))
    world, sample = World.from_env(nb_part=3), torch.randn(64, 1, 256)
    model = HybridModel(net, world, chunks=8, split="memory", example_inputs=sample)
    counts = [len(stage) for stage in names(model)]
    assert model.plan.in_flight == [3, 2, 1]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]


def test_a_recomputed_stage_counts_what_it_was_sent_and_one_micro_batch():
    net = nn.Sequential(nn.Conv1d(1, 1, 1), *(nn.Tanh() for _ in range(11)))
    world, sample = World.from_env(nb_part=3), torch.randn(64, 1, 256)
    options = {"chunks": 8, "split": "memory", "example_inputs": sample}
    kept = HybridModel(copy.deepcopy(net), world, **options).plan
    recomputed = HybridModel(net, world, checkpoint="always", **options).plan
    assert recomputed.recomputes
    assert max(
        s.memory_bytes
        for s in stage_costs(
            recomputed.costs, recomputed.counts, recomputed.in_flight, recomputes=True
        )
    ) < max(s.memory_bytes for s in stage_costs(kept.costs, kept.counts, kept.in_flight))


@pytest.mark.parametrize("split", [3, None, [1.5, 2], [["a"], ["b", 3]], {"a": 3}], ids=str)
def test_a_split_that_is_neither_a_name_nor_a_list_is_one_message(split):
    with pytest.raises(SplitError, match=r"pipeline\.split=.*: use a name, the path of a plan"):
        hybrid(Net(0, 0), 2, split=split)


def test_a_memory_limit_moves_layers_or_says_what_would_fit():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    net.append(nn.Linear(64, 4096))
    sample = torch.randn(4, 64)
    by_time = hybrid(copy.deepcopy(net), 2, split="time", example_inputs=sample)
    sizes = [sum(cost.weight_bytes for cost in stage) for stage in by_time.plan.stages]
    limit = (max(sizes) * 0.2) / 2**30
    with pytest.raises(SplitError, match=r"layer '4' alone needs .* pipeline\.memory_limit_gib="):
        hybrid(net, 2, split="time", example_inputs=sample, memory_limit_gib=limit)


def test_a_split_by_costs_without_a_sample_is_made_at_the_first_batch():
    model = hybrid(Net(0.01, 0, 0, 0.01), 2, split="time")
    with pytest.raises(ConfigError, match="example_inputs="):
        names(model)
    model.train_step(rows(), None, lambda out, _: out.mean())
    assert {"layers.3"} <= set(names(model)[1])


def test_measuring_leaves_no_trace():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh())
    net[0].weight.grad = torch.ones(WIDTH, WIDTH)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    hybrid(net, 2, split="time", example_inputs=rows())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net[0].weight.grad, torch.ones(WIDTH, WIDTH))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


# Deeper, where balance asks for it ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.first, self.second = Slow(seconds), Slow(seconds)

    def forward(self, x):
        return x + self.second(self.first(x).tanh())


def test_a_block_is_cut_inside_only_if_the_stages_would_be_uneven():
    small = [Block(0) for _ in range(20)]
    net = nn.Sequential(*small, Block(0.02), *copy.deepcopy(small))
    model = hybrid(net, 2, split="time", example_inputs=rows())
    assert "20" in model.plan.expand
    first, second = names(model)
    assert "20.first" in first
    assert "20.second" in second
    even = nn.Sequential(*(Block(0.05) for _ in range(2)))
    assert hybrid(even, 2, split="time", example_inputs=rows()).plan.expand == []


@pytest.fixture
def careful(monkeypatch):
    """The measurements that were repeated; all their layers then cost 7 ms forward."""
    repeated = []
    costs = LayerProfiler.costs

    def with_care(self, **options):
        found = costs(self, **options)
        return [replace(cost, forward_ms=7.0) for cost in found] if self in repeated else found

    monkeypatch.setattr(LayerProfiler, "repeat", lambda self, _: repeated.append(self))
    monkeypatch.setattr(LayerProfiler, "costs", with_care)
    return repeated


def test_only_a_chain_that_is_even_at_a_glance_is_timed_with_care_and_cut_by_that(careful):
    net = nn.Sequential(Block(0), Block(0), Block(0.03), Slow(0))
    model = hybrid(net, 2, split="time", example_inputs=rows())
    assert all(len(measurement.costs()) > len(net) for measurement in careful)
    assert [cost.forward_ms for cost in model.plan.costs] == [7.0] * len(careful[-1].costs())


def test_after_the_last_opening_the_layers_are_still_timed_with_care(careful, monkeypatch):
    monkeypatch.setattr("hybridtrain.planning.planner.MAX_EXPANSIONS", 0)
    model = hybrid(nn.Sequential(Block(0), Block(0.03)), 2, split="time", example_inputs=rows())
    assert model.plan.expand == []
    assert len(careful) == 1


def test_a_split_by_memory_alone_times_nothing_with_care(careful):
    hybrid(nn.Sequential(Block(0), Block(0)), 2, split="memory", example_inputs=rows())
    assert careful == []


class Threads(nn.Linear):
    seen: ClassVar[set[int]] = set()

    def forward(self, x):
        self.seen.add(torch.get_num_threads())
        return super().forward(x)


def test_layers_are_measured_with_the_intra_op_threads_of_a_stage():
    torch.set_num_threads(4)
    net = nn.Sequential(*(Threads(WIDTH, WIDTH) for _ in range(4)))
    hybrid(net, 2, split="time", example_inputs=rows())
    assert Threads.seen == {2}
    assert torch.get_num_threads() == 4


def test_a_name_inside_a_block_cuts_it_there():
    net = nn.Sequential(Block(0), Block(0), Block(0))
    whole = copy.deepcopy(net)
    model = hybrid(net, 2, split=["1.second"])
    assert names(model) == [["0", "1.first"], ["1.second", "2"]]
    assert_trains_as_whole(model, whole)


# By hand -----------------------------------------------------------------------------------------


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        with partition(0):
            self.embed = nn.Embedding(10, WIDTH)
            self.first = nn.Linear(WIDTH, WIDTH)
        with partition(1):
            self.second = nn.Linear(WIDTH, WIDTH)
            with partition(2):
                self.third = nn.Linear(WIDTH, WIDTH)
        with partition(2):
            self.head = nn.Linear(WIDTH, 10, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.third(self.second(self.first(self.embed(x)))))


def test_partition_puts_modules_where_it_says_and_ties_hold():
    net = Placed()
    whole = copy.deepcopy(net)
    model = hybrid(net, 3, split="manual")
    assert names(model) == [["embed", "first"], ["second"], ["third", "head"]]
    x = torch.arange(ROWS)
    model.train_step(x, x, F.cross_entropy)
    for part in x.split(ROWS // 2):
        (F.cross_entropy(whole(part), part) / 2).backward()
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


def test_set_partition_and_the_default_place_the_rest():
    net = Net(0, 0, 0)
    set_partition(net.layers[2], 1)
    set_partition(net.last, 1)
    model = hybrid(net, 2, split="manual", default_partition=0)
    assert names(model) == [["layers.0", "layers.1"], ["layers.2", "last"]]
    with pytest.raises(SplitError, match=r"'layers\.0' has no partition.*default_partition"):
        hybrid(net, 2, split="manual")


def test_a_module_placed_in_two_partitions_is_cut_inside():
    net = nn.Sequential(Block(0), Block(0))
    set_partition(net[0].first, 0)
    set_partition(net[0].second, 1)
    set_partition(net[1], 1)
    model = hybrid(net, 2, split="manual", default_partition=0)
    assert names(model) == [["0.first"], ["0.second", "1"]]


# Plans -------------------------------------------------------------------------------------------


def test_a_plan_cuts_the_model_again_where_it_was_cut(tmp_path):
    net = nn.Sequential(*(Block(0) for _ in range(20)), Block(0.02))
    model = hybrid(net, 2, split="time", example_inputs=rows())
    assert model.plan.expand
    model.plan.write(tmp_path / "plan.yaml")
    again = hybrid(copy.deepcopy(net), 2, split=str(tmp_path / "plan.yaml"))
    assert names(again) == names(model)
    assert again.plan.costs == Plan.read(tmp_path / "plan.yaml").costs
    assert table(again.plan).count("\n") >= 2


def test_a_plan_of_another_model_names_the_layer_that_is_missing(tmp_path):
    hybrid(Net(0, 0, 0), 2).plan.write(tmp_path / "plan.yaml")
    with pytest.raises(SplitError, match=r"the model has no layer 'layers\.2' of the plan"):
        hybrid(Net(0, 0), 2, split=str(tmp_path / "plan.yaml"))
    with pytest.raises(SplitError, match=r"cannot read .*nowhere\.yaml"):
        hybrid(Net(0, 0), 2, split=str(tmp_path / "nowhere.yaml"))


# The same values for every split -----------------------------------------------------------------


@pytest.mark.parametrize("split", ["uniform", "time", ["layers.1"]], ids=str)
def test_the_split_does_not_change_the_initial_weights(split):
    torch.manual_seed(5)
    plain = Net(0, 0, 0)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    model = hybrid(Net(0, 0, 0), 2, split=split, example_inputs=rows())
    assert torch.equal(torch.get_rng_state(), after)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert_trains_as_whole(model, plain)


def test_too_few_layers_says_why_there_are_not_more():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.second(self.first(x)) if x.sum() > 0 else x

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Opaque()

        def forward(self, x):
            return self.body(x)

    message = (
        r"a model of 1 layer cannot be cut into 2 stages: .*"
        r"body could not be looked into: .*test_divide\.py:\d+: `return .* if x\.sum\(\) > 0"
    )
    with pytest.raises(SplitError, match=message):
        hybrid(Outside(), 2, example_inputs=rows())
    assert [layer.name for layer in ChainBuilder(Net(0)).chain().layers] == ["layers.0", "last"]
