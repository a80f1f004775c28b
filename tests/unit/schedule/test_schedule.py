"""Schedules of whole backwards, the validator and the simulator: stages 1..8, chunks 1..40."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule import (
    Action,
    Schedule,
    bubble_fraction,
    forward_only,
    gpipe,
    make_schedule,
    one_forward_one_backward,
    peak_in_flight,
    predict,
    simulate,
    validate,
)

# The schedules whose backwards are whole; test_split_schedules.py has the others.
WHOLE = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
NAMES = st.sampled_from(sorted(WHOLE))
STAGES = st.integers(1, 8)
CHUNKS = st.integers(1, 40)
PER_DEVICE = st.integers(1, 4)


def changed(schedule, lanes):
    return Schedule(schedule.name, schedule.stages, schedule.chunks, tuple(map(tuple, lanes)))


def assert_refused(schedule, lanes):
    assert [list(lane) for lane in schedule.lanes] != lanes, "the mutation changed nothing"
    with pytest.raises(ScheduleError):
        validate(changed(schedule, lanes))


@pytest.mark.parametrize("name", sorted(WHOLE))
@pytest.mark.quick_cases(1)
def test_every_stage_takes_every_microbatch_once_and_in_order(name):
    for stages in range(1, 9):
        for chunks in range(1, 41):
            schedule = WHOLE[name](stages, chunks)
            validate(schedule)
            assert (schedule.name, schedule.stages, schedule.chunks) == (name, stages, chunks)
            assert len(schedule.lanes) == stages
            for s, lane in enumerate(schedule.lanes):
                for kind in "FB":
                    mine = [a.microbatch for a in lane if a.kind == kind]
                    assert mine == list(range(chunks)), (stages, chunks, s, kind)
                assert {a.stage for a in lane} == {s}
                for i in range(chunks):
                    assert lane.index(Action("F", s, i)) < lane.index(Action("B", s, i))


def test_gpipe_holds_all_microbatches_and_1f1b_at_most_the_stages_to_come():
    for stages in range(1, 9):
        for chunks in range(1, 41):
            assert peak_in_flight(WHOLE["gpipe"](stages, chunks)) == (chunks,) * stages
            assert peak_in_flight(WHOLE["1f1b"](stages, chunks)) == tuple(
                min(chunks, stages - s) for s in range(stages)
            )


@given(NAMES, STAGES, CHUNKS, st.integers(1, 50), st.integers(1, 50))
def test_equal_stages_take_the_ideal_time_with_the_known_bubble(name, stages, chunks, tf, tb):
    # whole numbers, so that the sums are exact
    spans = simulate(WHOLE[name](stages, chunks), [tf] * stages, [tb] * stages)
    assert max(span.end for lane in spans for span in lane) == (chunks + stages - 1) * (tf + tb)
    assert min(span.start for lane in spans for span in lane) == 0
    bubble = Fraction(stages - 1, chunks + stages - 1)
    # one division in floating point
    assert bubble_fraction(spans) == pytest.approx(float(bubble), abs=1e-12)


COSTS = st.lists(st.integers(0, 20), min_size=8, max_size=8)


@given(NAMES, STAGES, CHUNKS, COSTS, COSTS)
def test_a_simulated_action_waits_for_its_device_and_for_what_it_needs(
    name, stages, chunks, forward, backward
):
    schedule = WHOLE[name](stages, chunks)
    spans = simulate(schedule, forward, backward)
    at = {span.action: span for lane in spans for span in lane}
    for lane, planned in zip(spans, schedule.lanes, strict=True):
        assert tuple(span.action for span in lane) == planned
        assert all(a.end <= b.start for a, b in pairwise(lane))
    for (kind, s, i), span in at.items():
        assert span.end - span.start == (forward if kind == "F" else backward)[s]
        if kind == "F" and s:
            assert at[Action("F", s - 1, i)].end <= span.start
        if kind == "B":
            assert at[Action("F", s, i)].end <= span.start
        if kind == "B" and s + 1 < stages:
            assert at[Action("B", s + 1, i)].end <= span.start


# From here on: a valid schedule with one thing wrong is refused.
@st.composite
def schedule_with_an_action(draw, min_stages=1, min_chunks=1):
    name = draw(NAMES)
    schedule = WHOLE[name](draw(st.integers(min_stages, 8)), draw(st.integers(min_chunks, 40)))
    lane = draw(st.integers(0, schedule.stages - 1))
    place = draw(st.integers(0, 2 * schedule.chunks - 1))
    return schedule, [list(each) for each in schedule.lanes], lane, place


@given(schedule_with_an_action())
def test_a_schedule_without_one_of_its_actions_is_refused(case):
    schedule, lanes, lane, place = case
    del lanes[lane][place]
    assert_refused(schedule, lanes)


@given(schedule_with_an_action(), st.data())
def test_a_schedule_with_an_action_twice_is_refused(case, data):
    schedule, lanes, lane, place = case
    to = data.draw(st.integers(0, len(lanes[lane])))
    lanes[lane].insert(to, lanes[lane][place])
    assert_refused(schedule, lanes)


@given(schedule_with_an_action(min_chunks=2), st.data())
def test_two_forwards_or_two_backwards_in_the_wrong_order_are_refused(case, data):
    schedule, lanes, lane, place = case
    same = [
        i
        for i, action in enumerate(lanes[lane])
        if action.kind == lanes[lane][place].kind and i != place
    ]
    other = data.draw(st.sampled_from(same))
    mine = lanes[lane]
    mine[place], mine[other] = mine[other], mine[place]
    assert_refused(schedule, lanes)


@given(schedule_with_an_action())
def test_a_backward_before_its_own_forward_is_refused(case):
    schedule, lanes, lane, place = case
    microbatch = lanes[lane][place].microbatch
    forward = lanes[lane].index(Action("F", lane, microbatch))
    lanes[lane].remove(Action("B", lane, microbatch))
    lanes[lane].insert(forward, Action("B", lane, microbatch))
    assert_refused(schedule, lanes)


@given(schedule_with_an_action(min_stages=2), st.data())
def test_a_stage_on_two_devices_is_refused(case, data):
    schedule, lanes, lane, place = case
    other = data.draw(st.sampled_from([i for i in range(len(lanes)) if i != lane]))
    action = lanes[lane].pop(place)
    lanes[other].insert(data.draw(st.integers(0, len(lanes[other]))), action)
    with pytest.raises(ScheduleError, match=r"two devices|out of order"):
        validate(changed(schedule, lanes))


@given(schedule_with_an_action(min_stages=2), st.data())
def test_two_actions_swapped_between_devices_are_refused(case, data):
    schedule, lanes, lane, place = case
    other = data.draw(st.sampled_from([i for i in range(len(lanes)) if i != lane]))
    there = data.draw(st.integers(0, len(lanes[other]) - 1))
    lanes[lane][place], lanes[other][there] = lanes[other][there], lanes[lane][place]
    assert_refused(schedule, lanes)


@given(schedule_with_an_action(), st.sampled_from(["stage", "microbatch"]), st.booleans())
def test_an_action_of_a_stage_or_microbatch_out_of_range_is_refused(case, field, below):
    schedule, lanes, lane, place = case
    count = schedule.stages if field == "stage" else schedule.chunks
    lanes[lane][place] = lanes[lane][place]._replace(**{field: -1 if below else count})
    assert_refused(schedule, lanes)


def test_lanes_that_wait_for_one_another_are_refused_and_named():
    # in order on each device, but B0@0 waits for B0@1, which stands behind F1@1, which waits for
    # F1@0, which stands behind B0@0
    lanes = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)),
    )
    with pytest.raises(
        ScheduleError,
        match=(
            r"deadlock; waiting in a cycle: device 0: B0@0 needs B0@1, which is after F1@1 on "
            r"device 1; "
            r"device 1: F1@1 needs F1@0, which is after B0@0 on device 0$"
        ),
    ):
        validate(Schedule("by hand", 2, 2, lanes))


@given(STAGES.filter(lambda n: n > 1), CHUNKS.filter(lambda n: n > 1), st.data())
def test_a_stage_that_holds_less_than_the_next_one_deadlocks(stages, chunks, data):
    # stage s of 1F1B keeps one micro-batch fewer in flight than stage s + 1 asks for
    schedule = WHOLE["gpipe"](stages, chunks)
    lanes = [list(lane) for lane in schedule.lanes]
    s = data.draw(st.integers(0, stages - 2))
    lanes[s].remove(Action("B", s, 0))
    lanes[s].insert(chunks - 1, Action("B", s, 0))  # before the last forward
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(changed(schedule, lanes))


def test_several_stages_on_one_device_are_a_valid_schedule():
    both = WHOLE["gpipe"](4, 3)
    forwards = [[a for a in lane if a.kind == "F"] for lane in both.lanes]
    backwards = [[a for a in lane if a.kind == "B"] for lane in both.lanes]
    lanes = (
        [*forwards[0], *forwards[2], *backwards[2], *backwards[0]],
        [*forwards[1], *forwards[3], *backwards[3], *backwards[1]],
    )
    shared = changed(both, lanes)
    validate(shared)
    assert peak_in_flight(shared) == (3, 3, 3, 3)


@given(schedule_with_an_action(), st.sampled_from(["f", "b", "X", "FB", ""]), st.booleans())
def test_an_action_that_is_neither_forward_nor_backward_is_refused(case, kind, added):
    schedule, lanes, lane, place = case
    # in order for its kind, so that only the kind is wrong
    action = lanes[lane][place]._replace(kind=kind)
    if added:
        lanes[lane].append(action._replace(microbatch=0))
    else:
        lanes[lane][place] = action
    with pytest.raises(ScheduleError, match=r"is not a forward \(F\), a backward \(B\)"):
        validate(changed(schedule, lanes))


# Several stages per device.
SOME_CHUNKS = [1, 2, 3, 5, 7, 8, 9, 17, 40]


@pytest.mark.parametrize("name", sorted(WHOLE))
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.quick_cases(3)
def test_interleaved_stages_take_every_microbatch_once_on_the_device_stage_modulo_devices(name, v):
    for devices in range(1, 9):
        for chunks in SOME_CHUNKS:
            schedule = WHOLE[name](devices, chunks, v)
            validate(schedule)
            assert (schedule.stages, schedule.chunks) == (devices * v, chunks)
            assert len(schedule.lanes) == devices
            for d, lane in enumerate(schedule.lanes):
                assert {a.stage % devices for a in lane} == {d}
                assert len(lane) == len(set(lane)) == 2 * v * chunks


@given(STAGES, CHUNKS, PER_DEVICE, st.integers(1, 20), st.integers(1, 20))
def test_interleaving_shrinks_the_bubble_as_its_formula_promises(devices, chunks, v, tf, tb):
    chunks = max(chunks, devices)
    stages = devices * v
    spans = simulate(WHOLE["1f1b"](devices, chunks, v), [tf] * stages, [tb] * stages)
    assert max(span.end for lane in spans for span in lane) == (v * chunks + devices - 1) * (
        tf + tb
    )
    bubble = Fraction(devices - 1, v * chunks + devices - 1)
    assert bubble_fraction(spans) == pytest.approx(float(bubble), abs=1e-12)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_an_interleaved_device_holds_what_its_warm_up_needs_and_no_more(v):
    for devices in range(1, 9):
        for chunks in SOME_CHUNKS:
            group = -(-chunks // max(1, chunks // devices))
            schedule = WHOLE["1f1b"](devices, chunks, v)
            for d, lane in enumerate(schedule.lanes):
                in_flight = peak = 0
                for action in lane:
                    in_flight += 1 if action.kind == "F" else -1
                    peak = max(peak, in_flight)
                warm_up = 1 + 2 * (devices - 1 - d) + (v - 1) * group
                assert peak == min(v * chunks, warm_up), (devices, chunks, d)


def test_with_one_stage_per_device_both_schedules_have_the_same_known_bubble():
    for name in WHOLE:
        for devices in range(1, 9):
            for chunks in range(devices, 41, 3):
                spans = simulate(WHOLE[name](devices, chunks), [2] * devices, [4] * devices)
                bubble = Fraction(devices - 1, chunks + devices - 1)
                assert bubble_fraction(spans) == pytest.approx(float(bubble), abs=1e-12)


@given(NAMES, STAGES, CHUNKS, PER_DEVICE, st.integers(1, 45))
def test_no_more_microbatches_than_max_inflight_are_alive(name, devices, chunks, v, k):
    schedule = make_schedule(name, devices, chunks, v, k)
    # counted over all stages: begun on stage 0 and not finished there
    assert peak_in_flight(schedule)[0] == max(peak_in_flight(schedule)) <= min(k, chunks)
    validate(schedule)
    assert {a for lane in schedule.lanes for a in lane} == {
        a for lane in WHOLE[name](devices, chunks, v).lanes for a in lane
    }


@given(NAMES, STAGES, CHUNKS, PER_DEVICE)
def test_a_max_inflight_that_does_not_bind_changes_nothing(name, devices, chunks, v):
    free = WHOLE[name](devices, chunks, v)
    assert make_schedule(name, devices, chunks, v, peak_in_flight(free)[0]) == free
    assert make_schedule(name, devices, chunks, v) == free


def test_interleaved_evaluation_takes_every_microbatch_in_order_through_every_stage():
    for v in (1, 2, 3, 4):
        for devices in range(1, 9):
            for chunks in SOME_CHUNKS:
                lanes = forward_only(devices, chunks, v).lanes
                done = {}
                position = [0] * devices
                while any(p < len(lane) for p, lane in zip(position, lanes, strict=True)):
                    before = list(position)
                    for d, lane in enumerate(lanes):
                        while position[d] < len(lane):
                            kind, s, i = lane[position[d]]
                            assert (kind, s % devices) == ("F", d)
                            if s and done.get(s - 1, 0) <= i:
                                break
                            assert done.get(s, 0) == i, "the links are queues"
                            done[s] = i + 1
                            position[d] += 1
                    assert position != before, "deadlock"
                assert done == dict.fromkeys(range(devices * v), chunks)


@pytest.mark.parametrize("wrong", [{"stages_per_device": 0}, {"max_inflight": -1}])
def test_a_schedule_of_no_stages_or_nothing_in_flight_is_refused(wrong):
    with pytest.raises(ScheduleError, match="1 stage per device and 1 micro-batch in"):
        make_schedule("1f1b", 2, 4, **wrong)


def test_an_evaluation_takes_every_microbatch_once_through_every_stage():
    for stages in range(1, 9):
        for chunks in range(1, 41):
            assert forward_only(stages, chunks).lanes == tuple(
                tuple(Action("F", s, i) for i in range(chunks)) for s in range(stages)
            )


def test_an_unknown_schedule_says_which_there_are():
    with pytest.raises(
        ScheduleError,
        match=r"^schedule='zzz' is unknown: the schedules are: 1f1b, gpipe, zb-h1, zb-v",
    ):
        make_schedule("zzz", 2, 2)


@pytest.mark.parametrize(("stages", "chunks"), [(0, 1), (1, 0), (-1, 3)])
def test_a_schedule_of_nothing_is_refused(stages, chunks):
    with pytest.raises(ScheduleError, match="at least 1 device, 1 chunk"):
        make_schedule("1f1b", stages, chunks)


def test_a_prediction_from_the_spans_of_a_simulation_is_that_simulation():
    schedule = make_schedule("1f1b", 3, 5)
    spans = simulate(schedule, [1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    for ours, theirs in zip(predict(schedule, spans), spans, strict=True):
        assert [span.action for span in ours] == [span.action for span in theirs]
        assert [span.end for span in ours] == pytest.approx([span.end for span in theirs])
