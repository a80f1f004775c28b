"""Emulated stages of the benchmarks sleep for all of their time, by a clock that they move."""

from types import SimpleNamespace

import pytest
import torch

from hybridtrain.pipeline.split_backward import SplitBackward, divide
from hybridtrain.schedule import make_schedule
from scripts.bench import emulated_devices as emulation
from scripts.bench.bare_loop import BareLoop
from scripts.bench.schedule_efficiency import Message, ideal_s


@pytest.fixture
def now(monkeypatch):
    clock = [0.0]

    def sleep(seconds):
        clock[0] += max(seconds, 1e-6)

    monkeypatch.setattr(
        emulation, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep)
    )
    monkeypatch.setattr(emulation, "sleeps", emulation.Sleeps())
    return lambda: clock[0]


def spent(now, run):
    emulation.pause(0.1)  # another stage's action
    start = now()
    run()
    return now() - start


def outputs(count, now):
    stage, x = emulation.Emulated(1.0), [emulation.samples(1) for _ in range(count)]
    found = []
    for one in x:
        assert spent(now, lambda one=one: found.append(stage(one))) == pytest.approx(
            0.005, rel=0.01
        )
    return x, found


def test_a_whole_backward_sleeps_for_all_of_its_time_each_time(now):
    for output in outputs(3, now)[1]:
        run = lambda output=output: output.backward(torch.ones_like(output))  # noqa: E731
        assert spent(now, run) == pytest.approx(0.010, rel=0.01)


def test_each_part_of_a_backward_sleeps_for_half_of_it_also_if_the_same_parts_follow(now):
    parts = []
    for x, output in zip(*outputs(3, now), strict=True):
        division = divide([output], [x])
        assert division is not None
        parts.append(SplitBackward(division, [(output, torch.ones_like(output))], [x]))
    for part in parts:
        assert spent(now, part.to_input) == pytest.approx(0.005, rel=0.01)
    for part in parts:
        assert spent(now, part.to_weights) == pytest.approx(0.005, rel=0.01)


def test_the_time_outside_of_a_stages_own_is_subtracted_from_each_part(now, monkeypatch):
    outside = emulation.Sleeps(forward=0.001, backward=0.002, to_input=0.0004, to_weight=0.0003)
    monkeypatch.setattr(emulation, "sleeps", outside)
    stage, x, found = emulation.Emulated(1.0), [emulation.samples(1) for _ in range(2)], []
    for one in x:
        forward = lambda one=one: found.append(stage(one))  # noqa: E731
        assert spent(now, forward) == pytest.approx(0.004, rel=0.01)
    whole, divided = found
    assert spent(now, lambda: whole.backward(torch.ones_like(whole))) == pytest.approx(
        0.008, rel=0.01
    )
    division = divide([divided], [x[1]])
    parts = SplitBackward(division, [(divided, torch.ones_like(divided))], [x[1]])
    assert spent(now, parts.to_input) == pytest.approx(0.0046, rel=0.01)
    assert spent(now, parts.to_weights) == pytest.approx(0.0047, rel=0.01)


def test_the_calls_of_messages_take_a_device_time_and_their_latency_does_not():
    alone = ideal_s("1f1b", 2, 4, 1)
    assert alone == pytest.approx((4 + 1) * 0.015)
    # device 1 is busy from its first to its last action, and device 0 waits for it
    calls = Message(sending=0.001, receiving=0.002)
    # F0: sends. Device 1: receives, runs, sends, four times. The last B0: receives
    assert ideal_s("1f1b", 2, 4, 1, calls) == pytest.approx(alone + 0.001 + 4 * 0.003 + 0.002)
    slow = Message(latency=0.001)
    assert ideal_s("gpipe", 2, 4, 1, slow) == pytest.approx(alone + 2 * 0.001)
    assert ideal_s("1f1b", 2, 4, 1, pace=1.1) == pytest.approx(1.1 * alone)


@pytest.mark.parametrize(("schedule", "per_device"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_the_bare_loop_runs_each_action_of_a_schedule_once_a_step(now, schedule, per_device):
    table = make_schedule(schedule, 1, 4, per_device)
    stages = {index: emulation.Emulated(1 / per_device) for index in range(per_device)}
    loop = BareLoop(table, stages, emulation.samples(4), SimpleNamespace(rank=lambda: 0))
    for _ in range(2):
        assert spent(now, loop.step) == pytest.approx(4 * 0.015, rel=0.01)
