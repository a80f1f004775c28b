"""The copies of offloaded activations in a simulated step, and in its timeline."""

import pytest
import torch
from support.compare import hybrid
from support.schedules import BUILT_IN
from torch import nn
from torch.nn import functional as F

from hybridtrain.observe import TimelineFiles, draw_timelines, spans_of_trace
from hybridtrain.schedule import (
    Action,
    CopyTimes,
    Durations,
    Span,
    copies_of,
    make_schedule,
    offload_copies,
    predict,
    registered,
)


def durations(stages, copies=None):
    equal = Durations.equal(stages)
    return Durations(equal.forward, equal.backward, equal.weight, equal.transfer, copies=copies)


def copying(stages, away, back, both=1.0, offloading="overlapped"):
    return durations(stages, CopyTimes((away,) * stages, (back,) * stages, both, offloading))


@pytest.mark.parametrize("offloading", ["instant", "overlapped"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_copies_that_take_no_time_change_nothing(name, offloading):
    per_device = registered(name).stages_per_device or 1
    table = make_schedule(name, 4, 16, per_device)
    stages = 4 * per_device
    spans = copying(stages, 0.0, 0.0, offloading=offloading).spans(table)
    assert spans == durations(stages).spans(table)
    made = [(c.stage, c.microbatch, c.back) for lane in copies_of(spans) for c in lane]
    of_table = offload_copies(table, offloading)
    assert sorted(made) == sorted(
        [(*held, True) for copies in of_table.values() for held in copies.back]
        + [(*copies.away, False) for copies in of_table.values() if copies.away]
    )


def test_a_cpu_copies_itself_so_that_every_copy_makes_the_step_longer():
    table = make_schedule("gpipe", 1, 4, 1)
    step = copying(1, 0.25, 0.5, offloading="instant").length(table)
    moved = sum(c.away is not None for c in offload_copies(table, "instant").values())
    assert moved == 4
    assert step == pytest.approx(4 * (3 + 0.25 + 0.5))


def test_an_action_waits_for_the_copies_of_the_action_before_the_last_and_for_its_own():
    """F0 F1 F2 F3 B0 B1 B2 B3 of one device; a copy out takes as long as 1.5 forwards."""
    table = make_schedule("gpipe", 1, 4, 1)
    spans = copying(1, 1.5, 3.5).spans(table)
    start = {str(action): start for action, start, _ in spans[0]}
    copies = {(c.microbatch, c.back): (c.start, c.end) for c in copies_of(spans)[0]}
    # out: in their order, each after its forward
    assert copies[0, False] == (1.0, 2.5)
    assert copies[1, False] == (2.5, 4.0)
    # F2 would begin at 2, and F0 must have left; F3 at 3.5, and F1 must have left
    assert start["F2@0"] == 2.5
    assert start["F3@0"] == 4.0
    # B0 comes back from the end of F2 on
    assert copies[0, True] == (4.0, 7.5)
    assert start["B0@0"] == 7.5


def test_a_copy_is_slower_while_another_one_runs_the_other_way():
    table = make_schedule("gpipe", 1, 4, 1)
    alone, slowed = (
        {(c.microbatch, c.back): c.end - c.start for c in copies_of(lanes)[0]}
        for lanes in (copying(1, 2.0, 2.0, both).spans(table) for both in (1.0, 2.0))
    )
    assert set(alone.values()) == {2.0}
    assert max(slowed.values()) > 2.0
    assert min(slowed.values()) == 2.0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_slower_copies_never_make_a_step_shorter_and_fast_ones_are_hidden(name):
    table = make_schedule(name, 4, 16, 1)
    free = durations(4).length(table)
    steps = [copying(4, time, time).length(table) for time in (0.1, 0.5, 1.0, 2.0, 4.0)]
    assert steps[0] <= free * 1.05
    assert steps == sorted(steps)
    assert steps[-1] > free


def step_with_timeline(**options):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = hybrid(net, 2, chunks=6, schedule="gpipe", self_check=False, **options)
    x = torch.randn(6 * 32, 64)
    return model.train_step(x, x, F.mse_loss, timeline=True).timeline


def test_a_timeline_has_the_copies_of_a_step_and_files_and_pictures_have_them(tmp_path):
    timeline = step_with_timeline(offload="all")
    spans, table = timeline.spans(), timeline.schedule
    lanes = copies_of(spans)
    of_table = offload_copies(table, "instant")
    for device, (lane, actions) in enumerate(zip(lanes, spans, strict=True)):
        moved = {c.away for a, c in of_table.items() if c.away and table.lane_of[a.stage] == device}
        assert {(c.stage, c.microbatch) for c in lane if not c.back} == moved
        assert {(c.stage, c.microbatch) for c in lane if c.back} == moved
        ends = {action: end for action, _, end in actions}
        starts = {action: start for action, start, _ in actions}
        for copy in lane:
            held = copy.stage, copy.microbatch
            assert copy.end >= copy.start >= ends[Action("F", *held)]
            assert copy.end <= starts[Action("B", *held)]
    predicted = predict(table, timeline.computing())
    assert [len(lane) for lane in copies_of(predicted)] == [len(lane) for lane in lanes]

    class Here:
        step = 1

    TimelineFiles(tmp_path).on_timeline(Here(), predicted, spans)
    read = spans_of_trace(tmp_path / "timeline.json")
    assert [list(map(len, copies_of(each))) for each in read] == [list(map(len, lanes))] * 2
    plain = [[Span(*span) for span in lane] for lane in spans]
    heights = [draw_timelines({"step": each}).height for each in (plain, spans)]
    assert heights[1] - heights[0] == heights[0] - draw_timelines({"step": plain[:1]}).height + 28


def test_a_step_without_offloading_has_no_copies():
    timeline = step_with_timeline()
    assert copies_of(timeline.spans()) == ()
    assert copies_of(predict(timeline.schedule, timeline.computing())) == ()
