"""Runs that end before their last step: diverged, or interrupted; what stays, and the exit code."""

import json
import os
import signal

import pytest
from cli_runs import LAST, assert_same_checkpoint, learned, succeed
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.loop import evaluate as evaluate_model


def end(capfd, code, *arguments):
    """Runs a command that must end with this exit code and one line; returns the line."""
    capfd.readouterr()
    assert main(arguments) == code
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert ("error: " in err) == (code != 75)  # what was asked for is no error
    last = err[err.index("interrupted at" if code == 75 else "error: ") :]
    assert last.count("\n") == 1
    return last


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


@pytest.mark.thorough
def test_a_learning_rate_that_is_far_too_large_ends_with_one_line_and_keeps_what_was_good(
    copied, capfd
):
    before = steps(copied)
    message = end(capfd, 3, *SMALL, "trainer.steps=60", "optim.lr=1e9")
    assert "the run has diverged: 10 consecutive steps" in message
    assert "trainer.max_skipped=10" in message
    assert "Origin in step " in message
    assert f"The last good checkpoint is outputs/digits/checkpoints/{LAST}" in message
    assert "set trainer.clip_norm=" in message
    assert steps(copied) == before


def test_a_time_limit_ends_with_code_75_and_the_same_command_goes_on(finished, tmp_path, capfd):
    message = end(capfd, 75, *SMALL, "trainer.max_time=1e-9")
    saved = "outputs/digits/checkpoints/step_00000001"
    assert message.startswith("interrupted at step 1 of 6 by max_time: ")
    assert saved in message
    assert message.count("\n") == 1
    assert not (tmp_path / "outputs/digits/summary.json").exists()
    succeed(capfd, *SMALL, "trainer.max_time=null")
    run = tmp_path / "outputs" / "digits"
    assert learned(run) == learned(finished)
    assert_same_checkpoint(run / "checkpoints" / LAST, finished / "checkpoints" / LAST)


@pytest.mark.thorough
def test_an_interrupted_last_evaluation_is_made_up_for(finished, tmp_path, capfd, monkeypatch):
    def interrupt(*args, one_batch=False, **kwargs):
        if not one_batch:  # not in the trial before the first step
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_model(*args, one_batch=one_batch, **kwargs)

    options = [*SMALL, "trainer.eval_every=6"]
    with monkeypatch.context() as patch:
        patch.setattr("hybridtrain.loop.trainer.evaluate", interrupt)
        message = end(capfd, 75, *options)
    assert "interrupted at step 6 of 6 by SIGTERM: saved" in message
    succeed(capfd, *options)
    run = tmp_path / "outputs" / "digits"
    assert learned(run)[-1] == learned(finished)[-1]
    assert json.loads((run / "summary.json").read_text())["eval"]["samples"] > 0


@pytest.mark.parametrize("overrides", [["checkpoint.every_minutes=1"], ["checkpoint.best=loss"]])
@pytest.mark.quick_cases(1)
def test_checkpoints_that_are_off_and_asked_for_are_refused(overrides, capfd):
    capfd.readouterr()
    assert main([*SMALL, "checkpoint.every_steps=0", *overrides]) == 2
    assert (
        f"checkpoint.every_steps=0 turns checkpoints off, but {overrides[0]}"
        in capfd.readouterr().err
    )


def test_a_summary_without_a_finite_loss_is_json(tmp_path, capfd):
    succeed(capfd, *SMALL, "optim.lr=1e9", "lr_schedule.warmup_steps=0", "trainer.log_every=1")
    text = (tmp_path / "outputs/digits/summary.json").read_text()

    def refuse(constant):
        raise AssertionError(constant)

    summary = json.loads(text, parse_constant=refuse)
    assert summary["train_loss"] is None
    assert summary["skipped_steps"] > 0
