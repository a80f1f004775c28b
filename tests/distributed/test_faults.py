"""Processes that fail, die, hang or are interrupted under torchrun, with the command line."""

import sys
from pathlib import Path

import pytest
from support.cases import thorough
from support.launch import TESTS

sys.path.insert(0, str(TESTS.parent))
from scripts.reliability.table import Outcome, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
    pytest.mark.timeout(1200),  # several launches in one test
]

LAST = "checkpoints/step_00000010"
SHORT = ("trainer.steps=10", "trainer.eval_every=null", "checkpoint.every_steps=1")


# test_torchrun.py has an error in the first step
@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["exception:forward:1", "exit:backward:1"])
def test_the_first_error_is_reported_once_with_its_rank(fault: str, tmp_path: Path) -> None:
    assert_named(run(fault, tmp_path))


@pytest.mark.parametrize("fault", ["sleep:forward:1", *thorough(["stop:optimizer:1"])])
@pytest.mark.thorough
def test_the_process_that_stands_still_is_named_and_the_stacks_are_kept(
    fault: str, tmp_path: Path
) -> None:
    assert_named(run(fault, tmp_path, stall_s=1.5))
    stacks = {path.name: path.read_text() for path in (tmp_path / "run" / "stalls").iterdir()}
    assert "fit" in stacks["rank_0.txt"]
    if fault.startswith("sleep"):
        assert "in fault" in stacks["rank_1.txt"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = run("none:none:0", folder, *SHORT)
    assert outcome.code == 0, outcome.output
    return weights(folder)


# test_run_endings.py has the same for one process, workers/loss_scaling.py a signal to one of two
@pytest.mark.thorough
def test_sigterm_to_the_launcher_saves_and_the_same_command_goes_on_exactly(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    outcome = run("terminate:optimizer:1", tmp_path, *SHORT[:2])
    assert outcome.output.count("\ninterrupted at step ") == 1, outcome.output
    assert "error: interrupted" not in outcome.output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    assert not (tmp_path / "run" / LAST).exists()
    assert run("none:none:0", tmp_path, *SHORT).code == 0
    assert weights(tmp_path) == undisturbed


@pytest.mark.thorough
def test_every_restart_of_the_launcher_joins_and_goes_on_exactly(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    outcome = run("restart:optimizer:0", tmp_path, *SHORT, restarts=3)
    assert outcome.code == 0, outcome.output
    log = (tmp_path / "run" / "logs" / "rank_000.log").read_text()
    assert log.count("resumed from ") == 3
    assert weights(tmp_path) == undisturbed


def weights(folder: Path) -> dict[str, bytes]:
    """The files of the model in the last checkpoint."""
    files = {path.name: path.read_bytes() for path in (folder / "run" / LAST).glob("model*")}
    assert files
    return files


def assert_named(outcome: Outcome) -> None:
    if not outcome.named:
        pytest.fail(outcome.output, pytrace=False)
