"""A model cut by number of layers, by size, or as a list says: counts, names and patterns."""

import pytest
import torch
from torch import nn

from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer, layers_of
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import StageOwners, plan
from hybridtrain.partitioning.manual_split import counts_by_patterns, split_layers

ALL = [(layers, parts) for layers in range(1, 41) for parts in range(1, 9)]


def chain(*sizes):
    return [Layer(f"l{i}", nn.Linear(1, size, bias=False)) for i, size in enumerate(sizes)]


def stages_of(net, stages, split):
    """The names of the layers of each stage."""
    return plan(net, PipelineOptions(split=split), owners=StageOwners.of_cpus(stages)).layer_names


@pytest.mark.parametrize("split", ["uniform", "size"])
@pytest.mark.thorough
def test_every_layer_count_and_nb_part_gives_that_many_stages_or_says_why(split):
    for n, stages in ALL:
        net = nn.Sequential(*(nn.Linear(1, 1 + 7 * i % 11, device="meta") for i in range(n)))
        if n < stages:
            with pytest.raises(SplitError, match=rf"\b{n} layers?\b.*\b{stages} stages\b"):
                stages_of(net, stages, split)
            continue
        found = stages_of(net, stages, split)
        assert len(found) == stages, (n, stages)
        assert all(found), (n, stages)
        assert [name for stage in found for name in stage] == [f"{i}" for i in range(n)]
        if split == "uniform":
            assert max(map(len, found)) == -(-n // stages), (n, stages)
            assert min(map(len, found)) == n // stages, (n, stages)


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
        (3, [4, 4], r"split=\[4, 4\]: cut points .* between 1 and 5\b"),
        (3, [4, 2], r"split=\[4, 2\]: cut points"),
        (3, [0, 2], r"split=\[0, 2\]: cut points"),
        (3, [2, 6], r"split=\[2, 6\]: cut points"),
        (3, ["l4", "l1"], r"split=\['?l4'?, '?l1'?\]: cut points"),
        (2, ["l0"], r"split=\['?l0'?\]: cut points"),
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
    net = nn.Sequential(*uses, nn.Linear(2, 2), nn.Linear(2, 2))
    for split in ("uniform", "size", "time"):
        options = PipelineOptions(split=split)
        found = plan(net, options, torch.zeros(1, 2), StageOwners.of_cpus(2))
        assert found.counts[0] >= 3
    message = r"'0' to '(1\.1|2)' .*\(b\.weight = a\.weight\)"
    with pytest.raises(SplitError, match=message):
        stages_of(nn.Sequential(*uses), 2, "uniform")


def test_a_list_cannot_cut_between_the_uses_of_one_layer():
    shared = nn.Linear(2, 2)
    with pytest.raises(SplitError, match=r"'0' and '1':"):
        stages_of(nn.Sequential(shared, nn.ReLU(), shared), 2, [1, 2])


def test_an_unknown_split_says_which_there_are():
    with pytest.raises(SplitError, match=r"^split='even' is unknown: use uniform, size, "):
        stages_of(transformer_like(), 2, "even")
    with pytest.raises(SplitError, match=r"^split='tiem' is unknown: did you mean 'time'\?"):
        stages_of(transformer_like(), 2, "tiem")


def named(*names):
    return [Layer(name, nn.ReLU()) for name in names]


LAYERS = named("embed", "blocks.0.mix", "blocks.0.mlp", "blocks.1.mix", "act", "head", "head@2")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embed", "blocks", "head"], [1, 4, 2]),
        (["blocks.0", "blocks.1", "head"], [3, 2, 2]),
        (["*.mix"], [7]),
        ([["embed", "blocks.0.mix"], "*.mlp", ["blocks.[1-9]", "act", "head"]], [2, 1, 4]),
        (["embed", "head"], [5, 2]),
        (["embed", "act", "head@2"], [4, 2, 1]),
        (["b*", ("act", "head")], [4, 3]),
    ],
)
def test_a_pattern_places_the_modules_it_matches_and_all_in_them(patterns, expected):
    assert counts_by_patterns(LAYERS, len(expected), patterns) == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embed", "heat"], r"no layer matches 'heat'; did you mean 'head'\?"),
        (["embed", "block"], r"no layer matches 'block'; did you mean 'blocks'\?"),
        (
            ["embed", "x?"],
            r"no layer matches 'x\?'; the layers and groups are: embed, blocks, ",
        ),
        (
            ["blocks", "blocks.1"],
            r"layer 'blocks\.1\.mix' matches 'blocks' of stage 0 and 'blocks\.1' of stage 1; it",
        ),
        (["blocks.1", "blocks.0"], r"layer 'blocks\.1\.mix' .* stage 0 .* 'blocks?\b"),
        ([[], "blocks"], r"2 stages .* stage 0:.*nb_part="),
        (["embed", []], r"2 stages .* stage 1:.*nb_part="),
    ],
)
def test_patterns_that_do_not_fit_say_what_would(patterns, message):
    with pytest.raises(SplitError, match=message):
        counts_by_patterns(LAYERS, 2, patterns)


def test_a_model_without_layers_is_refused():
    with pytest.raises(SplitError, match="no layers"):
        layers_of(nn.Sequential(nn.Sequential()))
