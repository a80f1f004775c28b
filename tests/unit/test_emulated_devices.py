"""Emulated stages of the benchmarks sleep for all of their time, by a clock that they move."""

from types import SimpleNamespace

import pytest
import torch

from hybridtrain.pipeline.split_backward import SplitBackward, divide
from scripts.bench import schedule_efficiency as emulation


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
