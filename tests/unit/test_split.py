"""Where the model is cut: exact balance, explicit splits, layer names, and the messages."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybridtrain.errors import SplitError
from hybridtrain.partition.balance import balance
from hybridtrain.partition.layers import Layer, layers_of
from hybridtrain.partition.split import split_layers

ALL = [(layers, parts) for layers in range(1, 41) for parts in range(1, 9)]


def chain(*sizes):
    return [Layer(f"l{i}", nn.Linear(1, size, bias=False)) for i, size in enumerate(sizes)]


def every_cut(n, parts):
    for inner in combinations(range(1, n), parts - 1):
        yield [end - start for start, end in pairwise([0, *inner, n])]


def costs_of(costs, counts):
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return [sum(costs[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("spec", ["uniform", "size"])
def test_every_layer_count_and_nb_part_gives_that_many_stages_or_says_why(spec):
    modules = [nn.Linear(1, 1 + 7 * i % 11, device="meta") for i in range(40)]
    for n, parts in ALL:
        layers = [Layer(str(i), module) for i, module in enumerate(modules[:n])]
        if n < parts:
            with pytest.raises(SplitError, match=rf"\b{n} layers?\b.*\b{parts} stages\b"):
                split_layers(layers, parts, spec)
            continue
        runs = split_layers(layers, parts, spec)
        assert len(runs) == parts, (n, parts)
        assert all(runs), (n, parts)
        assert [layer for run in runs for layer in run] == layers, (n, parts)
        if spec == "uniform":
            assert max(map(len, runs)) == -(-n // parts), (n, parts)
            assert min(map(len, runs)) == n // parts, (n, parts)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=10), st.integers(1, 6))
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(costs, parts):
    if parts > len(costs):
        with pytest.raises(SplitError):
            balance(costs, parts)
        return
    counts = balance(costs, parts)
    assert len(counts) == parts
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    best = min(max(costs_of(costs, cut)) for cut in every_cut(len(costs), parts))
    assert max(costs_of(costs, counts)) == best


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(1, 5))
def test_the_balance_is_exact_for_measured_costs_too(costs, parts):
    if parts > len(costs):
        return
    best = min(max(costs_of(costs, cut)) for cut in every_cut(len(costs), parts))
    # the balance adds up from the left end, this test from each stage's own start
    assert max(costs_of(costs, balance(costs, parts))) == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_among_the_best_cuts_the_other_stages_are_even_too(costs, parts):
    if parts > len(costs):
        return

    def rank(cut):
        squares = sum(cost**2 for cost in costs_of(costs, cut))
        return max(costs_of(costs, cut)), squares, sum(count**2 for count in cut)

    best = min(map(rank, every_cut(len(costs), parts)))
    assert rank(balance(costs, parts)) == best


def test_a_negative_cost_and_less_than_one_part_are_refused():
    with pytest.raises(SplitError, match="negative"):
        balance([1, -1], 2)
    with pytest.raises(SplitError, match="at least 1 part, not 0"):
        balance([1, 1], 0)


def names(runs):
    return [[layer.name for layer in run] for run in runs]


def test_size_balances_parameters_and_uniform_balances_layers():
    layers = chain(9, 1, 1, 1, 1)
    assert names(split_layers(layers, 2, "size")) == [["l0"], ["l1", "l2", "l3", "l4"]]
    assert names(split_layers(layers, 2, "uniform")) == [["l0", "l1", "l2"], ["l3", "l4"]]


@pytest.mark.parametrize(
    ("stages", "spec"),
    [
        (3, [1, 3, 2]),  # counts
        (3, [1, 4]),  # cut points
        (3, ["l1", "l4"]),  # names
        (3, ("l1", "l4")),
    ],
)
def test_counts_cut_points_and_names_say_the_same(stages, spec):
    runs = names(split_layers(chain(*[1] * 6), stages, spec))
    assert runs == [["l0"], ["l1", "l2", "l3"], ["l4", "l5"]]


def test_one_stage_takes_a_count_or_an_empty_list():
    layers = chain(1, 1, 1)
    assert names(split_layers(layers, 1, [3])) == [["l0", "l1", "l2"]]
    assert names(split_layers(layers, 1, [])) == [["l0", "l1", "l2"]]


def transformer_like():
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    net = nn.Sequential()
    net.add_module("embed", nn.Linear(2, 2))
    net.add_module("blocks", blocks)
    net.add_module("head", nn.Linear(2, 2))
    return net


def test_a_cut_may_be_named_by_a_group_of_layers():
    layers = layers_of(transformer_like())
    assert names(split_layers(layers, 3, ["blocks", "head"])) == [
        ["embed"],
        ["blocks.0", "blocks.1.0", "blocks.1.1"],
        ["head"],
    ]
    assert names(split_layers(layers, 2, ["blocks.1"]))[1][0] == "blocks.1.0"


@pytest.mark.parametrize(
    ("stages", "spec", "message"),
    [
        (2, "even", r"pipeline\.split='even' is unknown: use uniform, size"),
        (2, [3, 4], r"add up to the model's 6 layers; these add up to 7"),
        (2, [6, 0], r"layer counts must be positive"),
        (2, [7, -1], r"layer counts must be positive"),
        (3, [4, 4], r"cut points must rise and lie between 1 and 5"),
        (3, [4, 2], r"cut points must rise"),
        (3, [0, 2], r"cut points must rise"),
        (3, [2, 6], r"cut points must rise"),
        (3, ["l4", "l1"], r"cut points must rise"),
        (2, ["l0"], r"cut points must rise"),
        (3, ["l1", "l4", "l5"], r"does not describe 3 stages: give 3 layer counts, or 2 cut point"),
        (4, [1, 2], r"does not describe 4 stages: give 4 layer counts, or 3 cut points"),
        (2, [1, 2, 3], r"does not describe 2 stages: give 2 layer counts, or 1 cut point "),
        (2, [], r"does not describe 2 stages"),
        (1, ["l1"], r"does not describe 1 stage"),
        (3, [1, "l4"], r"does not describe 3 stages"),
        (2, [2.5, 3.5], r"does not describe 2 stages"),
        (2, [True], r"does not describe 2 stages"),
        (2, [1], None),
    ],
)
def test_a_split_that_does_not_fit_says_what_would(stages, spec, message):
    layers = chain(*[1] * 6)
    if message is None:
        assert len(split_layers(layers, stages, spec)) == stages
        return
    with pytest.raises(SplitError, match=message):
        split_layers(layers, stages, spec)


def test_a_misspelt_layer_name_says_did_you_mean():
    layers = layers_of(transformer_like())
    with pytest.raises(SplitError, match=r"no layer 'blocks\.2'; did you mean 'blocks\.0'"):
        split_layers(layers, 2, ["blocks.2"])
    with pytest.raises(SplitError, match=r"no layer 'xyz'; the layers are: embed, blocks\.0, "):
        split_layers(layers, 2, ["xyz"])


def test_nested_sequentials_are_flattened_under_the_users_names():
    net = transformer_like()
    layers = layers_of(net)
    assert [layer.name for layer in layers] == [
        "embed",
        "blocks.0",
        "blocks.1.0",
        "blocks.1.1",
        "head",
    ]
    for layer in layers:
        assert net.get_submodule(layer.name) is layer.module


def test_a_subclass_of_sequential_is_flattened_only_if_it_keeps_the_forward():
    class Same(nn.Sequential):
        pass

    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    net = nn.Sequential(Same(nn.ReLU(), nn.Tanh()), Twice(nn.ReLU(), nn.Tanh()))
    assert [layer.name for layer in layers_of(net)] == ["0.0", "0.1", "1"]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_sequential_with_hooks_stays_whole_so_that_they_run(register):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    getattr(net[1], register)(lambda *args: None)
    assert [layer.name for layer in layers_of(net)] == ["0", "1"]


@pytest.mark.parametrize("where", ["top", "nested"])
def test_a_module_that_stands_twice_is_refused_with_both_names(where):
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    if where == "nested":
        net = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    second = {"top": r"2", "nested": r"1\.1"}[where]
    with pytest.raises(SplitError, match=rf"layer '{second}' is the same module as '0'"):
        layers_of(net)


def test_a_model_that_is_no_chain_or_empty_is_refused():
    with pytest.raises(SplitError, match=r"Linear is not an nn\.Sequential"):
        layers_of(nn.Linear(2, 2))
    with pytest.raises(SplitError, match="no layers"):
        layers_of(nn.Sequential(nn.Sequential()))


def test_a_layers_size_is_the_number_of_its_elements():
    assert Layer("x", nn.Linear(3, 4)).parameters == 16
    assert Layer("x", nn.ReLU()).parameters == 0
    assert torch.tensor([layer.parameters for layer in chain(2, 5)]).tolist() == [2, 5]
