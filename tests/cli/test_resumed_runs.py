"""Runs that resume: from where, with which settings, and when that is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_runs import LAST, assert_same, assert_same_checkpoint, contents, fail, learned, succeed
from safetensors.torch import load_file
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.cli.config.overrides import with_later
from hybridtrain.model import HybridModel


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(
    finished: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = HybridModel.train_step, []

    def fail_in_the_sixth_step(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("the power went")
        return step(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(HybridModel, "train_step", fail_in_the_sixth_step)
        assert main(SMALL) == 1
    assert "the power went" in capfd.readouterr().err
    run = Path("outputs/digits")
    assert not (run / "summary.json").exists()

    said = succeed(capfd, *SMALL)
    assert "resumed from outputs/digits/checkpoints/step_00000004, at step 4 of 6" in said
    assert "tensorboard --logdir outputs\n" in said
    assert_same_checkpoint(run / "checkpoints" / LAST, finished / "checkpoints" / LAST)
    assert learned(run) == learned(finished)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["resumed_from"] == "outputs/digits/checkpoints/step_00000004"
    assert summary["samples"] == 6 * 32


def test_a_run_can_start_from_the_checkpoint_of_another_run(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = finished / "checkpoints" / "step_00000002"
    succeed(capfd, *SMALL, f"resume={start}", "run_name=second", "pipeline.nb_part=3")
    summary = json.loads(Path("outputs/second/summary.json").read_text())
    assert summary["resumed_from"] == str(start)
    assert summary["world"]["nb_part"] == 3
    last = Path("outputs/second/checkpoints") / LAST
    weights, expected = (
        load_file(p / "model.safetensors") for p in (last, finished / "checkpoints" / LAST)
    )
    assert list(weights) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor)


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("null", "resume=null would mix new checkpoints with the existing ones in outputs/digits"),
        ("outputs/nowhere", "resume=outputs/nowhere: there is no such checkpoint directory"),
        (
            "outputs/digits/checkpoints/step_00000002",
            "outputs/digits/checkpoints, up to step 6: set resume=auto",
        ),
        ("outputs/digits/logs", "outputs/digits/logs is not a checkpoint"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_resume_that_would_lose_or_mix_checkpoints_is_refused(
    resume: str, message: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    assert message in fail(capfd, *SMALL, "trainer.steps=8", f"resume={resume}")
    assert contents(copied) == before


def test_the_best_of_a_run_that_marks_none_names_the_key_that_marks_one(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "evaluate", "run_name=digits", "resume=best")
    assert "checkpoint.best=loss" in said
    assert "resume=last" in said


@pytest.mark.thorough
def test_the_overrides_of_all_commands_of_a_run_are_kept_the_last_of_each_key(
    capfd: pytest.CaptureFixture[str],
) -> None:
    succeed(capfd, *SMALL, "optim.lr=0.01", "trainer.steps=2", "optim.eps=1e-7")
    succeed(capfd, "run_name=digits", "optim.lr=0.02", "trainer.steps=4")
    file = Path("outputs/digits/overrides.yaml")
    kept = yaml.safe_load(file.read_text())
    steps = [o for o in SMALL if not o.startswith("trainer.steps")]
    assert kept == [*steps, "optim.eps=1e-7", "run_name=digits", "optim.lr=0.02",
                    "trainer.steps=4"]  # fmt: skip
    file.write_text("[")
    message = fail(capfd, "run_name=digits", "trainer.steps=5")
    assert f"cannot read {file}" in message
    assert "restore it, or remove it" in message
    file.unlink()
    succeed(capfd, "run_name=digits", "trainer.steps=5")
    assert yaml.safe_load(file.read_text()) == ["run_name=digits", "trainer.steps=5"]


def test_an_option_that_is_chosen_later_replaces_the_overrides_of_its_group() -> None:
    first = ["optim.lr=1", "optim=adam", "optimal.x=1", "~trainer.epochs"]
    assert with_later(first, ["optim=sgd"]) == ["optimal.x=1", "~trainer.epochs", "optim=sgd"]


@pytest.mark.thorough
def test_a_restart_by_torchrun_resumes_from_the_newest_checkpoint_and_not_the_named_one(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start = "resume=outputs/digits/checkpoints/step_00000002"
    said = succeed(capfd, *SMALL, "trainer.steps=7", start)
    assert "resumed from outputs/digits/checkpoints/step_00000006, at step 6 of 7" in said


def test_a_complete_run_says_so_and_changes_no_file(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    said = succeed(capfd, *SMALL)
    assert "the run is complete at step 6" in said
    accuracy = json.loads(before["summary.json"])["eval"]["accuracy"]
    assert f"accuracy {accuracy:.4f}" in said
    assert contents(copied) == before


def test_the_checkpoint_of_another_model_is_refused_and_no_file_changes(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    other = ["trainer.steps=8", "model.num_classes=11"]
    message = fail(capfd, *SMALL, *other)
    assert "outputs/digits has model.num_classes=null, not 11" in message
    message = fail(capfd, *SMALL, *other, "allow_changes=true")
    assert "fc2.weight is [10, 128] in the checkpoint and [11, 128] in the model" in message
    assert contents(copied) == before


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    finished: Path, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(copied / "checkpoints" / LAST / "model.safetensors")
    said = succeed(capfd, *SMALL)
    assert (
        "skipping a damaged checkpoint: outputs/digits/checkpoints/step_00000006/model.safetensors"
        in said
    )
    assert "resumed from outputs/digits/checkpoints/step_00000004, at step 4 of 6" in said
    assert_same_checkpoint(copied / "checkpoints" / LAST, finished / "checkpoints" / LAST)
    assert learned(copied) == learned(finished)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (copied / "checkpoints").iterdir():
        flip_a_byte(path / "model.safetensors")
    before = contents(copied)
    assert "none of the checkpoints in outputs/digits/checkpoints is intact" in fail(capfd, *SMALL)
    assert contents(copied) == before


@pytest.mark.thorough
def test_a_run_resumed_with_another_split_ends_with_the_same_weights(
    capfd: pytest.CaptureFixture[str],
) -> None:
    constant = [*SMALL, "monitor.tensorboard=false", "lr_schedule=constant"]
    parts = [*constant, "run_name=parts"]
    succeed(capfd, *constant, "run_name=whole")
    succeed(capfd, *parts, "trainer.steps=2", "pipeline.split=time")
    plan = Path("outputs/parts/plan.yaml").read_text()
    succeed(capfd, *parts, "trainer.steps=4", "pipeline.split=time")
    assert Path("outputs/parts/plan.yaml").read_text() == plan  # it was not measured again
    succeed(capfd, *parts, "pipeline.split=[1,11]")
    assert Path("outputs/parts/plan.yaml").read_text() != plan
    ours = load_file(f"outputs/parts/checkpoints/{LAST}/model.safetensors")
    theirs = load_file(f"outputs/whole/checkpoints/{LAST}/model.safetensors")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.thorough
def test_layers_are_measured_again_if_a_key_of_the_pipeline_has_changed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = [*SMALL, "monitor.tensorboard=false", "pipeline.split=balanced"]
    succeed(capfd, *run, "trainer.steps=2")
    assert "split as in outputs/digits/plan.yaml" in succeed(capfd, *run, "trainer.steps=4")
    said = succeed(capfd, *run, "pipeline.memory_weight=0.9")
    assert "again: pipeline.memory_weight has changed since the plan was made" in said


@pytest.mark.thorough
def test_another_model_in_a_run_directory_is_an_error_about_the_run_and_not_the_plan(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = [*SMALL, "monitor.tensorboard=false", "pipeline.split=time", "pipeline.nb_part=2"]
    succeed(capfd, *run, "trainer.steps=2")
    said = fail(capfd, *run, "model=torchvision", "model.name=squeezenet1_1", "model.resize=32")
    target = "model._target_=hybridtrain.models.basicnet, not hybridtrain.models.torchvision_model"
    assert f"outputs/digits has {target}: " in said
    assert "set another run_name=" in said


def test_checkpoints_written_in_the_background_are_those_of_a_plain_run(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    succeed(
        capfd,
        *SMALL,
        "run_name=background",
        "checkpoint.background=true",
        "checkpoint.every_steps=2",
    )
    assert_same_checkpoint(
        Path("outputs/background/checkpoints") / LAST, finished / "checkpoints" / LAST
    )


@pytest.mark.thorough
def test_a_new_run_begins_with_the_weights_of_another_and_a_resumed_one_does_not(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = finished / "checkpoints" / LAST / "model.safetensors"
    tuned = [*SMALL, "run_name=tuned"]
    rate = ["lr_schedule=constant", "lr_schedule.warmup_steps=0", "lr_schedule.factor=0"]
    rate += ["lr_schedule.total_iters=9"]  # a rate of 0
    new = [*tuned, f"init_from={source}", *rate, "trainer.steps=2"]
    said = succeed(capfd, *new)
    assert f"initial weights from {source}: 8 tensors loaded" in said
    weights = load_file("outputs/tuned/checkpoints/step_00000002/model.safetensors")
    assert_same(weights, load_file(source))
    assert "initial weights" not in succeed(capfd, *new, "trainer.steps=3")
    other = fail(capfd, *tuned, f"init_from={finished}")
    assert f"outputs/tuned started from init_from={source} and resumes" in other
    assert "set another run_name=" in other
    head = [*SMALL, "run_name=head", "model.num_classes=17", f"init_from={source}"]
    assert "fc2.weight is [10, 128] in the source and [17, 128] in the model" in fail(capfd, *head)
    assert "must be a path, or a mapping" in fail(capfd, *head[:-1], "init_from=3")


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_from_scratch(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (copied / "checkpoints").rename(copied / "renamed")
    said = succeed(capfd, *SMALL, "trainer.steps=1")
    assert "this run has trained before" in said
    assert "from scratch" in said


def test_a_run_that_was_killed_before_its_first_checkpoint_says_which_setting_saves_earlier(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "checkpoints")
    (copied / "summary.json").unlink()  # as after `kill -9`
    said = succeed(capfd, *SMALL, "trainer.steps=1", "checkpoint.every_steps=200")
    assert "checkpoint.every_steps=200" in said
    assert "from scratch" in said
    assert "removed" not in said


@pytest.mark.thorough
def test_evaluate_takes_the_best_checkpoint_where_one_is_marked_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    succeed(capfd, *SMALL, "trainer.steps=2", "checkpoint.best=loss")
    mark = Path("outputs/digits/checkpoints/best.json")
    succeed(capfd, *SMALL, "trainer.steps=4", "trainer.eval_every=4", "checkpoint.best=loss")
    values = json.loads(mark.read_text())
    mark.write_text(json.dumps({**values, "step": 2}))
    said = succeed(capfd, "evaluate", "run_name=digits")
    assert "the best checkpoint, outputs/digits/checkpoints/step_00000002 (resume=last " in said
    assert "step 2: loss" in said
    assert "step 4: loss" in succeed(capfd, "evaluate", "run_name=digits", "resume=last")
