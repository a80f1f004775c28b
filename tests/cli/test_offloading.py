"""`pipeline.offload` on the command line: the same run, with less memory on its devices."""

import json
from pathlib import Path

import pytest
from cli_runs import LAST, assert_same_checkpoint, fail, learned, succeed
from support.launch import SMALL

QUICK = [*SMALL, "monitor.tensorboard=false", "pipeline.nb_part=2", "data.batch_size=128"]
MANY = ["pipeline.schedule=gpipe", "pipeline.chunks=8"]


def test_a_run_with_offloaded_activations_learns_the_same_with_less_on_its_devices(
    capfd: pytest.CaptureFixture[str],
) -> None:
    succeed(capfd, *QUICK, *MANY, "run_name=plain")
    said = succeed(capfd, *QUICK, *MANY, "pipeline.offload=all", "run_name=offloaded")
    assert "of the host's memory and come back one action before" in said
    plain, offloaded = Path("outputs/plain"), Path("outputs/offloaded")
    assert learned(plain) == learned(offloaded)
    assert_same_checkpoint(plain / "checkpoints" / LAST, offloaded / "checkpoints" / LAST)
    of_plain, of_offloaded = (
        json.loads((run / "summary.json").read_text()) for run in (plain, offloaded)
    )
    for kind in ("predicted", "measured"):
        memory = of_plain[kind]["memory_bytes"], of_offloaded[kind]["memory_bytes"]
        assert all(less < more for more, less in zip(*memory, strict=True)), kind
    predicted, measured = (of_offloaded[k]["memory_bytes"] for k in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["pipeline.offload=inputs"], "pipeline.offload=all"),
        (["pipeline.offload=all"], "pipeline.schedule=gpipe and pipeline.chunks=8"),
    ],
)
def test_an_offload_that_would_move_nothing_is_one_line_with_a_way_out(
    words: list[str], way_out: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *QUICK, *words)
    assert said.startswith(f"error: {words[0]} moves ")
    assert way_out in said
    assert len(said.splitlines()) == 1


def test_a_plan_for_hardware_says_what_it_does_not_know_of_the_copies(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, *MANY, "data.batch_size=256", "pipeline.offload=all", "run_name=planned"]
    said = succeed(capfd, "plan", *words, "hardware=h100")
    assert "pipeline.offload=all: the predicted times leave out the copies" in said
