"""Schedules with backwards in two parts."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule import (
    Action,
    Durations,
    Schedule,
    bubble_fraction,
    divided_backwards,
    fullest_moments,
    gpipe,
    length,
    make_schedule,
    mean_backwards,
    mean_costs,
    one_forward_one_backward,
    peak_in_flight,
    predict,
    simulate,
    validate,
    zero_bubble_h1,
    zero_bubble_v,
)
from hybridtrain.schedule.named import merge_backwards, zero_bubble_v_in_parts

DEVICES = st.integers(1, 8)
CHUNKS = st.integers(1, 30)
TIMES = st.lists(st.integers(1, 20), min_size=6, max_size=6)


def by_hand(chunks, *lines):
    """A schedule of a stage per device, from a line such as `F0 I0 W0` for each."""
    lanes = (tuple(Action(text[0], stage, int(text[1:])) for text in line.split())
             for stage, line in enumerate(lines))  # fmt: skip
    schedule = Schedule("by hand", len(lines), chunks, tuple(lanes))
    validate(schedule)
    return schedule


def spans_of(schedule, forward, backward, weight):
    stages = schedule.stages
    return simulate(schedule, [forward] * stages, [backward] * stages, weight=[weight] * stages)


@given(DEVICES, CHUNKS)
def test_zb_h1_and_zb_v_are_complete_in_order_and_free_of_deadlock(devices, chunks):
    for schedule in (zero_bubble_h1(devices, chunks), zero_bubble_v(devices, chunks)):
        validate(schedule)
        assert schedule.chunks == chunks
        assert len(schedule.lanes) == devices


@given(DEVICES, CHUNKS)
def test_zb_h1_holds_no_more_than_the_first_device_of_1f1b(devices, chunks):
    held = peak_in_flight(zero_bubble_h1(devices, chunks))
    assert max(held) == peak_in_flight(one_forward_one_backward(devices, chunks))[0]


def test_a_device_of_zb_h1_puts_off_the_weights_of_as_many_micro_batches_as_its_number():
    # and of one more, whose input comes first
    for table, waiting in ((zero_bubble_h1(4, 8), [0, 2, 3, 4]), (gpipe(4, 8), [0, 0, 0, 0])):
        moments = fullest_moments(table)
        assert [max(moment.waiting[0] for moment in device) for device in moments] == waiting


@given(DEVICES, CHUNKS)
def test_zb_v_holds_no_more_than_1f1b_in_stages_of_half_the_size(devices, chunks):
    schedule = zero_bubble_v(devices, chunks)
    for device, lane in enumerate(schedule.lanes):
        held = accumulate((action.kind == "F") - action.ends_microbatch for action in lane)
        assert max(held) <= 2 * devices
        assert {action.stage for action in lane} == {device, 2 * devices - 1 - device}


@given(DEVICES, CHUNKS)
def test_the_bubble_of_zb_h1_is_one_unit_for_each_later_device(devices, chunks):
    chunks = max(chunks, devices)
    schedule = zero_bubble_h1(devices, chunks)
    spans = spans_of(schedule, 1, 2, 1)
    assert max(lane[-1].end for lane in spans) == 3 * chunks + devices - 1
    # 1F1B waits three times as long
    whole = spans_of(one_forward_one_backward(devices, chunks), 1, 2, 1)
    assert max(lane[-1].end for lane in whole) == 3 * (chunks + devices - 1)


@given(DEVICES, CHUNKS)
def test_a_device_of_zb_v_waits_only_for_its_first_micro_batch(devices, chunks):
    chunks = max(chunks, 2 * devices - 1)
    spans = spans_of(zero_bubble_v(devices, chunks), 1, 2, 1)
    for device, lane in enumerate(spans):
        assert lane[0].start == device
        assert lane[-1].end - lane[0].start == 6 * chunks


def test_the_bubbles_of_four_devices_and_eight_micro_batches_are_those_of_the_documents():
    idle = {}
    for name, v in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)):
        schedule = make_schedule(name, 4, 8, v)
        # a device has the same work however many stages it has
        idle[name] = bubble_fraction(spans_of(schedule, 2 / v, 4 / v, 2 / v))
    expected = {"1f1b": Fraction(3, 11), "zb-h1": Fraction(3, 27), "zb-v": Fraction(3, 51)}
    assert idle == pytest.approx({name: float(f) for name, f in expected.items()}, abs=0.002)


@pytest.mark.parametrize(
    ("name", "v", "way_out"),
    [("zb-h1", 2, "1 stage on each device: set stages_per_device=1"),
     ("zb-v", 1, "2 stages on each device: set stages_per_device=2")],
)  # fmt: skip
def test_a_schedule_for_another_number_of_stages_says_what_to_set(name, v, way_out):
    with pytest.raises(ScheduleError, match=rf"schedule={name} has {way_out}"):
        make_schedule(name, 2, 4, v)


@given(DEVICES, CHUNKS)
def test_zb_v_divides_only_backwards_that_somebody_waits_for(devices, chunks):
    schedule, in_parts = zero_bubble_v(devices, chunks), zero_bubble_v_in_parts(devices, chunks)
    equal = Durations.equal(2 * devices)
    assert equal.length(schedule) == equal.length(in_parts)
    begins = {span.action[1:]: span.start for lane in equal.spans(schedule) for span in lane
              if span.action.kind in "BI"}  # fmt: skip
    for lane in equal.spans(schedule):
        for one, following in pairwise(lane):
            if one.action.kind == "I" and following.action == one.action._replace(kind="W"):
                _, stage, microbatch = one.action
                assert begins[stage - 1, microbatch] < following.end


def test_most_backwards_of_zb_v_are_whole_with_many_micro_batches():
    divided = [divided_backwards(zero_bubble_v(4, chunks)) for chunks in (8, 32)]
    assert divided[0] == divided[1]
    assert sum(divided[0]) == 30  # of 7 x 8, and of 7 x 32


@examples(20, 60)
@given(st.integers(1, 5), st.integers(1, 12), TIMES, TIMES,
       st.lists(st.integers(0, 5), min_size=9, max_size=9), st.floats(1.0, 2.0))  # fmt: skip
def test_no_action_comes_later_by_a_whole_backward_that_nobody_waits_for(
    devices, chunks, forward, backward, transfer, dearer
):
    stages = 2 * devices
    whole = Durations.of((forward * 2)[:stages], (backward * 2)[:stages], transfer[: stages - 1])
    durations = replace(whole, in_parts=tuple(dearer * b for b in whole.backward),
                        weight=tuple(dearer * w for w in whole.weight))  # fmt: skip
    before = zero_bubble_v_in_parts(devices, chunks)
    after = merge_backwards(before, durations)
    validate(after)

    def ends(schedule):
        return {span.action[1:]: span.end for lane in durations.spans(schedule) for span in lane
                if span.action.ends_microbatch}  # fmt: skip

    was = ends(before)
    assert all(end <= was[of] + 1e-6 for of, end in ends(after).items())


def test_a_whole_backward_takes_its_own_time_and_not_that_of_its_parts():
    durations = Durations((1.0,) * 2, (2.0,) * 2, (2.0, 1.5), (0.0,), in_parts=(2.0, 3.0))
    whole, parts = (by_hand(1, "F0 B0", f"F0 {last}") for last in ("B0", "I0 W0"))
    assert durations.length(whole) == 6.0
    assert durations.length(parts) == 5.5  # the first stage begins after an I of 1.5


WRONG = {
    "weights before the input": "F0 W0 I0",
    "a whole backward after its first part": "F0 I0 B0",
    "a whole backward and its weights": "F0 B0 W0",
    "no weights": "F0 I0",
    "no input": "F0 W0",
    "weights of a later micro-batch first": "F0 F1 I0 I1 W1 W0",
    "weights after a later whole backward": "F0 F1 I0 B1 W0",
}


@pytest.mark.parametrize("actions", WRONG.values(), ids=WRONG)
def test_the_parts_of_a_backward_in_a_wrong_order_are_refused(actions):
    lane = tuple(Action(text[0], 0, int(text[1])) for text in actions.split())
    chunks = 1 + max(action.microbatch for action in lane)
    with pytest.raises(ScheduleError):
        validate(Schedule("by hand", 1, chunks, (lane,)))


def test_whole_backwards_and_backwards_in_parts_may_be_mixed_in_one_stage():
    assert peak_in_flight(by_hand(3, "F0 F1 F2 I0 W0 B1 I2 W2")) == (3,)


@pytest.mark.parametrize("split", [1.0, 1.3, 1.8])
def test_measured_spans_of_whole_and_divided_backwards_predict_the_same_times_again(split):
    # all stages but the first have both kinds
    durations = Durations.of([1.0] * 8, [2.0] * 8, split=split)
    schedule = make_schedule("zb-v", 4, 8, 2)
    measured = durations.spans(schedule)
    predicted = predict(schedule, measured)
    for ours, theirs in zip(predicted, measured, strict=True):
        assert [span.end for span in ours] == pytest.approx([span.end for span in theirs])
    taken = [0.0] * 8
    for lane in measured:
        for (kind, stage, _), start, end in lane:
            taken[stage] += (kind != "F") * (end - start) / 8
    assert mean_backwards(measured, 8) == pytest.approx(taken)


def test_both_parts_of_measured_backwards_predict_the_same_times_again():
    schedule = make_schedule("zb-h1", 3, 5)
    spans = simulate(schedule, [1.0, 2.0, 3.0], [2.0, 4.0, 8.0], weight=[2.0, 1.0, 3.0])
    costs = mean_costs(spans, 3)
    assert costs["B"] == pytest.approx([2.0, 4.0, 8.0])
    assert costs["W"] == pytest.approx([0.0, 1.0, 3.0])  # the first stage has whole backwards
    for ours, theirs in zip(predict(schedule, spans), spans, strict=True):
        assert [span.end for span in ours] == pytest.approx([span.end for span in theirs])


# V-Half and V-Min, whose memory and idle time arXiv:2405.15362 gives (table 1 and section 3).
HELD = {"v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}
IDLE = {"v-half": lambda p: 3 * (p - 1), "v-min": lambda p: 4 * (p - 1)}
CONTROLLABLE = st.sampled_from(sorted(HELD))


def most_held(schedule):
    """The most micro-batches of each device at one time, counted in its stages' forwards."""
    return [
        max(accumulate((action.kind == "F") - action.ends_microbatch for action in lane))
        for lane in schedule.lanes
    ]


@given(CONTROLLABLE, st.integers(1, 16), st.integers(1, 64))
def test_v_half_and_v_min_hold_what_the_paper_says_at_any_number_of_devices(name, p, m):
    schedule = make_schedule(name, p, m, 2)
    assert max(most_held(schedule)) == 2 * min(m, HELD[name](p))


@given(CONTROLLABLE, st.integers(1, 16), st.integers(1, 64))
def test_v_half_and_v_min_idle_no_longer_than_the_paper_says(name, p, m):
    schedule = make_schedule(name, p, m, 2)
    # few micro-batches cannot fill the gaps of V-Half's slower way down
    idle = IDLE[name if m >= p else "v-min"](p)
    assert length(spans_of(schedule, 1, 2, 1)) <= 6 * m + idle


@pytest.mark.parametrize("name", sorted(HELD))
def test_the_activations_of_v_half_and_v_min_are_a_half_and_a_third_of_1f1b(name):
    of_1f1b = max(most_held(one_forward_one_backward(16, 64)))
    share = max(most_held(make_schedule(name, 16, 64, 2))) / 2 / of_1f1b  # stages of half the size
    assert share == pytest.approx({"v-half": 1 / 2, "v-min": 1 / 3}[name], abs=1 / 16)
