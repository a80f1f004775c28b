"""The plan file: `read` returns what was written, and names what does not fit and how to fix it."""

import re
from dataclasses import replace

import pytest
import yaml

from hybridtrain.errors import SplitError
from hybridtrain.partitioning import LayerCost, Plan, StagePlan, table
from hybridtrain.partitioning.plan import counts_for

MIB = 2**20


def cost(name, forward=1.0, backward=2.0, **others):
    return LayerCost(name, forward_ms=forward, backward_ms=backward, **others)


def plan(*stages, **others):
    return Plan(
        **{
            "model": "Transformer",
            "split": "time",
            "schedule": "1f1b",
            "chunks": 8,
            "nb_part": len(stages),
            "stages_per_device": 1,
            "recompute": "never",
            "expand": ["blocks.0"],
            "costs_from": "measured",
            "actions": ["F0@0 B0@0", "F0@1 B0@1"],
            "stages": [
                StagePlan(f"cuda:{index}", index, len(stages) - index, list(layers))
                for index, layers in enumerate(stages)
            ],
        }
        | others
    )


TWO = plan(
    [
        cost("embed", 0.5, 0.25, parameters=1000, weight_bytes=40 * MIB, crossing_bytes=MIB),
        cost("blocks.0.0", activation_bytes=10 * MIB, crossing_bytes=3 * MIB),
    ],
    [cost("1", 1.125, 2.5, parameters=3000, weight_bytes=1024 * MIB, activation_bytes=5 * MIB)],
)
TWO_NAMES = ["embed", "blocks.0.0", "1"]


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("recompute", ["never", "except_last", {"every": 2}, ["blocks"]], ids=str)
def test_read_returns_what_was_written(tmp_path, recompute):
    written = replace(TWO, recompute=recompute)
    written.write(tmp_path / "plan.yaml")
    assert Plan.read(tmp_path / "plan.yaml") == written


@pytest.mark.parametrize("name", ["", "0", "1.0", "on", "null", "1e3", "a: b", "a, [b] {c}", "né"])
def test_every_name_of_a_layer_survives_the_file(tmp_path, name):
    written = plan([cost(name)], expand=[name], model=name, recompute=[name])
    written.write(tmp_path / "plan.yaml")
    assert Plan.read(tmp_path / "plan.yaml") == written


def test_a_person_can_read_the_file(tmp_path):
    long = cost("blocks.11." + "attention." * 20 + "out", 1.23456, 1 / 3, crossing_ms=0.00042)
    plan([cost("embed"), long], [cost("head")]).write(str(tmp_path / "plan.yaml"))
    text = (tmp_path / "plan.yaml").read_text()
    assert text.startswith("#")
    assert "split=" in text.split("\nmodel:")[0]
    assert "model: Transformer\nsplit: time\nschedule: 1f1b\nchunks: 8\n" in text
    assert "\nrecompute: never\nexpand: [blocks.0]\ncosts_from: measured\n" in text
    assert "\n- device: cuda:1\n  process: 1\n  in_flight: 1\n  layers:\n" in text
    lines = [line.strip() for line in text.splitlines() if "name:" in line]
    assert len(lines) == 3  # a layer's costs stand on one line
    assert lines[1].startswith("- {name: blocks.11.attention.")
    assert "forward_ms: 1.235, backward_ms: 0.333, " in lines[1]
    assert lines[1].endswith("crossing_ms: 0.0}")


def test_layers_may_be_moved_by_hand_to_the_next_stage(tmp_path):
    path = tmp_path / "plan.yaml"
    TWO.write(path)
    content = yaml.safe_load(path.read_text())
    content["stages"][1]["layers"].insert(0, content["stages"][0]["layers"].pop())
    path.write_text(yaml.safe_dump(content))
    assert counts_for(Plan.read(path), TWO_NAMES, 2) == [1, 2]


