"""Scripts of two processes, of which one is stopped, sleeps, fails or cannot print, at any place.

Nobody starts them but the test, so no launcher ends one after the other.
"""

import sys
import time
from contextlib import ExitStack
from itertools import product
from typing import NamedTuple

import pytest
from support import forked
from support.launch import WORKERS, environment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
    pytest.mark.timeout(600),  # the first test waits for many launches
]

HEIGHTS = ("own", "session", "trainer")
ENGINES = ("local", "distributed")
IN_RUN = ("first", "between", "step", "evaluate", "save")
AT_ONCE = 6  # most of the time they wait
STALL_S, TIMEOUT_S, LIMIT_S = 3, 6, 90


class Case(NamedTuple):
    """A launch; see workers/stuck.py."""

    height: str
    engine: str
    kind: str
    place: str
    who: int


QUICK = {
    Case("own", "local", "stop", "between", 0),
    Case("trainer", "distributed", "stop", "step", 0),
    Case("trainer", "local", "sleep", "step", 1),
    Case("session", "distributed", "sleep", "between", 0),
    Case("own", "distributed", "sleep", "start", 0),
    Case("trainer", "local", "sleep", "end", 1),
    Case("own", "local", "full:sleep", "step", 1),
    Case("trainer", "distributed", "full:raise", "step", 1),
    Case("trainer", "local", "alone", "optimizer", 1),
    Case("own", "local", "slow", "step", 1),
}


def each(kinds, places):
    """Parametrizes a test by the launches with these kinds of faults at these places."""
    cases = [Case(*values) for values in product(HEIGHTS, ENGINES, kinds, places, (0, 1))]
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case,
                id="-".join(map(str, case)),
                marks=[] if case in QUICK else [pytest.mark.thorough],
            )
            for case in cases
        ],
    )


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """How the processes of each launch have ended: exit codes, and what they have printed."""
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    results = {}

    def launch(batch):
        with ExitStack() as launches:
            started = {}
            for case in batch:
                folder = tmp_path_factory.mktemp("stuck")
                outputs = [folder / f"rank{rank}" for rank in (0, 1)]
                arguments = [str(folder / "saved"), *map(str, case), str(STALL_S), str(TIMEOUT_S)]
                together = forked.together(
                    2, WORKERS / "stuck.py", arguments, environment(), outputs
                )
                started[case] = launches.enter_context(together), outputs
            deadline = time.monotonic() + LIMIT_S
            for case, (processes, outputs) in started.items():
                for rank, process in enumerate(processes):
                    stays = case.place in ("start", "end") and rank == case.who
                    process.join(0 if stays else max(0, deadline - time.monotonic()))
                results[case] = [
                    (process.exitcode, output.read_text() if output.exists() else "")
                    for process, output in zip(processes, outputs, strict=True)
                ]

    def end_of(case):
        while case not in results:
            launch([each for each in cases if each not in results][:AT_ONCE])
        return results[case]

    return end_of


def last_error(said):
    lines = [line for line in said.splitlines() if "error: " in line]
    assert lines, said
    return lines[-1]


@each(["stop"], IN_RUN)
def test_a_stopped_process_is_named_as_stopped_and_killed(case, ended):
    results = ended(case)
    (code, said) = results[1 - case.who]
    line = last_error(said)
    assert f"error: rank {case.who} (" in line, said
    assert "stopped" in line
    assert "network" not in line
    # a stall; or 1, where a longer limit holds, so that a collective call times out before
    assert code in (4, 1)
    assert results[case.who][0] == -9


@each(["sleep"], IN_RUN)
def test_a_process_that_sleeps_is_named_by_both_and_both_end(case, ended):
    for code, said in ended(case):
        assert code == 4, said
        line = last_error(said)
        assert f"error: rank {case.who} " in line
        assert "has made no progress" in line
        assert line.count("in fault") == 1


@each(["stop", "sleep"], ["start"])
def test_a_process_that_never_joins_is_waited_for_as_long_as_timeout_s(case, ended):
    code, said = ended(case)[1 - case.who]
    assert code == 1, said
    assert f"timeout_s={TIMEOUT_S} s" in said
    if case.who == 1:
        assert "waiting for rank 1" in said


@each(["stop", "sleep"], ["end"])
def test_a_process_that_has_done_its_work_does_not_wait_for_one_that_hangs_after_its_own(
    case, ended
):
    code, said = ended(case)[1 - case.who]
    assert code == 0, said
    assert "the end was reached" in said


@each(["full:sleep", "full:raise"], ["step"])
def test_a_pipe_that_nobody_reads_keeps_no_process_alive(case, ended):
    for code, _ in ended(case):
        assert code == (4 if case.kind == "full:sleep" else 1)


@each(["alone"], ["between", "optimizer"])
def test_the_only_process_that_calls_a_collective_is_named_with_its_line(case, ended):
    assert_named_with_its_line(case, ended)


@each(["gather"], ["between"])
def test_the_only_process_that_gathers_with_the_world_is_named_with_its_line(case, ended):
    assert_named_with_its_line(case, ended)


def assert_named_with_its_line(case, ended):
    for code, said in ended(case):
        assert code == 4, said
        line = last_error(said)
        assert f"error: rank {case.who} " in line
        assert line.count("in fault") == 1


@each(["slow"], ["step"])
def test_a_process_that_waits_for_a_slow_one_has_not_stalled(case, ended):
    for code, said in ended(case):
        assert code == 0, said
        assert "the end was reached" in said
