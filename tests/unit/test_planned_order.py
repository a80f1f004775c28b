"""The order in a plan: a searched schedule as text, and the runs that take it."""

import copy

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.cluster import Cluster
from hybridtrain.errors import ScheduleError, SplitError
from hybridtrain.machine import Machine
from hybridtrain.models import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.planning import LayerCost, Plan, plan
from hybridtrain.planning.layout import Choices, Job
from hybridtrain.planning.priced import find_plans
from hybridtrain.schedule import (
    Durations,
    as_lines,
    from_lines,
    make_schedule,
    peak_in_flight,
    read_schedule,
)

TIMES = st.lists(st.integers(1, 20), min_size=6, max_size=6)
NAMES = st.sampled_from([("1f1b", 1), ("gpipe", 3), ("zb-h1", 1), ("zb-v", 2)])


def net_of(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def planned(forward, devices, **options):
    """A plan of a model whose layers take so long, with a searched schedule."""
    costs = [LayerCost(f"{i}", 1, ms, 2 * ms) for i, ms in enumerate(forward)]
    return plan(
        net_of(len(forward)),
        PipelineOptions(**{"schedule": "search", "chunks": 4} | options),
        torch.rand(16, 4),
        Cluster.of_cpus(devices),
        costs=lambda layers, inputs: costs,
    )


# Four layers on two devices, in an order that no search gives: micro-batches in pairs.
FORWARD = [3.0, 1.0, 1.0, 1.0]
BY_HAND = ["F0 F1 B0 B1 F2 F3 B2 B3", "F0 B0 F1 I1 F2 W1 I2 W2 F3 B3"]


@pytest.fixture
def edited(tmp_path):
    """The path of a plan, whose order was changed by hand."""
    path = tmp_path / "plan.yaml"
    planned(FORWARD, 2).write(path)
    change(path, order=BY_HAND)
    return path


def change(path, **values):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


# As text -----------------------------------------------------------------------------------------


@given(NAMES, st.integers(1, 6), st.integers(1, 12))
def test_every_schedule_is_the_same_again_from_its_lines(kind, devices, chunks):
    name, v = kind
    schedule = make_schedule(name, devices, chunks, v)
    lines = as_lines(schedule)
    placement = "v" if name == "zb-v" else "loop"
    assert from_lines(name, lines, devices, chunks, v, placement) == schedule
    assert len(lines) == devices


@settings(max_examples=30)
@given(
    st.sampled_from([("search", 1), ("search", 2), ("search-v", 2)]), st.integers(1, 4),
    st.integers(1, 8), TIMES, st.one_of(st.none(), st.integers(1, 5)),
)  # fmt: skip
def test_the_file_of_a_plan_has_the_very_order_that_was_searched(
    tmp_path_factory, kind, devices, chunks, forward, limit
):
    name, v = kind
    forward = (forward * 2)[: devices * v]
    options = {"chunks": chunks, "stages_per_device": v, "max_inflight": limit, "schedule": name}
    made = planned(forward, devices, **options)
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    made.write(path)
    again = Plan.read(path)
    searched = make_schedule(name, devices, chunks, v, limit, made.durations())
    assert again.searched_schedule() == searched
    assert again == made
    assert again.in_flight == list(peak_in_flight(searched))
    if limit is not None:
        assert peak_in_flight(searched)[0] <= limit
    # a run that takes the plan plans the same
    assert planned([1] * len(forward), devices, split=str(path), **options).order == again.order


def test_a_person_can_read_the_order():
    text = planned(FORWARD, 2, chunks=2).to_yaml()
    assert "a line for each device" in text
    assert text.endswith("\norder:\n- F0 F1 B0 B1\n- F0 I0 F1 I1 W0 W1\n")
    text = planned(FORWARD, 2, chunks=1, stages_per_device=2).to_yaml()
    assert text.endswith("\norder:\n- F0@0 F0@2 I0@2 W0@2 B0@0\n- F0@1 F0@3 I0@3 W0@3 I0@1 W0@1\n")


def test_a_schedule_that_has_a_name_is_none_that_a_plan_lists():
    text = planned(FORWARD, 2, schedule="zb-h1").to_yaml()
    assert "order:" not in text
    assert "max_inflight:" not in text


# In a run ----------------------------------------------------------------------------------------


def model_of(path, devices=2, **options):
    settings = {"schedule": "search", "chunks": 4, "split": str(path)} | options
    return HybridModel(net_of(4), World.from_env(nb_part=devices, devices="cpu"), **settings)


def test_a_run_takes_the_order_of_its_plan_and_trains_as_the_whole_model(edited):
    model = model_of(edited)
    expected = from_lines("search", BY_HAND, 2, 4)
    assert model.schedule(4) == expected
    assert model.plan.in_flight == list(peak_in_flight(expected))
    whole = copy.deepcopy(model.net)
    x, y = torch.rand(8, 4), torch.rand(8, 4)
    timeline = model.train_step(x, y, F.mse_loss, timeline=True).timeline
    ran = [[span.action for span in lane] for lane in timeline.spans()]
    assert ran == [list(lane) for lane in expected.lanes]
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.mse_loss(whole(part), target) / 4).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_another_number_of_micro_batches_is_searched_for_the_durations_of_the_plan(edited):
    model = model_of(edited)
    durations = Plan.read(edited).durations()
    assert model.schedule(3) == make_schedule("search", 2, 3, 1, None, durations)
    five = model_of(edited, chunks=5)
    assert five.schedule(5) == make_schedule("search", 2, 5, 1, None, durations)


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {"stages_per_device": 2}), (2, {"max_inflight": 2}), (2, {"checkpoint": "always"})],
    ids=str,
)
def test_an_order_for_other_settings_is_not_taken(edited, devices, options, caplog):
    caplog.set_level("INFO")
    model = model_of(edited, devices, **options)
    v, limit = options.get("stages_per_device", 1), options.get("max_inflight")
    shape = devices, 4, v, limit, model.plan.durations()
    assert model.schedule(4) == make_schedule("search", *shape)
    assert as_lines(model.schedule(4)) == model.plan.order != BY_HAND
    assert "is for other settings: one is searched anew" in caplog.text


