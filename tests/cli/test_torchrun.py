"""The command line in several processes: under torchrun and under Slurm."""

import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support import forked
from support.launch import COMMAND_LINE, SMALL, environment, forked_command, torchrun

from hybridtrain.cli import main
from hybridtrain.launch import free_port

QUICK = [*SMALL, "monitor.tensorboard=false"]


def summary(run: str) -> dict[str, Any]:
    return json.loads((Path("outputs") / run / "summary.json").read_text())


def test_a_run_of_two_processes_prints_once_and_resumes_in_one_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first = torchrun(2, [*QUICK, "trainer.steps=4"])
    assert first.returncode == 0, first.stderr
    assert first.stdout == ""
    assert first.stderr.count("2 processes x 2 stages, 1f1b, 4 micro-batches") == 1
    assert re.findall(r"^step (\d)/4  loss", first.stderr, re.M) == ["2", "4"]
    assert first.stderr.count("run directory: ") == 1

    run = Path("outputs/digits")
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert set(logs) == {"rank_000.log", "rank_001.log"}
    assert all("2 processes x 2 stages" in text for text in logs.values())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4]
    ended = summary("digits")
    world = {"processes": 2, "nb_part": 2, "replicas": 2, "engine": "local", "backend": "gloo"}
    assert ended["world"] == world
    assert ended["samples"] == 4 * 32  # data.batch_size is over all replicas
    assert ended["eval"]["samples"] == 355  # an odd number, and each digit counted once

    assert main(["evaluate", *QUICK, "trainer.steps=4"]) == 0
    alone = re.search(
        r"step 4: loss (\S+)  accuracy (\S+)  \(355 samples\)", capfd.readouterr().err
    )
    assert alone is not None
    assert float(alone[1]) == pytest.approx(ended["eval"]["loss"], abs=2e-4)
    assert float(alone[2]) == pytest.approx(ended["eval"]["accuracy"], abs=1e-4)

    assert main(QUICK) == 0
    resumed = summary("digits")
    assert (resumed["steps"], resumed["samples"]) == (6, 6 * 32)
    assert resumed["world"]["processes"] == 1
    assert resumed["resumed_from"] == "outputs/digits/checkpoints/step_00000004"
    assert "resumed from" in (run / "logs" / "rank_000.log").read_text()


@pytest.mark.thorough
def test_two_processes_agree_on_the_pipeline_that_rank_0_chooses() -> None:
    keys = ["pipeline.nb_part=auto", "world.engine=distributed", "trainer.steps=2"]
    said = forked_command(2, [*QUICK, *keys], Path("said"))
    (line,) = [text for text in said.splitlines() if text.startswith("pipeline.nb_part=")]
    assert "predicted from measured costs" in line
    nb_part = summary("digits")["world"]["nb_part"]
    assert line.startswith(f"pipeline.nb_part={nb_part}: ")
    config = yaml.safe_load(Path("outputs/digits/config.yaml").read_text())
    assert config["pipeline"]["nb_part"] == nb_part
    assert nb_part in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            *(["pipeline.chunk=3"], "error: pipeline.chunk: .* did you mean pipeline.chunks\\?"),
            id="typo",
        ),
        pytest.param(
            *(["-m", "seed=1,2"], "error: --multirun does not work under torchrun"),
            marks=pytest.mark.thorough,
            id="multirun",
        ),
    ],
)
@pytest.mark.thorough
def test_a_mistake_is_reported_once_and_not_by_every_rank(arguments: list[str], line: str) -> None:
    ended = torchrun(2, [*arguments, *QUICK])
    assert ended.returncode != 0
    errors = [text for text in ended.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert re.match(line, errors[0])
    assert "hybridtrain/cli/command_line.py" not in ended.stderr  # no traceback of the ranks
    assert not Path("outputs").exists()


@pytest.mark.thorough
def test_an_error_in_the_first_step_is_reported_once_and_recorded_for_torchrun() -> None:
    ended = torchrun(2, [*QUICK, "model.image_size=10"])
    assert ended.returncode != 0
    ours, _, torchruns = ended.stderr.partition("failed (exitcode: ")
    assert ours.count("shapes cannot be multiplied") == 1
    assert ours.count("in layer 'fc1'") == 1
    assert ours.count("Traceback") == 1
    assert "To enable traceback see" not in torchruns  # it shows the root cause itself
    assert "shapes cannot be multiplied" in torchruns
    assert not Path("outputs/digits/summary.json").exists()


def test_processes_that_srun_starts_train_together() -> None:
    jobs = random.sample(range(20_000), 20_000)  # not the job of another run of the tests
    job = next(job for job in jobs if is_free(10_000 + job))
    outputs = [Path(f"said{rank}") for rank in (0, 1)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            srun = {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_ID": "0",
                "SLURM_JOB_NODELIST": "localhost",
            }
            arguments = [str(output), *QUICK, "trainer.steps=4"]
            processes.append(forked.start(COMMAND_LINE, arguments, environment(srun), output))
        for process in processes:
            process.join(300)
    finally:
        forked.end(processes)
    said = [output.read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [0, 0], said
    assert "2 processes x 2 stages, 1f1b, 4 micro-batches" in said[0]
    assert "launcher slurm, backend gloo" in said[0]
    assert said[1] == ""
    assert summary("digits")["world"]["processes"] == 2
    assert sorted(path.name for path in Path("outputs/digits/logs").iterdir()) == [
        "rank_000.log",
        "rank_001.log",
    ]
    weights = load_file("outputs/digits/checkpoints/step_00000004/model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_an_error_before_the_processes_meet_ends_those_that_no_launcher_ends() -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    outputs = [Path(f"said{rank}") for rank in (0, 1)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            started = environment({**shared, "RANK": str(rank)})
            arguments = [str(output), *QUICK, *["optim.lr=-1"] * rank]
            processes.append(forked.start(COMMAND_LINE, arguments, started, output))
        for process in processes:
            process.join(200)
    finally:
        forked.end(processes)
    said = [output.read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [2, 2], said
    why = "rank 1 failed before joining the other processes: optim.lr=-1 must be above 0"
    assert why in said[0]
    assert said[1] == ""


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("localhost", port))
        except OSError:
            return False
        return True


@pytest.mark.thorough
def test_a_model_of_torchvision_is_measured_cut_and_trained_in_two_processes() -> None:
    arguments = ["model=torchvision", "model.name=resnet18", "pipeline.split=time"]
    short = [*QUICK, *arguments, "trainer.steps=2", "trainer.eval_every=null"]
    said = forked_command(2, short, Path("said"))
    assert re.search(r"^ +1 +\d+ .* cpu +layer\S+ \.\.\. fc$", said, re.M)
    plan = yaml.safe_load(Path("outputs/digits/plan.yaml").read_text())
    planned = [[layer["name"] for layer in stage["layers"]] for stage in plan["stages"]]
    assert planned == [stage["layers"] for stage in summary("digits")["stages"]]
    assert summary("digits")["steps"] == 2
