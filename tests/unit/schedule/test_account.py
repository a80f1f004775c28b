"""The account of a step: parts that add up; what its devices waited for, and what it hung on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrain.schedule import (
    Account,
    Action,
    Schedule,
    Span,
    Spans,
    account_of,
    critical_path,
    make_schedule,
    registered,
    schedule_names,
    waits,
)

NAMES = sorted(schedule_names())


def schedule_of(name: str, devices: int, chunks: int) -> Schedule:
    return make_schedule(name, devices, chunks, registered(name).stages_per_device or 1)


def made_up(schedule: Schedule, seconds, delay) -> Spans:
    """Spans of actions that take `seconds(action)` and begin `delay(action)` after they could."""
    lanes: list[list[Span]] = [[] for _ in schedule.lanes]
    ends: dict[tuple[str, int, int], float] = {}
    for device, action in schedule.in_one_order:
        kind, stage, microbatch = action
        ready = [lanes[device][-1].end] if lanes[device] else [0.0]
        if kind == "F" and stage:
            ready.append(ends["F", stage - 1, microbatch])
        if kind in "BI" and stage + 1 < schedule.stages:
            ready.append(ends["I", stage + 1, microbatch])
        start = max(ready) + delay(action)
        end = start + seconds(action)
        ends["I" if kind == "B" else kind, stage, microbatch] = end
        lanes[device].append(Span(action, start, end))
    return lanes


def length(spans: Spans) -> float:
    return max(lane[-1].end for lane in spans) - min(lane[0].start for lane in spans)


def nothing(action: Action) -> float:
    return 0.0


def usual(action: Action) -> float:
    return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.kind]


@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_the_parts_are_not_negative_and_add_up_to_the_time_of_each_device(
    name, devices, chunks, random, replicas
):
    schedule = schedule_of(name, devices, chunks)
    measured = made_up(
        schedule, lambda action: random.uniform(0.001, 3), lambda action: random.uniform(0, 1)
    )
    reductions = {
        action: random.uniform(0, end - start) * replicas
        for lane in measured for action, start, end in lane
        if action.ends_microbatch and action.microbatch == chunks - 1
    }  # fmt: skip
    waits_of_last = {action: random.uniform(0, wait) for action, wait in reductions.items()}
    recomputed = [[random.choice([0.0, 1.0])] * chunks for _ in range(schedule.stages)]
    accounts = account_of(schedule, measured, reductions, waits_of_last, recomputed)
    assert len(accounts) == devices
    for account in accounts:
        assert min(account) >= -1e-9
        assert account.total == pytest.approx(length(measured))


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_without_messages_have_computing_and_bubble_alone(name):
    schedule = schedule_of(name, 4, 8)
    measured = made_up(schedule, usual, nothing)
    for account in account_of(schedule, measured):
        idle = length(measured) - 8 * 3 * (schedule.stages // 4)
        assert account == pytest.approx(
            Account(
                forward=8.0 * schedule.stages / 4, backward=16.0 * schedule.stages / 4, bubble=idle
            )
        )


@pytest.mark.parametrize("name", NAMES)
def test_what_a_slow_stage_makes_others_wait_is_imbalance_on_them(name):
    schedule = schedule_of(name, 3, 6)
    slow = 1

    def seconds(action):
        return usual(action) * (2 if action.stage == slow else 1)

    measured = made_up(schedule, seconds, nothing)
    accounts = account_of(schedule, measured)
    device = schedule.lane_of[slow]
    assert accounts[device].imbalance == min(account.imbalance for account in accounts)
    others = [account for d, account in enumerate(accounts) if d != device]
    assert all(account.imbalance > 6 * 3 * 0.5 for account in others)
    assert all(account.messages == account.reduction == account.host == 0 for account in accounts)


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_link_is_messages_with_all_that_waits_because_of_it(name):
    schedule = schedule_of(name, 2, 4)

    def crosses(action):
        other = {"F": action.stage - 1, "B": action.stage + 1, "I": action.stage + 1}
        stage = other.get(action.kind, action.stage)
        if not 0 <= stage < schedule.stages:
            return False
        return schedule.lane_of[stage] != schedule.lane_of[action.stage]

    fast = made_up(schedule, usual, nothing)
    measured = made_up(schedule, usual, lambda action: 0.5 if crosses(action) else 0.0)
    for before, account in zip(
        account_of(schedule, fast), account_of(schedule, measured), strict=True
    ):
        assert account.messages == pytest.approx(length(measured) - length(fast))
        assert account._replace(messages=0.0) == pytest.approx(before)


@pytest.mark.parametrize("name", NAMES)
def test_the_time_between_two_actions_of_a_device_is_the_hosts(name):
    schedule = schedule_of(name, 2, 4)
    fast = made_up(schedule, usual, nothing)
    measured = made_up(schedule, usual, lambda action: 0.25)
    for account in account_of(schedule, measured):
        # the first action begins the step
        assert account.host == pytest.approx(length(measured) - length(fast))
        assert account.messages == pytest.approx(0)


def test_an_all_reduce_is_told_from_waiting_for_a_slower_replica():
    schedule = schedule_of("1f1b", 2, 4)
    first_stage_last = Action("B", 0, 3)

    def seconds(action):
        return usual(action) + (3.0 if action == first_stage_last else 0.0)

    measured = made_up(schedule, seconds, nothing)
    for account in account_of(schedule, measured, {first_stage_last: 3.0}, {first_stage_last: 1.0}):
        assert (account.reduction, account.stragglers) == pytest.approx((1.0, 2.0))


def test_an_all_reduce_in_time_that_is_idle_anyway_costs_nothing():
    schedule = schedule_of("zb-h1", 2, 4)
    last_weights = Action("W", 1, 3)  # nobody waits for it, and the first stage is slower

    def seconds(action):
        return usual(action) * (1 if action.stage else 3) + (action == last_weights)

    measured = made_up(schedule, seconds, nothing)
    for account in account_of(schedule, measured, {last_weights: 1.0}):
        assert account.reduction == pytest.approx(0.0)


def test_a_forward_that_is_run_again_is_apart_from_the_backward():
    schedule = schedule_of("1f1b", 2, 4)
    measured = made_up(schedule, lambda a: usual(a) + (a.kind == "B"), nothing)
    again = [[1.0, 1.0, 1.0, 0.0], [0.5] * 4]
    first, second = account_of(schedule, measured, recomputed=again)
    assert (first.forward, first.backward, first.recompute) == pytest.approx((4, 9, 3))
    assert (second.forward, second.backward, second.recompute) == pytest.approx((4, 10, 2))


@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_the_actions_and_the_waits_of_a_device_fill_the_step_without_a_gap(
    name, devices, chunks, random
):
    schedule = schedule_of(name, devices, chunks)
    measured = made_up(
        schedule, lambda action: random.uniform(0.1, 3), lambda action: random.uniform(0, 1)
    )
    found = waits(measured)
    begin = min(lane[0].start for lane in measured)
    for device, lane in enumerate(measured):
        times = [(start, end) for _, start, end in lane]
        times += [(wait.start, wait.end) for wait in found if wait.device == device]
        at = begin
        for start, end in sorted(times):
            assert start == pytest.approx(at)
            assert end >= start
            at = end
        assert at == pytest.approx(begin + length(measured))


def test_a_device_waits_for_a_stage_then_for_the_message_then_for_the_host():
    schedule = schedule_of("1f1b", 2, 2)
    late = Action("F", 1, 1)
    # every action begins 0.25 late by the host, and one by a message of 1 more
    measured = made_up(schedule, usual, lambda action: 1.25 if action == late else 0.25)
    start = next(start for lane in measured for action, start, _ in lane if action == late)
    before = [wait for wait in waits(measured) if wait.device == 1 and wait.end <= start]
    assert [wait.reason for wait in before[-2:]] == ["message", "host"]
    assert [wait.end - wait.start for wait in before[-2:]] == pytest.approx([1.0, 0.25])
    assert waits(made_up(schedule, usual, nothing))[0].reason == "stage"


@pytest.mark.parametrize("name", NAMES)
def test_a_step_gets_shorter_if_an_action_of_its_critical_path_does(name):
    schedule = schedule_of(name, 3, 5)
    slow = {0: 1.0, 1: 1.6}

    def seconds(action):
        return usual(action) * slow.get(action.stage, 1.2)

    measured = made_up(schedule, seconds, nothing)
    path = critical_path(measured)
    assert sum(map(seconds, path)) == pytest.approx(length(measured))
    on_path = path[len(path) // 2]
    faster = made_up(schedule, lambda a: seconds(a) * (0.999 if a == on_path else 1), nothing)
    assert length(faster) < length(measured)
    others = {span.action for lane in measured for span in lane} - set(path)
    slower = made_up(schedule, lambda a: seconds(a) * (1.0001 if a in others else 1), nothing)
    assert length(slower) == pytest.approx(length(measured), rel=1e-4)
