"""Runs that cannot be: one message that names the key, the path or the layer."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from cli_runs import fail
from support.cases import thinned
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run import build


@pytest.mark.parametrize(
    ("overrides", "message"),
    thinned(
        [
            (
                ["pipeline.nb_part=13"],
                "12 layers cannot be cut into 13 stages: lower pipeline.nb_part",
            ),
            (["pipeline.split=[3,4]"], "pipeline.split=[3, 4]: layer counts must"),
            (
                ["world.devices=[cpu,cpu,cpu]"],
                "world.devices=['cpu', 'cpu', 'cpu'] lists 3 devices",
            ),
            (["world.devices=cuda"], "need 2 GPUs, but there are 0"),
            (["world.backend=mpi"], "world.backend=mpi is not available"),
            (
                ["init_from=nowhere.pt"],
                "init_from=nowhere.pt: no such file or directory\n",
            ),
            (
                ["trainer.metrics={f1: torchmetrics.F1Score}"],
                "trainer.metrics=torchmetrics.F1Score is a class and needs a _target_: "
                "trainer.metrics={f1: {_target_: torchmetrics.F1Score}}",
            ),
            (
                ["trainer.metrics=[torchmetrics.F1Score]"],
                "trainer.metrics={F1Score: {_target_: torchmetrics.F1Score}}",
            ),
            (["model.image_size=3"], "model.image_size=3 is too small"),
            (
                ["output_dir=in_the_way"],
                "cannot write to the run directory in_the_way/digits: in_the_way is a",
            ),
            (
                ["data=mnist", "data.root=empty"],
                "hybridtrain recipe=mnist_basicnet data.download=true",
            ),
            (
                ["data=imdb", "data.root=empty"],
                "hybridtrain recipe=imdb_transformer data.download=true",
            ),
        ],
        2,
    ),
)
@pytest.mark.quick_cases(1)
def test_an_impossible_run_ends_with_one_message_that_names_the_key_or_path(
    overrides: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("in_the_way").touch()
    said = fail(capfd, *SMALL, *overrides)
    assert message in said
    if "data.root=empty" in overrides:
        assert str(Path("empty").resolve()) in said  # where it looked
        command = re.search(r"hybridtrain (recipe=.*data.download=true.*)", said)
        assert command is not None
        data = compose_config(shlex.split(command[1])).data
        assert (data["root"], data["download"]) == ("empty", True)  # it fetches what was missing
    assert not Path("outputs").exists()


def test_weights_that_are_not_there_are_told_before_the_data_are_loaded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_data", None)
    assert "init_from=nowhere.pt: no such file" in fail(capfd, *SMALL, "init_from=nowhere.pt")


@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE"])
def test_a_launcher_that_sets_no_number_is_one_line(
    key: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x" if name == key else "0")
    said = fail(capfd, *SMALL)
    assert said == f"error: the environment variable {key}='x' must be an integer\n"


def test_an_error_in_a_model_names_the_layer_the_stage_and_the_micro_batch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "model.image_size=10"]) == 1
    said = capfd.readouterr().err
    assert said.count("shapes cannot be multiplied") == 1
    assert "in layer 'fc1', with the input float32[8, 256]" in said
    assert "micro-batch 0 on stage 1" in said
    assert said.count("site-packages/torch") == 1  # the innermost frame, of the layer


@pytest.mark.parametrize(
    ("overrides", "message"),
    thinned(
        [
            (["optim.lr=fast"], "optim.lr=fast must be a number"),
            (["optim=sgd", "optim.nesterov=maybe"], "optim.nesterov=maybe must be true or false"),
            (["optim.lr=-1"], "optim.lr=-1 must be above 0"),
            (["+optim.lrr=1"], "optim.lrr: unknown key; did you mean optim.lr?"),
            (["data.batch_size=x"], "data.batch_size=x must be a whole number of samples"),
            (["data.batch_size=1e6"], "data.batch_size=1000000.0 must be a whole number"),
            (["optim=AdamW"], "optim=AdamW is unknown: did you mean 'adamw'?"),
            (
                ["callbacks={early_stopping: {value: acc}}"],
                "callbacks.early_stopping.value=acc is not a value of the evaluation",
            ),
            (["data.workers=-1"], "data.workers=-1 must be a number of processes"),
            (["data.timeout_s=0"], "data.timeout_s=0 must be a positive number of seconds"),
            (["data.drop_last=maybe"], "data.drop_last=maybe must be true or false"),
            (
                ["trainer.metrics=[acuracy]"],
                "trainer.metrics=acuracy is unknown: did you mean 'accuracy'?",
            ),
            (["trainer.loss=nlll"], "trainer.loss=nlll is unknown: did you mean 'nll'?"),
            (["trainer.epochs=2"], "give exactly one of trainer.steps= and trainer.epochs="),
            (["trainer.steps=0"], "trainer.steps=0 must be a whole number of at least 1"),
            (["trainer.clip_norm=0"], "trainer.clip_norm=0.0 must be positive"),
            (["trainer.precision=fp8"], "trainer.precision=fp8 is unknown"),
            (["world.engine=remote"], "world.engine=remote"),
            (["world.timeout_s=0"], "world.timeout_s=0.0 must be at least 1"),
            (["pipeline.nb_part=0"], "pipeline.nb_part=0 must be"),
            (["pipeline.chunks=0"], "pipeline.chunks=0 must be a whole number of at least 1"),
            (["pipeline.schedule=1f1"], "pipeline.schedule=1f1 .*1f1b"),
            (["pipeline.memory_weight=2"], "pipeline.memory_weight=2.0 must be between 0"),
            (["pipeline.recompute=some"], "pipeline.recompute=some is unknown"),
            (["checkpoint.keep=0"], "checkpoint.keep.*at least 1"),
            (["checkpoint.every_steps=-1"], "checkpoint.every_steps=-1 must be positive"),
            (["monitor.timeline_every=0"], "monitor.timeline_every=0 must be"),
            (["seed=9223372036854775808"], "seed=9223372036854775808 must fit in 64 bits"),
            (["run_name=../x"], "run_name='../x' must be the name of a folder"),
            (
                ["run_name=a/b/c"],
                "run_name='a/b/c' must be the name of a folder",
            ),
            (["run_name=a/../../x"], "run_name='a/../../x' must be the name of a folder"),
        ],
        3,
    ),
)
@pytest.mark.quick_cases(2)
def test_a_wrong_value_is_one_line_with_its_key_before_anything_is_written(
    overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *SMALL, *overrides)
    assert re.match("error: " + message.replace("?", r"\?"), said)
    assert said.count("\n") == 1
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+data.batchsize=1"], "data.batchsize: .* did you mean data.batch_size?"),
        (["data=python_source", "data.seq_len=0"], "data.seq_len=0 must be at least 1"),
        (
            ["data.batch_size=5000", "data.drop_last=true"],
            "the training data has 1442 samples, less than one batch of data.batch_size=5000: "
            "lower it, or set data.drop_last=false",
        ),
        (["model=gpt", "+model.n_layers=1"], "model.n_layers: .* did you mean model.n_layer?"),
        (["+lr_schedule.warmup_step=1"], "lr_schedule.warmup_step: .* lr_schedule.warmup_steps?"),
        (["lr_schedule.warmup_steps=-1"], "lr_schedule.warmup_steps=-1 must be"),
        (
            ["lr_schedule=step", "~lr_schedule.step_size"],
            r"lr_schedule \(StepLR\): missing a required argument: 'step_size'",
        ),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_wrong_argument_of_data_model_or_schedule_is_one_line_before_the_first_step(
    overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *SMALL, "monitor.tensorboard=false", *overrides)
    assert re.match("error: " + message.replace("?", r"\?"), said)
    assert said.count("\n") == 1
    assert not Path("outputs").exists()
