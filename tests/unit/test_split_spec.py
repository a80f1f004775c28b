"""Where the model is cut: by size, explicit splits, layer names, and the messages."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer, layers_of
from hybridtrain.planning import plan
from hybridtrain.planning.split_spec import split_layers

ALL = [(layers, parts) for layers in range(1, 41) for parts in range(1, 9)]


def chain(*sizes):
    return [Layer(f"l{i}", nn.Linear(1, size, bias=False)) for i, size in enumerate(sizes)]


def stages_of(net, stages, split):
    """The names of the layers of each stage."""
    world = World.from_env(nb_part=stages)
    model = HybridModel(net, world, split=split)
    return [[layer.name for layer in stage.layers] for stage in model.stages]


@pytest.mark.parametrize("split", ["uniform", "size"])
def test_every_layer_count_and_nb_part_gives_that_many_stages_or_says_why(split):
    world = World.from_env(nb_part=1)
    for n, stages in ALL:
        net = nn.Sequential(*(nn.Linear(1, 1 + 7 * i % 11, device="meta") for i in range(n)))
        ask = Ask(split, replace(world, devices=world.devices * stages), 1, "1f1b", 1, [1] * stages)
        if n < stages:
            with pytest.raises(SplitError, match=rf"\b{n} layers?\b.*\b{stages} stages\b"):
                divide(net, ask)
            continue
        parts = divide(net, ask).parts
        assert len(parts) == stages, (n, stages)
        assert all(parts), (n, stages)
        assert [layer.module for part in parts for layer in part] == list(net), (n, stages)
        if split == "uniform":
            assert max(map(len, parts)) == -(-n // stages), (n, stages)
            assert min(map(len, parts)) == n // stages, (n, stages)


def test_size_balances_parameters_and_uniform_balances_layers():
    net = nn.Sequential(*(nn.Linear(1, size, bias=False) for size in (9, 1, 1, 1, 1)))
    assert stages_of(net, 2, "size") == [["0"], ["1", "2", "3", "4"]]
    assert stages_of(net, 2, "uniform") == [["0", "1", "2"], ["3", "4"]]


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
    assert split_layers(chain(*[1] * 6), stages, spec) == [1, 3, 2]


def test_one_stage_takes_a_count_or_an_empty_list():
    layers = chain(1, 1, 1)
    assert split_layers(layers, 1, [3]) == [3]
    assert split_layers(layers, 1, []) == [3]


def transformer_like():
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    net = nn.Sequential()
    net.add_module("embed", nn.Linear(2, 2))
    net.add_module("blocks", blocks)
    net.add_module("head", nn.Linear(2, 2))
    return net


def test_a_cut_may_be_named_by_a_group_of_layers():
    blocks = ["blocks.0", "blocks.1.0", "blocks.1.1"]
    assert stages_of(transformer_like(), 3, ["blocks", "head"]) == [["embed"], blocks, ["head"]]
    assert stages_of(transformer_like(), 2, ["blocks.1"])[1][0] == "blocks.1.0"


def test_name_patterns_say_for_each_stage_what_it_gets():
    blocks = ["blocks.0", "blocks.1.0", "blocks.1.1"]
    for split in (["embed", "blocks", "head"], [["embed"], ["blocks.0", "blocks.1*"], "h*"]):
        assert stages_of(transformer_like(), 3, split) == [["embed"], blocks, ["head"]]


@pytest.mark.parametrize(
    ("stages", "spec", "message"),
    [
        (2, [3, 4], r"add up to the model's 6 layers; these add up to 7"),
        (2, [6, 0], r"layer counts must be positive"),
        (2, [7, -1], r"layer counts must be positive"),
        (3, [4, 4], r"cut points must rise and lie between 1 and 5"),
        (3, [4, 2], r"cut points must rise"),
        (3, [0, 2], r"cut points must rise"),
        (3, [2, 6], r"cut points must rise"),
        (3, ["l4", "l1"], r"cut points must rise"),
        (2, ["l0"], r"cut points must rise"),
        (3, list("abcd"), r"does not describe 3 stages: give 3 layer counts, 2 cut points \("),
        (4, [1, 2], r"does not describe 4 stages: .*a stage\), or 4 name patterns"),
        (2, [1, 2, 3], r"does not describe 2 stages: give 2 layer counts, 1 cut point \("),
        (3, ["l1", "l4", "l9"], r"no layer matches 'l9'"),
        (2, [], r"does not describe 2 stages"),
        (1, ["l1", "l2"], r"does not describe 1 stage"),
        (3, [1, "l4"], r"does not describe 3 stages"),
        (2, [2.5, 3.5], r"does not describe 2 stages"),
        (2, [True, False], r"does not describe 2 stages"),
        (2, [True], r"does not describe 2 stages"),
        (2, [1], None),
    ],
)
def test_a_split_that_does_not_fit_says_what_would(stages, spec, message):
    layers = chain(*[1] * 6)
    if message is None:
        assert split_layers(layers, stages, spec) == [1, 5]
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
def test_the_uses_of_one_layer_stay_in_one_stage(where):
    shared = nn.Linear(2, 2)
    inner = [nn.ReLU(), shared]
    uses = [shared, nn.Sequential(*inner)] if where == "nested" else [shared, *inner]
    for split in ("uniform", "size", "time"):
        model = HybridModel(
            nn.Sequential(*uses, nn.Linear(2, 2), nn.Linear(2, 2)),
            World.from_env(nb_part=2),
            split=split,
            example_inputs=torch.zeros(1, 2),
        )
        assert len(model.stages[0].layers) >= 3
    with pytest.raises(SplitError, match=r"'0' to '(1\.1|2)' stay together, since they use one"):
        HybridModel(nn.Sequential(*uses), World.from_env(nb_part=2))


def test_an_unknown_way_to_split_says_which_there_are():
    with pytest.raises(SplitError, match=r"pipeline\.split='even' is unknown: use uniform, size, "):
        stages_of(transformer_like(), 2, "even")


def test_a_model_without_layers_is_refused():
    with pytest.raises(SplitError, match="no layers"):
        layers_of(nn.Sequential(nn.Sequential()))
