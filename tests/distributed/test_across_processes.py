"""Pipelines whose stages are in several processes, each cell in all of them."""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from support.checkpoint_files import tensors_in
from support.launch import SMALL, each_cell, forked_command, forked_script
from support.small_data import write_images

from hybridtrain.cli import main

QUICK = [*SMALL, "monitor.tensorboard=false", "pipeline.nb_part=2"]
ACROSS = "world.engine=distributed"


@each_cell({"across_processes": [2], "replicas_of_processes": [4], "sharded_processes": [4]})
def test_across_processes(worker, processes, cell, launched):
    launched(worker, processes).check(cell)


@pytest.mark.parametrize("who", [pytest.param("all", marks=pytest.mark.thorough), "1"])
def test_an_exception_in_a_stage_ends_all_processes_of_the_pipeline(who, tmp_path):
    status, output = forked_script(2, "failing.py", tmp_path, who, "distributed")
    assert status == 1
    assert "ArithmeticError: boom" in output
    assert "in the forward of micro-batch 0 on stage 1 (2 to 3)" in output
    assert "the end was reached" not in output


def test_sizes_that_do_not_follow_from_the_inputs_are_one_clear_error(tmp_path):
    status, output = forked_script(2, "failing.py", tmp_path, "sizes", "distributed")
    assert status == 1
    assert "returns something else than in its rehearsal" in output
    assert "use engine=local for this model" in output


@pytest.mark.parametrize("before", ["unused", "times zero"])
def test_a_loss_that_begins_to_use_another_output_is_named_and_a_factor_of_zero_helps(
    before, tmp_path
):
    status, output = forked_script(2, "changing_loss.py", tmp_path, before)
    if before == "unused":
        assert status == 1
        assert "has begun or stopped to use a value of an earlier one" in output
        assert "multiply it by 0 instead" in output
    else:
        assert status == 0, output
        assert "the end was reached" in output


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights(run):
    path = Path(f"outputs/{run}/checkpoints/step_00000006")
    tensors = {stem: tensors_in(path, stem) for stem in ("model", "optimizer")}
    # as bytes, so that a NaN or a sign of zero counts too
    return {
        (stem, name): (value.shape, value.dtype, value.reshape(-1).numpy().tobytes())
        for stem, values in tensors.items()
        for name, value in values.items()
    }


def metrics(run):
    lines = map(json.loads, Path(f"outputs/{run}/metrics.jsonl").read_text().splitlines())
    names = ("step", "train/loss", "train/grad_norm", "eval/loss", "eval/accuracy")
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.mark.thorough
def test_random_crops_go_on_exactly_inside_an_epoch_with_other_processes_and_workers(
    in_folder, tmp_path
):
    write_images("images", {"train": 16, "val": 3})
    images = ["data=image_folder", "data.root=images", "data.image_size=16", "data.batch_size=8"]
    arguments = [*QUICK, *images, "lr_schedule=constant"]  # an epoch has six batches
    assert main([*arguments, "run_name=whole"]) == 0
    assert main([*arguments, "run_name=parts", "trainer.steps=4"]) == 0
    more = ["data.workers=1", "trainer.steps=6", "run_name=parts", ACROSS]
    said = forked_command(2, [*arguments, *more], tmp_path / "across")
    assert "at step 4 of 6" in said
    assert weights("parts") == weights("whole")


@pytest.mark.thorough
def test_a_run_goes_on_exactly_with_the_other_engine(in_folder, tmp_path):
    def across(arguments):
        return forked_command(2, [*arguments, ACROSS], tmp_path / "across")

    def local(arguments):
        assert main([*arguments, "world.engine=local"]) == 0

    local([*QUICK, "run_name=local"])
    assert "2 processes x 2 stages, 1f1b" in across([*QUICK, "run_name=across"])
    # one process makes the plan that they have made
    assert main(["plan", *QUICK, ACROSS, "run_name=alone"]) == 0
    plans = [Path(f"outputs/{run}/plan.yaml").read_text() for run in ("across", "alone")]
    assert plans[0] == plans[1]
    assert metrics("across") == metrics("local")
    assert weights("across") == weights("local")

    for first, second in ((across, local), (local, across)):
        for part, launch in (("trainer.steps=4", first), ("trainer.steps=6", second)):
            run = f"run_name={first.__name__}_first"
            launch([*QUICK, run, "lr_schedule=constant", part])
    assert weights("local_first") == weights("across_first")


@pytest.mark.thorough
def test_evaluate_and_export_of_a_run_over_processes(in_folder, tmp_path):
    said = forked_command(
        2, [*QUICK, ACROSS, "run_name=run", "pipeline.split=time"], tmp_path / "said"
    )
    assert said.count("ms per step; idle") == 1
    said = forked_command(2, ["evaluate", "run_name=run"], tmp_path / "said")
    (result,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert result["loss"] == metrics("run")[-1]["eval/loss"]
    forked_command(2, ["export", "run_name=run"], tmp_path / "said")
    exported = load_file("outputs/run/export/step_00000006.safetensors")
    saved = tensors_in(Path("outputs/run/checkpoints/step_00000006"), "model")
    assert exported.keys() == saved.keys()
    assert all((exported[name] == saved[name]).all() for name in saved)
    summary = json.loads(Path("outputs/run/summary.json").read_text())
    assert [stage["parameters"] > 0 for stage in summary["stages"]] == [True, True]
    assert 0 < summary["bubble_fraction"] < 1
    assert summary["predicted"]["costs_from"] == "measured"
    assert summary["predicted"]["step_ms"] > 0
    memory = [summary[side]["memory_bytes"] for side in ("predicted", "measured")]
    assert memory[0][0] == pytest.approx(memory[1][0], rel=0.01)
    # the prediction counts what a stage receives, also if its first layer does not save it
    plan = yaml.safe_load(Path("outputs/run/plan.yaml").read_text())
    received = plan["stages"][0]["layers"][-1]["crossing_bytes"]
    assert memory[0][1] in (
        pytest.approx(memory[1][1], rel=0.01),
        pytest.approx(memory[1][1] + received, rel=0.01),
    )


@pytest.mark.thorough
def test_a_run_with_fixed_replicas_goes_on_exactly_on_other_numbers_of_processes(
    in_folder, tmp_path
):
    arguments = [*QUICK, "world.replicas=3"]
    assert main([*arguments, "run_name=whole"]) == 0
    parts = [*arguments, "run_name=parts"]
    forked_command(2, [*parts, "trainer.steps=4"], tmp_path / "two")
    said = forked_command(3, [*parts, "trainer.steps=6"], tmp_path / "three")
    assert "at step 4 of 6" in said
    assert weights("parts") == weights("whole")
    assert metrics("parts") == metrics("whole")