def test_a_plan_of_an_earlier_version_without_an_order_is_searched(edited):
    content = yaml.safe_load(edited.read_text())
    del content["order"]
    edited.write_text(yaml.safe_dump(content))
    found = Plan.read(edited)
    assert (found.order, found.max_inflight, found.searched_schedule()) == ([], None, None)
    assert model_of(edited).schedule(4) == make_schedule("search", 2, 4, 1, None, found.durations())


FIRST, SECOND = BY_HAND
DAMAGED = {
    "a line too few": ([FIRST], "1 lines for 2 devices"),
    "no such action": ([FIRST, SECOND.replace("W1", "X1")], "device 1: 'X1' is not an action"),
    "another device's stage": ([FIRST, SECOND.replace("F0", "F0@0")], "'F0@0' is of another dev"),
    "an action is gone": ([FIRST, SECOND.replace(" W2", "")], "B3@1 is out of order"),
    "an action twice": ([FIRST, SECOND + " B3"], "B3@1 is out of order"),
    "fewer micro-batches": (["F0 B0", "F0 B0"], "stage 0 lacks an F"),
    "more micro-batches": ([FIRST + " F4 B4", SECOND + " F4 B4"], "F4@0: no such stage or"),
    "deadlock": (["F0 B0 F1 B1 F2 F3 B2 B3", "F0 F1 B0 B1 F2 F3 B2 B3"], "deadlock"),
    "over the limit": (["F0 F1 F2 B0 B1 B2 F3 B3", SECOND], "holds 3 micro-batches, and 2 are"),
}


@pytest.mark.parametrize(("lines", "why"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_order_is_one_line_that_names_the_key_and_the_way_out(edited, lines, why):
    change(edited, order=lines)
    with pytest.raises(SplitError) as caught:
        model_of(edited)
    told = str(caught.value)
    assert told.startswith(f"split=: {edited}: order: ")
    assert why in told
    assert told.endswith("; delete the key order, and it is searched anew")
    assert "\n" not in told


def test_an_order_in_which_more_is_in_flight_than_its_limit_is_refused():
    with pytest.raises(ScheduleError, match="2 micro-batches are in flight, and max_inflight=1"):
        read_schedule("search", BY_HAND, 2, 4, 1, 1)


def test_a_priced_plan_has_the_order_that_was_priced(tmp_path):
    net, tokens = gpt(64, 8, n_layer=6, d_model=16), torch.randint(64, (8, 8))
    machine = Machine(nodes=1, devices_per_node=2, flops_per_s={"fp32": 1e12})
    choices = Choices(nb_part=[2], chunks=[4], schedule=["search"], checkpoint=["never"])
    plans = find_plans(net, tokens, machine, Job(8), choices=choices)
    path = tmp_path / "plan.yaml"
    plans.plan().write(path)
    found = Plan.read(path).searched_schedule()
    assert found == plans.prices[0].order
    v = plans.prices[0].layout.stages_per_device
    options = PipelineOptions(chunks=4, stages_per_device=v, schedule="search", split=str(path))
    assert plan(net, options, tokens, Cluster.of_cpus(2)).searched_schedule() == found


def test_durations_of_equal_stages_are_searched_where_a_plan_knows_none():
    found = plan(
        net_of(4), PipelineOptions(schedule="search", chunks=4), cluster=Cluster.of_cpus(2)
    )
    assert found.durations() is None
    assert found.searched_schedule() == make_schedule("search", 2, 4, durations=Durations.equal(2))
