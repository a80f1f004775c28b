"""`pipeline.offload` on the command line: the same run, with less memory on its devices."""

import json
from pathlib import Path

import pytest
import yaml
from cli_runs import LAST, assert_same_checkpoint, fail, learned, succeed
from support.launch import SMALL

from hybridtrain.cli import main

QUICK = [*SMALL, "monitor.tensorboard=false", "pipeline.nb_part=2", "data.batch_size=128"]
MANY = ["pipeline.schedule=gpipe", "pipeline.chunks=8"]


def test_a_run_with_offloaded_activations_learns_the_same_with_less_on_its_devices(
    capfd: pytest.CaptureFixture[str],
) -> None:
    succeed(capfd, *QUICK, *MANY, "run_name=plain")
    said = succeed(capfd, *QUICK, *MANY, "pipeline.offload=all", "run_name=offloaded")
    assert (
        "of host memory after the forward of a micro-batch, and copied back one action before"
        in said
    )
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
    assert main(["report", str(offloaded)]) == 0
    assert "device 0, copies" in (offloaded / "report.html").read_text()


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


def test_a_plan_for_hardware_prices_the_copies_or_says_how_to_measure_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, *MANY, "data.batch_size=256", "pipeline.offload=all", "run_name=planned"]
    words += ["pipeline.nb_part=2", "hardware=h100", "hardware.devices_per_node=2"]
    said = succeed(capfd, "plan", *words)
    assert "per batch to the host and back; the step waits " in said
    slow = succeed(capfd, "plan", *words, "hardware.to_host_bytes_per_s=1e6")
    assert "exposed copies to the host and back" in slow
    said = succeed(capfd, "plan", *words, "hardware.to_host_bytes_per_s=null")
    assert "the predicted times leave out these copies" in said
    assert "hybridtrain measure-machine" in said


LIMITED = [
    *("recipe=digits", "world.devices=cpu", "data.batch_size=512", "run_name=limited"),
    *("hardware=h100", "hardware.device=cpu", "trainer.precision=fp32", "world.engine=local"),
    *("pipeline.schedule=auto", "pipeline.chunks=16", "pipeline.recompute=never"),
]


def test_auto_offloads_where_memory_limits_and_copies_are_fast_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["pipeline.memory_limit_gib=0.001", "pipeline.nb_part=4", "hardware.devices_per_node=4"]
    run = ["trainer.epochs=null", "trainer.steps=1", "monitor.tensorboard=false"]
    said = succeed(capfd, "train", *LIMITED, *keys, *run)
    (line,) = [line for line in said.splitlines() if " was chosen: without it " in line]
    assert line.startswith("pipeline.offload=all was chosen: without it ")
    config = yaml.safe_load((tmp_path / "outputs/limited/config.yaml").read_text())
    assert config["pipeline"]["offload"] == "all"
    summary = json.loads((tmp_path / "outputs/limited/summary.json").read_text())
    assert max(summary["predicted"]["memory_bytes"]) <= 0.001 * 2**30


def test_auto_without_rates_of_copies_does_not_offload_and_says_how_to_measure(
    capfd: pytest.CaptureFixture[str],
) -> None:
    keys = ["pipeline.memory_limit_gib=0.0012", "pipeline.nb_part=2", "hardware.devices_per_node=2"]
    said = succeed(capfd, "plan", *LIMITED, *keys, "hardware.to_host_bytes_per_s=null")
    assert "pipeline.offload=none" in said
    (line,) = [line for line in said.splitlines() if "was not considered" in line]
    assert line.startswith("pipeline.offload= was not considered, because the rates of copies")
    assert "hybridtrain measure-machine" in line
