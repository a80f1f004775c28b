"""How a model is planned, by every kind of split, and that a planned model trains as the whole."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.clock import Clock
from torch import nn

from hybridtrain import HybridModel, World, partition, set_partition
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    LayerCost,
    Plan,
    Planner,
    StageOwners,
    balance_by_size,
    balance_by_time,
    plan,
    table,
)
from hybridtrain.partitioning.measurements import LayerProfiler

WIDTH, ROWS = 8, 6
MEASURED = ["time", "memory", "balanced"]


pytestmark = pytest.mark.usefixtures("seeded")


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _fake_clock(monkeypatch):
    monkeypatch.setattr("hybridtrain.partitioning.measurements.perf_counter", CLOCK)


class Slow(nn.Linear):
    """A layer that takes longer than its parameters say, by the clock of these tests."""

    def __init__(self, ms):
        super().__init__(WIDTH, WIDTH)
        self.ms = ms

    def forward(self, x):
        CLOCK.now += self.ms / 1000
        return super().forward(x)


class Net(nn.Module):
    """Its forward is not a chain: the input is needed at the end."""

    def __init__(self, *ms):
        super().__init__()
        self.layers = nn.ModuleList(Slow(each) for each in ms)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y).relu()
        return self.last(x + y)


class Block(nn.Module):
    def __init__(self, ms):
        super().__init__()
        self.first, self.second = Slow(ms), Slow(ms)

    def forward(self, x):
        return x + self.second(self.first(x).tanh())


def samples():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def planned(net, stages, example_inputs=None, costs="measured", **settings):
    options = PipelineOptions(chunks=2, **settings)
    return plan(net, options, example_inputs, StageOwners.of_cpus(stages), costs=costs)


def hybrid(net, stages, **settings):
    world = World.from_env(nb_part=stages, devices="cpu")
    return HybridModel(net, world, chunks=2, example_inputs=samples(), **settings)


def assert_trains_as_whole(model, whole):
    x = samples()
    model.train_step(x, None, lambda out, _: out.square().mean())
    for part in x.split(ROWS // 2):
        (whole(part).square().mean() / 2).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# Alone ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_planning_imports_neither_an_engine_nor_a_process_group():
    code = (
        "import sys, hybridtrain.partitioning\n"
        "above = ('hybridtrain.pipeline', 'hybridtrain.world', 'hybridtrain.model', 'hydra')\n"
        "print([name for name in sys.modules if name.startswith(above)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_says_who_owns_each_stage_and_what_it_keeps():
    owners = StageOwners(("cuda:0", "cuda:1", "cuda:0", "cuda:1"), processes=2)
    options = PipelineOptions(chunks=8, stages_per_device=2, recompute=["3", "4"])
    found = plan(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))), options, owners=owners)
    assert (found.model, found.nb_part, found.stages_per_device) == ("Sequential", 4, 2)
    assert (found.chunks, found.schedule, found.recompute) == (8, "1f1b", ["3", "4"])
    assert (found.split, found.costs_from, found.expand) == ("uniform", "counted", [])
    assert [stage.process for stage in found.stages] == [0, 0, 1, 1] * 2
    assert [stage.device for stage in found.stages] == ["cuda:0", "cuda:1"] * 4
    assert found.layer_names[:2] == [["0", "1"], ["2"]]
    assert found.in_flight[0] > found.in_flight[-1] >= 1


def test_a_plan_pickles_compares_and_shows_itself_in_a_line():
    found = planned(Net(0, 0, 0), 2, samples(), split="size")
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again != planned(Net(0, 0, 0), 3, samples(), split="size")
    assert repr(found).startswith("Plan(Net, split='size', schedule='1f1b', chunks=2, ")
    assert "\n" not in repr(found)


def test_every_process_rebuilds_the_layers_of_a_plan_without_deciding():
    net = nn.Sequential(*(Block(0) for _ in range(3)), Block(20))
    options, owners = PipelineOptions(split="time"), StageOwners.of_cpus(2)
    decided = Planner(net, options, samples(), owners).plan()
    assert decided.expand == ["3"]

    def never(layers, inputs):
        raise AssertionError("decides anew")

    other = Planner(copy.deepcopy(net), options, samples(), owners, costs=never)
    found = other.layers_of(decided)
    assert [[layer.name for layer in stage] for stage in found.stages] == decided.layer_names
    assert len(found.units) == sum(decided.counts)


def test_the_layers_of_a_plan_that_was_just_made_are_not_observed_again():
    forwards = []

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(20 * (i == 9)) for i in range(10))

        def forward(self, x):
            forwards.append(x)
            for block in self.blocks:
                x = block(x)
            return x

    planner = Planner(Traced(), PipelineOptions(split="time"), samples(), StageOwners.of_cpus(2))
    found = planner.plan()
    observed = len(forwards)
    assert found.expand == ["blocks.9"]
    planner.layers_of(found)
    assert len(forwards) == observed > 0


def test_the_number_of_layers_per_stage_balances_time_and_size():
    net = nn.Sequential(Slow(30), Slow(0), Slow(0), Slow(10), Slow(10), Slow(10))
    assert balance_by_time(net, samples(), 2) == [3, 3]
    sizes = nn.Sequential(*(nn.Linear(1, size, bias=False) for size in (9, 1, 1, 1, 1)))
    assert balance_by_size(sizes, 2) == [1, 4]


# By costs ------------------------------------------------------------------------------------


def declared(layers, inputs):
    """The costs that the layers of these tests declare."""
    return [
        LayerCost(layer.name, forward_ms=sum(getattr(m, "ms", 0) for m in layer.module.modules()))
        for layer in layers
    ]


@pytest.mark.parametrize("costs", ["measured", declared])
@pytest.mark.quick_cases(1)
def test_time_makes_the_slowest_stage_as_fast_as_can_be(costs):
    found = planned(Net(20, 0, 0, 0, 10, 10), 2, samples(), costs, split="time")
    assert found.layer_names[0][-1] in ("layers.0", "layers.1", "layers.2", "layers.3")
    assert {"layers.4", "layers.5"} <= set(found.layer_names[1])
    assert found.costs_from == ("given" if costs is declared else costs)


def test_the_caller_may_compute_the_costs_of_a_micro_batch():
    seen = []

    def costs(layers, inputs):
        seen.append(inputs)
        return declared(layers, inputs)

    planned(Net(20, 0, 10, 10), 2, samples(), costs, split="time")
    assert torch.equal(seen[0], samples()[: ROWS // 2])


def test_given_costs_must_be_those_of_the_layers():
    with pytest.raises(ConfigError, match=r"costs= must return a LayerCost for each of the 3 lay"):
        planned(Net(0, 0), 2, samples(), lambda layers, _: [LayerCost("a")], split="time")


def test_an_unknown_source_of_costs_says_which_there_are():
    hints = {"measure": r"did you mean 'measured'\?", "x": "sources are: estimated, measured"}
    for name, hint in hints.items():
        with pytest.raises(ConfigError, match=rf"costs='{name}' is neither a function .*{hint}"):
            planned(Net(0, 0), 2, samples(), name, split="time")


@pytest.mark.parametrize("split", MEASURED)
def test_a_split_by_costs_without_inputs_says_to_pass_them(split):
    with pytest.raises(ConfigError, match=rf"split='{split}' .*: pass example_inputs=<"):
        planned(Net(0, 0), 2, split=split)


@pytest.mark.parametrize(
    ("make", "split"),
    [
        (lambda: Net(0, 0), "size"),
        (lambda: nn.Sequential(Block(0), Block(0)), ["1.second"]),
    ],
    ids=["model", "inside an element"],
)
def test_a_model_that_has_to_run_to_be_cut_says_to_pass_inputs(make, split):
    with pytest.raises(ConfigError, match=r" can be cut .*: pass example_inputs=<"):
        planned(make(), 2, split=split)
    assert len(planned(make(), 2, samples(), split=split).stages) == 2


class SavesFour(nn.Module):
    def forward(self, x):
        return x.tanh().exp().sigmoid().tanh()


def memory_net(layer=nn.Tanh):
    return nn.Sequential(nn.Conv1d(1, 1, 1), *(layer() for _ in range(11)))


def by_memory(layer=nn.Tanh, **settings):
    options = PipelineOptions(chunks=8, split="memory", **settings)
    return plan(memory_net(layer), options, torch.randn(64, 1, 256), StageOwners.of_cpus(3))


def test_memory_gives_the_early_stages_of_1f1b_fewer_layers():
    found = by_memory()
    assert found.in_flight == [3, 2, 1]
    assert found.counts == sorted(found.counts)
    assert found.counts[0] < found.counts[2]


def test_a_recomputed_stage_counts_the_inputs_of_its_layers_and_the_activations_of_one():
    kept, recomputed = by_memory(SavesFour), by_memory(SavesFour, recompute="always")
    assert recomputed.recompute == "always"
    most = [max(s.memory_bytes for s in found.stage_costs()) for found in (recomputed, kept)]
    assert most[0] < most[1] / 2
    # of 8 samples with 256 numbers: inputs of layers, and the values inside one layer
    held = recomputed.in_flight[1] * recomputed.counts[1] + 3
    assert recomputed.stage_costs()[1].memory_bytes == held * 8 * 256 * 4
    # a layer that saves its output alone has nothing to gain
    of_outputs = by_memory(recompute="always")
    same = [max(s.memory_bytes for s in found.stage_costs()) for found in (of_outputs, by_memory())]
    assert same[0] == same[1]


@pytest.mark.parametrize("split", [3, None, [1.5, 2], [["a"], ["b", 3]], {"a": 3}], ids=str)
def test_a_split_that_is_neither_a_name_nor_a_list_is_one_message(split):
    with pytest.raises(SplitError, match=r"^split=.*: use a name, the path of a plan"):
        planned(Net(0, 0), 2, split=split)


def test_a_memory_limit_moves_layers_or_says_what_would_fit():
    def costs(layers, inputs):
        return [LayerCost(f"{i}", forward_ms=ms, weight_bytes=2**30) for i, ms in enumerate(times)]

    net, times = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), [1, 1, 1, 3]
    free = planned(net, 2, samples(), costs, split="time")
    tight = planned(net, 2, samples(), costs, split="time", memory_limit_gib=2)
    assert (free.counts, tight.counts) == ([3, 1], [2, 2])
    with pytest.raises(SplitError, match=r"Set memory_limit_gib= to 2 GiB or more"):
        planned(net, 2, samples(), costs, split="time", memory_limit_gib=1.5)


# Modules are expanded where balance asks for it ------------------------------------------------


@pytest.mark.parametrize("costs", ["measured", declared])
@pytest.mark.quick_cases(1)
def test_a_block_is_cut_inside_only_if_the_stages_would_be_uneven(costs):
    small = [Block(0) for _ in range(20)]
    net = nn.Sequential(*small, Block(20), *copy.deepcopy(small))
    found = planned(net, 2, samples(), costs, split="time")
    assert "20" in found.expand
    first, second = found.layer_names
    assert "20.first" in first
    assert "20.second" in second
    even = nn.Sequential(Block(50), Block(50))
    assert planned(even, 2, samples(), costs, split="time").expand == []


def test_a_slow_layer_is_cut_inside_under_a_memory_limit_with_several_stages_per_device():
    def costs(layers, _):
        def cost(name):
            is_block, is_part = name == "1", name.startswith("1.")
            times_ms = 9 if is_block else 3 if is_part else 1
            gib = 3 if is_block else 1
            return LayerCost(name, 20, times_ms / 3, times_ms * 2 / 3, gib * 2**30)

        return [cost(layer.name) for layer in layers]

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q, self.r = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.r(self.q(self.p(x)))

    net = nn.Sequential(nn.Linear(8, 8), Parts(), *(nn.Linear(8, 8) for _ in range(4)))
    options = {"split": "time", "stages_per_device": 2}
    free = planned(net, 2, samples(), costs, **options)
    limited = planned(net, 2, samples(), costs, **options, memory_limit_gib=8)
    assert free.expand == limited.expand == ["1"]
    assert free.counts == limited.counts


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


def test_only_a_chain_that_looks_even_is_timed_carefully_and_cut_by_those_times(careful):
    net = nn.Sequential(Block(0), Block(0), Block(30), Slow(0))
    found = planned(net, 2, samples(), split="time")
    assert all(len(profiler.costs()) > len(net) for profiler in careful)
    assert [cost.forward_ms for cost in found.costs] == [7.0] * len(careful[-1].costs())


def test_after_the_last_expansion_the_layers_are_still_timed_carefully(careful, monkeypatch):
    monkeypatch.setattr("hybridtrain.partitioning.planner.MAX_EXPANSIONS", 0)
    found = planned(nn.Sequential(Block(0), Block(30)), 2, samples(), split="time")
    assert found.expand == []
    assert len(careful) == 1


def test_a_split_by_memory_alone_times_nothing_carefully(careful):
    planned(nn.Sequential(Block(0), Block(0)), 2, samples(), split="memory")
    assert careful == []


def test_layers_are_measured_with_the_intra_op_threads_of_a_stage():
    seen = []

    class Threads(nn.Linear):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return super().forward(x)

    torch.set_num_threads(4)
    net = nn.Sequential(*(Threads(WIDTH, WIDTH) for _ in range(4)))
    planned(net, 2, samples(), split="time")
    assert set(seen[len(net) :]) == {2}  # behind the run that finds the layers
    assert torch.get_num_threads() == 4


def test_measuring_changes_no_weight_buffer_gradient_or_generator():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh())
    net[0].weight.grad = torch.ones(WIDTH, WIDTH)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    planned(net, 2, samples(), split="time")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net[0].weight.grad, torch.ones(WIDTH, WIDTH))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_backwards_are_measured_whatever_the_callers_gradient_mode(context):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with context():
        found = planned(net, 2, samples(), split="memory")
    assert found.costs[1].activation_bytes == 0 < found.costs[0].activation_bytes


def test_a_name_inside_a_block_cuts_it_there():
    net = nn.Sequential(Block(0), Block(0), Block(0))
    found = planned(net, 2, samples(), split=["1.second"])
    assert [names[0] for names in found.layer_names[1:]] == ["1.second"]


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

    message = r"a model of 1 layer cannot be cut into 2 stages: .*call more submodules"
    with pytest.raises(SplitError, match=message):
        planned(Outside(), 2, -samples().abs())
    assert len(planned(Outside(), 2, samples().abs()).stages) == 2


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


TOKENS = torch.zeros(ROWS, dtype=torch.long)


def test_partition_puts_modules_where_it_says():
    found = planned(Placed(), 3, TOKENS, split="manual")
    assert found.layer_names == [["embed", "first"], ["second"], ["third", "head"]]


def test_set_partition_and_the_default_place_the_rest():
    net = Net(0, 0, 0)
    set_partition(net.layers[2], 1)
    set_partition(net.last, 1)
    found = planned(net, 2, samples(), split="manual", default_partition=0)
    assert found.layer_names == [["layers.0", "layers.1"], ["layers.2", "last"]]
    with pytest.raises(SplitError, match=r"'layers\.0' has no partition.*default_partition="):
        planned(net, 2, samples(), split="manual")


def test_a_module_placed_in_two_partitions_is_cut_inside():
    net = nn.Sequential(Block(0), Block(0))
    set_partition(net[0].first, 0)
    set_partition(net[0].second, 1)
    set_partition(net[1], 1)
    found = planned(net, 2, samples(), split="manual", default_partition=0)
    assert found.layer_names[0] == ["0.first"]


# Plan files --------------------------------------------------------------------------------------


def test_a_plan_cuts_the_model_again_where_it_was_cut(tmp_path):
    net = nn.Sequential(*(Block(0) for _ in range(20)), Block(20))
    found = planned(net, 2, samples(), split="time")
    assert found.expand
    found.write(tmp_path / "plan.yaml")
    again = planned(copy.deepcopy(net), 2, samples(), split=str(tmp_path / "plan.yaml"))
    assert again.layer_names == found.layer_names
    assert again.costs == Plan.read(tmp_path / "plan.yaml").costs
    assert again.costs_from == "measured"
    assert table(again).count("\n") >= 2


def test_a_plan_of_another_model_names_the_layer_that_is_missing(tmp_path):
    planned(Net(0, 0, 0), 2, samples()).write(tmp_path / "plan.yaml")
    with pytest.raises(SplitError, match=r"the model has no layer 'layers\.2' of the plan"):
        planned(Net(0, 0), 2, samples(), split=str(tmp_path / "plan.yaml"))
    with pytest.raises(SplitError, match=r"cannot read .*nowhere\.yaml"):
        planned(Net(0, 0), 2, samples(), split=str(tmp_path / "nowhere.yaml"))


# A planned model trains ------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["uniform", "size", *MEASURED])
@pytest.mark.quick_cases(2)
def test_every_split_trains_as_the_whole_model(split):
    net = Net(0, 0, 0, 0)
    whole = copy.deepcopy(net)
    assert_trains_as_whole(hybrid(net, 3, split=split), whole)


def test_a_model_that_is_cut_inside_a_block_trains_as_the_whole():
    net = nn.Sequential(Block(0), Block(0), Block(0))
    whole = copy.deepcopy(net)
    assert_trains_as_whole(hybrid(net, 2, split=["1.second"]), whole)


def test_ties_hold_across_partitions():
    net = Placed()
    whole = copy.deepcopy(net)
    model = HybridModel(net, World.from_env(nb_part=3, devices="cpu"), chunks=2, split="manual")
    x = torch.arange(ROWS)
    model.train_step(x, x, F.cross_entropy)
    for part in x.split(ROWS // 2):
        (F.cross_entropy(whole(part), part) / 2).backward()
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("split", ["uniform", "time", ["layers.1"]], ids=str)
@pytest.mark.quick_cases(1)
def test_the_split_does_not_change_the_initial_weights(split):
    torch.manual_seed(5)
    plain = Net(0, 0, 0)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    model = hybrid(Net(0, 0, 0), 2, split=split)
    assert torch.equal(torch.get_rng_state(), after)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert_trains_as_whole(model, plain)
