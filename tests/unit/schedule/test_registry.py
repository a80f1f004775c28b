"""Schedules of users, which a decorator registers."""

import copy
from dataclasses import replace

import pytest
import torch
from support.compare import assert_same
from torch import nn
from torch.nn.functional import mse_loss

from hybridtrain import HybridModel, World
from hybridtrain.errors import ConfigError, ScheduleError
from hybridtrain.price import Choices, ParallelLayout
from hybridtrain.price.price import simulated_step
from hybridtrain.price.stage_needs import most_in_flight
from hybridtrain.schedule import (
    Action,
    Durations,
    Schedule,
    gpipe,
    make_schedule,
    peak_in_flight,
    schedule,
    schedule_names,
    stages_at,
)


@schedule("in-pairs")
def in_pairs(devices, chunks, stages_per_device):
    """Two micro-batches at a time, forward and then backward."""
    lanes = []
    for device in range(devices):
        stages, lane = stages_at(device, devices, stages_per_device), []
        for first in range(0, chunks, 2):
            pair = range(first, min(first + 2, chunks))
            lane += [Action("F", stage, i) for stage in stages for i in pair]
            lane += [Action("B", stage, i) for stage in reversed(stages) for i in pair]
        lanes.append(tuple(lane))
    return Schedule("in-pairs", devices * stages_per_device, chunks, tuple(lanes))


@schedule("v-in-turn", placement="v", stages_per_device=2, splits_backward=True)
def v_in_turn(devices, chunks):
    """Each micro-batch alone, there and back; the first stage's gradients come last."""
    lanes = []
    for device in range(devices):
        down, up = stages_at(device, devices, 2, "v")
        lane = []
        for i in range(chunks):
            lane += [Action("F", down, i), Action("F", up, i), Action("I", up, i)]
            lane += [Action("I", down, i), Action("W", up, i), Action("W", down, i)]
        lanes.append(tuple(lane))
    return Schedule("v-in-turn", 2 * devices, chunks, tuple(lanes))


@pytest.mark.parametrize(
    ("name", "per_device", "held"), [("in-pairs", 1, 2), ("in-pairs", 2, 2), ("v-in-turn", 2, 1)]
)
@pytest.mark.parametrize("samples", [12, 5])
@pytest.mark.quick_cases(2)
def test_a_users_schedule_trains_exactly(name, per_device, held, samples):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    plain, world = copy.deepcopy(net), World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, world, chunks=4, schedule=name, stages_per_device=per_device)
    table = model.schedule(4)
    assert max(peak_in_flight(table)) == held
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (net, plain)]
    for _ in range(3):
        inputs, targets = torch.randn(2, samples, 8)
        result = model.train_step(inputs, targets, mse_loss, timeline=True)
        for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
            (mse_loss(plain(x), y) * len(x) / samples).backward()
        assert_same(
            {n: p.grad for n, p in model.named_parameters()},
            {n: p.grad for n, p in plain.named_parameters()},
        )
        ran = [[span.action for span in lane] for lane in result.timeline.spans()]
        assert ran == [list(lane) for lane in table.lanes]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@schedule("late", stages_per_device=1)
def late(devices, chunks):
    """One micro-batch at a time up to the 40th, and all further ones at once."""
    early = min(chunks, 40)
    lanes = [
        [Action(kind, device, i) for i in range(early) for kind in "FB"]
        + [Action(kind, device, i) for kind in "FB" for i in range(early, chunks)]
        for device in range(devices)
    ]
    return Schedule("late", devices, chunks, tuple(map(tuple, lanes)))


def test_a_users_schedule_that_changes_late_is_priced_from_its_full_table():
    layout = ParallelLayout(2, chunks=300, schedule="late")
    assert most_in_flight(layout) == (260, 260)
    # two stages of 1 ms forward and 2 ms backward, taken in full each time or all together
    durations = Durations.equal(2)
    table = make_schedule("late", 2, 4_000)
    priced = simulated_step(replace(layout, chunks=4_000), durations)
    assert priced.length == durations.length(table)


@pytest.mark.parametrize("name", ["in-pairs", "v-in-turn"])
@pytest.mark.parametrize("chunks", [1, 7, 48, 51])
def test_a_users_schedule_is_priced_with_what_its_table_holds(name, chunks):
    layout = ParallelLayout(3, chunks=chunks, schedule=name, stages_per_device=2)
    assert most_in_flight(layout) == peak_in_flight(make_schedule(name, 3, chunks, 2))