def test_a_file_that_is_missing_or_not_yaml_is_named(tmp_path):
    path = tmp_path / "plan.yaml"
    with pytest.raises(SplitError, match=r"cannot read .*plan\.yaml: No such file"):
        Plan.read(path)
    with pytest.raises(SplitError, match=r"cannot read .*: Is a directory"):
        Plan.read(tmp_path)
    for content in (b"stages: [\n - {", b"\xff\xfe\x00 no text", b"a: b: c"):
        path.write_bytes(content)
        with pytest.raises(SplitError, match=r"plan\.yaml is not a YAML file: ") as caught:
            Plan.read(path)
        assert "\n" not in str(caught.value)
    for content in ("", "just a text", "- a\n- list\n"):
        path.write_text(content)
        with pytest.raises(SplitError, match=r"plan\.yaml must have the keys model, .* of a plan"):
            Plan.read(path)


def places(content):
    """Every mapping in a plan file: where its messages say it is, and the mapping."""
    yield "plan.yaml", content
    for index, stage in enumerate(content["stages"]):
        yield f"stages[{index}]", stage
        for number, layer in enumerate(stage["layers"]):
            yield f"stages[{index}]: layers[{number}]", layer


def test_every_missing_key_is_named_with_its_place(tmp_path):
    path = tmp_path / "plan.yaml"
    TWO.write(path)
    whole = path.read_text()
    keys = [(i, k) for i, (_, part) in enumerate(places(yaml.safe_load(whole))) for k in part]
    assert len(keys) == 11 + 2 * 4 + 3 * 9
    for index, key in keys:
        content = yaml.safe_load(whole)
        where, part = list(places(content))[index]
        del part[key]
        path.write_text(yaml.safe_dump(content))
        if key == "actions":  # which plans of earlier versions lack
            assert Plan.read(path) == replace(TWO, actions=[])
            continue
        with pytest.raises(SplitError, match=f"{re.escape(where)} lacks the key '{key}'; make"):
            Plan.read(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("chunks", "many", r"plan\.yaml: chunks='many' must be a whole number"),
        ("chunks", True, "must be a whole number"),
        ("stages", None, "stages=None must be a list"),
        ("expand", [0], r"plan\.yaml: expand\[0\]=0 "),
        ("recompute", 3, "recompute=3 must be a mode, {every: k} or a list of layer names"),
        ("stages", [3], r"stages\[0\] must have the keys device, process, in_flight, layers"),
        (
            "stages",
            [{"device": "cpu", "process": 0, "in_flight": 1, "layers": ["a"]}],
            r"stages\[0\]: layers\[0\] must have the keys name, parameters, ",
        ),
        (
            "stages",
            [{"device": "cpu", "process": 0, "in_flight": 1.5, "layers": []}],
            r"stages\[0\]: in_flight=1.5 must be a whole",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_place(tmp_path, key, value, message):
    path = tmp_path / "plan.yaml"
    TWO.write(path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {key: value}))
    with pytest.raises(SplitError, match=message):
        Plan.read(path)


def test_numbers_of_a_layer_may_be_whole_and_its_name_must_be_quoted(tmp_path):
    path = tmp_path / "plan.yaml"
    TWO.write(path)
    whole = path.read_text()
    path.write_text(whole.replace("forward_ms: 1.125", "forward_ms: 1"))
    assert Plan.read(path).stages[1].layers[0].forward_ms == 1
    path.write_text(whole.replace("name: '1'", "name: 1"))
    with pytest.raises(SplitError, match=r"stages\[1\]: layers\[0\]: name=1 .*\(in quotes\)"):
        Plan.read(path)
    path.write_text(whole.replace("forward_ms: 1.125", "forward_ms: fast"))
    with pytest.raises(SplitError, match=r"layers\[0\]: forward_ms='fast' must be a number"):
        Plan.read(path)


# ---------------------------------------------------------------- a plan and a model


def test_a_plan_gives_the_counts_of_its_stages():
    assert counts_for(TWO, TWO_NAMES, 2) == [2, 1]


def test_a_plan_fits_finer_and_coarser_layers_if_both_have_the_first_of_each_stage():
    coarse = ["embed", "encoder", "head"]
    fine = ["embed", "encoder.0", "encoder.1", "head.norm", "head"]
    of_coarse = plan([cost("embed"), cost("encoder")], [cost("head")])
    assert counts_for(of_coarse, fine, 2) == [4, 1]
    of_fine = plan([cost(name) for name in fine[:4]], [cost("head")])
    assert counts_for(of_fine, coarse, 2) == [2, 1]
    inside = plan([cost("embed"), cost("encoder.0")], [cost(name) for name in fine[2:]])
    with pytest.raises(SplitError, match=r"the model has no layer 'encoder\.0' of the plan"):
        counts_for(inside, coarse, 2)
    with pytest.raises(SplitError, match=r"the plan lacks the model's layer 'other'"):
        counts_for(of_coarse, [*coarse, "other"], 2)


@pytest.mark.parametrize(
    ("names", "stages", "message"),
    [
        (
            ["embed", "blocks.0.1", "1"],
            2,
            r"model has no layer 'blocks\.0\.0' of the plan \(did you mean 'blocks\.0\.1'\?\).* "
            r"made for a Transformer\): make a new plan with split=time",
        ),
        (["xyz"], 2, r"no layer 'embed' of the plan \(the plan was made for a Transformer\)"),
        ([*TWO_NAMES, "head"], 2, r"plan lacks the model's layer 'head' .*: make a new plan"),
        (
            ["blocks.0.0", "embed", "1"],
            2,
            r"plan has layer 'embed' where the model has 'blocks\.0\.0' .*: put .* or make a new",
        ),
        (
            TWO_NAMES,
            4,
            r"\b2 stages, .*\b4 .*: set nb_part=2 and stages_per_device=1 as in "
            r"the plan, or make a new plan",
        ),
    ],
)
def test_a_plan_for_another_model_says_what_differs_and_how_to_fix_it(names, stages, message):
    with pytest.raises(SplitError, match=message):
        counts_for(TWO, names, stages)


def test_a_stage_whose_layers_were_all_moved_is_named():
    emptied = plan([], [layer for stage in TWO.stages for layer in stage.layers])
    with pytest.raises(SplitError, match=r"stage 0 has no layers"):
        counts_for(emptied, TWO_NAMES, 2)


def test_a_layer_that_was_copied_instead_of_moved_is_named():
    first, second = TWO.stages
    copied = replace(second, layers=[first.layers[1], *second.layers])
    twice = replace(TWO, stages=[first, copied])
    with pytest.raises(SplitError, match=r"'blocks\.0\.0' twice"):
        counts_for(twice, TWO_NAMES, 2)


# ---------------------------------------------------------------- the table


TWO_AS_TEXT = """\
  stage  layers  parameters  forward ms  backward ms     memory  share of time  device  from ... to
      0       2       1,000       1.500        2.250  60.00 MiB            51%  cuda:0  embed ... blocks.0.0
      1       1       3,000       1.125        2.500   1.01 GiB            49%  cuda:1  1"""  # noqa: E501


def test_the_table_shows_time_memory_and_share_of_each_stage():
    # stage 0 holds 2 micro-batches; stage 1 holds 1, and what it was sent with it
    assert table(TWO) == TWO_AS_TEXT


def test_without_times_the_table_shows_the_share_of_the_parameters():
    counted = [
        [LayerCost(c.name, c.parameters, weight_bytes=c.weight_bytes) for c in stage.layers]
        for stage in TWO.stages
    ]
    assert table(plan(*counted)).splitlines() == [
        "  stage  layers  parameters  weights + state  share of parameters  device  from ... to",
        "      0       2       1,000        40.00 MiB                  25%  cuda:0  embed ... "
        "blocks.0.0",
        "      1       1       3,000         1.00 GiB                  75%  cuda:1  1",
        "layer 1 alone takes 75% of the parameters: no cut can make its stage smaller",
    ]


def test_the_table_names_a_layer_larger_than_the_mean_stage():
    expensive = plan([cost("a", 0.1, 0.2)], [cost("b", 0.4, 0.1)], [cost("c", 0.1, 0)])
    assert table(expensive).splitlines()[-1] == (
        "layer b alone takes 56% of the step: no cut can make its stage smaller"
    )
    ten_alike = plan(*[[cost(f"{index}", 0.1, 0)] for index in range(10)])
    for even in (plan([cost("a")], [cost("b")]), ten_alike):
        assert "alone" not in table(even)


def test_one_stage_and_a_model_without_cost_have_a_table_too():
    assert len(table(plan([cost("a"), cost("b", 9)])).splitlines()) == 2
    assert "0%" in table(plan([LayerCost("a")], [LayerCost("b")]))
