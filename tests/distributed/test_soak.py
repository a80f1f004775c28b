"""Runs that are disturbed at random end with the weights of one that nobody disturbs."""

import sys

import pytest
from support.launch import TESTS

sys.path.insert(0, str(TESTS.parent))
from scripts.soak import soak

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
    pytest.mark.timeout(900),
    pytest.mark.thorough,
]


# The two kinds that take longest, stopped processes and torchrun's restarts, are in test_faults.
KINDS = ("kill-rank", "kill-launcher", "kill-all", "terminate", "interrupt", "preempt")


def test_faults_at_random_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status = soak(faults=10, processes=2, steps=200, seed=3, kinds=KINDS, starts=0.3)
    assert status == 0, capsys.readouterr().out


def test_faults_and_other_numbers_of_processes_change_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = ("kill-rank", "kill-all", "restart")
    status = soak(faults=5, processes=1, steps=100, seed=4, kinds=kinds, replicas=3)
    assert status == 0, capsys.readouterr().out