def test_auto_and_plan_choose_among_all_schedules_that_are_registered():
    built_in = {"1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "v-min"}
    assert set(Choices().schedule) == set(schedule_names())
    assert set(schedule_names()) >= {"in-pairs", "late", "v-in-turn", *built_in}


def test_a_schedule_that_is_not_periodic_as_registered_is_refused_when_it_is_extrapolated():
    @schedule("not-periodic", stages_per_device=1, periodic=True)
    def not_periodic(devices, chunks):
        early = devices * 4  # GPipe after four groups of one micro-batch at a time
        lanes = [
            [Action(kind, d, i) for i in range(min(early, chunks)) for kind in "FB"]
            + [Action(kind, d, i) for kind in "FB" for i in range(early, chunks)]
            for d in range(devices)
        ]
        return Schedule("not-periodic", devices, chunks, tuple(map(tuple, lanes)))

    layout = ParallelLayout(2, chunks=400, schedule="not-periodic")
    message = "schedule=not-periodic is registered with periodic=True, but on 2 devices its 4th"
    try:
        with pytest.raises(ScheduleError, match=message):
            most_in_flight(layout)
        with pytest.raises(ScheduleError, match=message):
            simulated_step(replace(layout, chunks=40_000), Durations.equal(2))
    finally:  # other tests search all schedules
        schedule("not-periodic", stages_per_device=1)(not_periodic)


def test_a_name_belongs_to_one_function_which_may_be_defined_again():
    taken = r"schedule=gpipe .* hybridtrain\.schedule\.named\.gpipe: register test_registry"
    with pytest.raises(ScheduleError, match=taken):
        schedule("gpipe")(in_pairs)
    assert make_schedule("gpipe", 2, 4) == gpipe(2, 4)

    def cell(lanes):  # of a notebook
        @schedule("in-a-notebook")
        def again(devices, chunks, stages_per_device):
            return lanes(devices, chunks, stages_per_device)

    cell(in_pairs)
    assert peak_in_flight(make_schedule("in-a-notebook", 2, 8)) == (2, 2)
    cell(gpipe)
    assert peak_in_flight(make_schedule("in-a-notebook", 2, 8)) == (8, 8)


def test_an_unknown_schedule_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="schedule=in-pair is unknown: did you mean 'in-pairs'"):
        HybridModel(nn.Linear(2, 2), World.from_env(nb_part=1, devices="cpu"), schedule="in-pair")


def wrong(change):
    """Registers `in-pairs` with lanes, or a table, that are changed."""

    @schedule("wrong")
    def again(devices, chunks, stages_per_device):
        return change(in_pairs(devices, chunks, stages_per_device))


def with_lanes(change):
    return lambda table: Schedule("wrong", table.stages, table.chunks, change(table.lanes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.lanes,
            r"schedule=wrong: .*hybridtrain\.schedule\.Schedule, not a tuple",
        ),
        (
            with_lanes(lambda lanes: lanes[:1]),
            "2 stages, 4 micro-batches and 1 devices, expected 2 stages, 4 micro-batches and 2",
        ),
        (with_lanes(lambda lanes: (lanes[0], lanes[1][:-1])), "wrong: stage 1 lacks a B or I"),
        (
            with_lanes(lambda lanes: (lanes[0][::-1], lanes[1])),
            "wrong: B3@0 is out of order; stage 0 must take each micro-batch once, first to last",
        ),
        (
            with_lanes(lambda lanes: (lanes[0], lanes[1][2:] + lanes[1][:2])),
            "wrong: B0@1 is out of order|wrong: F2@1 is out of order|deadlock",
        ),
        (
            with_lanes(lambda lanes: lanes[::-1]),
            "schedule=wrong: stage 0 is on device 1, but placement='loop' requires device 0",
        ),
        (
            with_lanes(lambda lanes: (lanes[0], tuple(in_two(lanes[1])))),
            "schedule=wrong .*: register it with splits_backward=True",
        ),
    ],
)
def test_a_table_that_cannot_run_is_refused_when_the_model_is_made(change, message):
    wrong(change)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ScheduleError, match=message):
        HybridModel(net, World.from_env(nb_part=2, devices="cpu"), chunks=4, schedule="wrong")


def in_two(lane):
    for action in lane:
        if action.kind == "B":
            yield action._replace(kind="I")
            action = action._replace(kind="W")
        yield action
