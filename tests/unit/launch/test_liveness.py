"""Signs of life: which process is gone, as others see it and as it sees itself."""

import math

from support.clock import Clock

from hybridtrain._base.torch_private import HashStore
from hybridtrain.launch import ProcessStore
from hybridtrain.launch.watchdog import BEAT_S, Liveness


def processes(size, timeout_s):
    store, clock = HashStore(), Clock(100.0)
    jobs = [ProcessStore(store, rank, size) for rank in range(size)]
    for job in jobs:
        job.beat(0, -math.inf)
    return jobs, [Liveness(job, timeout_s, clock=clock) for job in jobs], clock


def live(clock, alive, seconds):
    end = clock.now + seconds
    while clock.now < end:
        clock.now += BEAT_S
        for each in alive:
            each.beat()


def test_a_process_that_gives_no_sign_of_life_is_found_by_rank_0():
    _, all_three, clock = processes(3, 60)
    live(clock, all_three, 10)
    live(clock, all_three[:2], 60)
    assert all_three[0].silent() is None
    live(clock, all_three[:2], 10)
    rank, seconds = all_three[0].silent()
    assert (rank, seconds > 60) == (2, True)
    assert all_three[1].silent() is None  # which looks at rank 0 alone


def test_the_others_find_rank_0():
    _, all_three, clock = processes(3, 60)
    live(clock, all_three, 10)
    live(clock, all_three[1:], 80)
    assert all_three[1].silent()[0] == 0


def test_a_process_that_has_left_is_not_missed():
    jobs, both, clock = processes(2, 60)
    live(clock, both, 10)
    jobs[1].leave()
    live(clock, both[:1], 100)
    assert both[0].silent() is None


def test_a_process_that_was_stopped_itself_does_not_find_the_others_silent():
    _, both, clock = processes(2, 60)
    live(clock, both, 10)
    live(clock, both[1:], 200)
    both[0].beat()
    assert both[0].silent() is None


def test_a_process_that_is_cut_off_knows_how_long_the_store_has_not_answered():
    _, both, clock = processes(2, 60)
    live(clock, both, 10)
    clock.now += 70  # the watchdog's thread waits for the store
    assert both[1].unanswered_s() == 70
    both[1].beat()
    assert both[1].unanswered_s() == 0


def test_a_short_timeout_of_collectives_does_not_end_a_process_that_is_slow():
    assert processes(2, 1)[1][0].timeout_s == 20


def test_a_process_stands_if_its_last_sign_says_so_or_is_old():
    _, all_three, clock = processes(3, 60)
    live(clock, all_three, 10)
    first = all_three[0]
    assert not first.stands(1)  # its work has no limit
    for overdue_s, stands in [(-3.0, False), (0.5, True), (-3.0, False)]:
        clock.now += BEAT_S
        all_three[1].beat(overdue_s)
        first.beat()
        assert first.stands(1) is stands
    for _ in range(2):  # a sign may be late
        clock.now += BEAT_S
        first.beat()
        assert not first.stands(1)
    clock.now += BEAT_S
    first.beat()
    assert first.stands(1)


def test_only_rank_0_and_a_process_that_waits_itself_look_at_all_others():
    _, all_three, clock = processes(3, 60)
    live(clock, all_three, 10)
    clock.now += BEAT_S
    all_three[2].beat(1.0)
    all_three[1].beat(-1.0)
    assert not all_three[1].stands(2)
    clock.now += BEAT_S
    all_three[1].beat(1.0, looks_at_all=True)
    assert all_three[1].stands(2)
