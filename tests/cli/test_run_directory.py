"""The files and the terminal output of a run."""

import json
import os
import re
from pathlib import Path

import pytest
from cli_runs import LAST, metrics, succeed
from omegaconf import OmegaConf
from support.launch import SMALL

from hybridtrain import models
from hybridtrain._base.files import write_atomically
from hybridtrain.cli.commands.train import values_to_compare
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import Config
from hybridtrain.schedule import Account


def test_config_yaml_is_the_resolved_config_and_overrides_yaml_the_command_line(
    finished: Path,
) -> None:
    asked = [*SMALL, f"output_dir={finished.parent}"]
    assert OmegaConf.to_object(OmegaConf.load(finished / "overrides.yaml")) == asked
    loaded = OmegaConf.load(finished / "config.yaml")
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), loaded)) == (
        compose_config(asked)
    )


def test_metrics_jsonl_has_a_line_for_each_logged_step_and_each_evaluation(finished: Path) -> None:
    lines = metrics(finished)
    training = [line for line in lines if "train/loss" in line]
    evaluations = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6]
    assert [line["step"] for line in evaluations] == [4, 6]
    for line in training:
        for tag in ("train/loss", "train/lr", "train/grad_norm", "train/samples_per_second"):
            assert line[tag] > 0
    # The recipe's warm-up over 20 steps, at the steps 1, 3 and 5 counted from 0.
    assert [line["train/lr"] for line in training] == pytest.approx(
        [3e-3 * (1 + step) / 21 for step in (1, 3, 5)]
    )


def test_summary_json_keeps_its_contract(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["samples"] == 6 * 32
    assert summary["train_loss"] == metrics(finished)[-2]["train/loss"]
    assert summary["eval"]["samples"] == 355  # every held-out digit once
    assert summary["eval"]["loss"] == metrics(finished)[-1]["eval/loss"]
    assert 0 <= summary["eval"]["accuracy"] <= 1
    assert summary["eval"]["accuracy"] * 355 == pytest.approx(
        round(summary["eval"]["accuracy"] * 355)
    )
    assert summary["samples_per_second"] > 0
    assert 0 < summary["step_ms"]["p50"] <= summary["step_ms"]["p95"]
    assert 0 <= summary["bubble_fraction"] < 1
    world = {"processes": 1, "nb_part": 2, "replicas": 1, "engine": "local", "backend": "gloo"}
    assert summary["world"] == world
    assert summary["checkpoint"] == str(finished / "checkpoints" / LAST)
    assert summary["resumed_from"] is None

    net = models.basicnet(num_classes=10, image_size=8, channels=1)
    assert len(summary["stages"]) == 2
    layers = [name for stage in summary["stages"] for name in stage["layers"]]
    assert layers == [name for name, _ in net.named_children()]
    parameters = sum(parameter.numel() for parameter in net.parameters())
    assert sum(stage["parameters"] for stage in summary["stages"]) == parameters
    for stage in summary["stages"]:
        assert stage["layers"]
        assert stage["forward_ms"] > 0
        assert stage["backward_ms"] > 0
        # weights, gradients and the two moments of Adam
        assert stage["peak_memory_bytes"] >= 4 * 4 * stage["parameters"]
        assert isinstance(stage["peak_memory_bytes"], int)

    predicted, measured = summary["predicted"], summary["measured"]
    assert set(measured) < set(predicted)
    assert measured["step_ms"] == summary["step_ms"]["p50"]
    assert measured["bubble"] == summary["bubble_fraction"]
    assert predicted["memory_bytes"] == pytest.approx(measured["memory_bytes"], rel=0.05)
    assert (predicted["step_ms"] is None) == (predicted["reason"] is not None)


def test_tensorboard_has_every_curve_and_the_config_as_text(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    absent = ("recompute", "reduction", "stragglers")  # of one process that keeps all
    assert not scalars & {f"2_time/{name}_percent" for name in absent}
    assert scalars >= {
        *(f"1_overview/{name}" for name in ("train_loss", "eval_loss", "eval_accuracy")),
        *(
            "1_overview/train_samples_per_s",
            "1_overview/used_device_time_percent",
            "2_time/step_ms",
        ),
        *(f"2_time/{name}_percent" for name in Account._fields if name not in absent),
        *(f"3_stages/memory_mib/{i}" for i in (0, 1)),
        *(f"3_stages/{name}/{i}" for i in (0, 1) for name in ("forward_ms", "backward_ms")),
        *(f"4_optimizer/{name}" for name in ("lr", "grad_norm")),
    }
    assert [point.step for point in events.Scalars("1_overview/train_loss")] == [2, 4, 6]
    assert [point.step for point in events.Scalars("1_overview/eval_accuracy")] == [4, 6]
    texts = [
        event.tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        if tag.endswith("text_summary")
        for event in events.Tensors(tag)
    ]
    assert any("nb_part: 2" in text and "T_max: null" in text for text in texts)


def test_the_terminal_shows_the_placement_the_progress_and_the_run_directory(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = succeed(capfd, *SMALL, "monitor.tensorboard=false")
    assert said.count("1 process x 2 stages") == 1
    assert re.search(
        r"^ +0 +6 +[\d,]+ +[\d.]+ [KM]iB +\d+% +cpu +conv1 \.\.\. dropout1$", said, re.M
    )
    assert re.search(r"^ +0 +\S+ +cpu cpu$", said, re.M)
    steps = re.findall(
        r"^step (\d)/6  loss [\d.]+  [\d,.]+ samples/s  lr \S+  \w+ \d+%  left \S+$", said, re.M
    )
    assert steps == ["2", "4", "6"]
    assert re.findall(r"^step (\d)/6  eval: loss \S+  accuracy \S+$", said, re.M) == ["4", "6"]
    here = Path("outputs/digits")
    accuracy = json.loads((here / "summary.json").read_text())["eval"]["accuracy"]
    assert f"run directory: {here.resolve()}\n" in said
    assert said.splitlines()[-1].endswith(f"accuracy {accuracy:.4f}")
    assert "tensorboard --logdir" not in said
    logged = (here / "logs" / "rank_000.log").read_text()
    assert logged.count("1 process x 2 stages") == 1
    assert f"run directory: {here.resolve()}" in logged
    assert not list(here.glob("events.out.tfevents.*"))


def test_checkpoint_keep_and_every_steps_decide_which_checkpoints_stay(
    capfd: pytest.CaptureFixture[str],
) -> None:
    quick = [*SMALL, "monitor.tensorboard=false", "trainer.steps=3", "checkpoint.every_steps=1"]
    succeed(capfd, *quick, "checkpoint.keep=2")
    kept = sorted(path.name for path in Path("outputs/digits/checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003"]
    succeed(capfd, *quick, "run_name=none", "checkpoint.every_steps=0")
    assert not Path("outputs/none/checkpoints").exists()
    assert json.loads(Path("outputs/none/summary.json").read_text())["checkpoint"] is None


def test_an_epoch_is_every_sample_once(capfd: pytest.CaptureFixture[str]) -> None:
    by_epochs = ["trainer.steps=null", "trainer.epochs=2", "data.batch_size=500"]
    succeed(capfd, *SMALL, "monitor.tensorboard=false", *by_epochs)
    summary = json.loads(Path("outputs/digits/summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (6, 2 * 1442)  # a ragged last batch of 442


def test_a_file_that_replaces_another_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, at_fsync = tmp_path / "config.yaml", []
    fsync = os.fsync
    write_atomically(path, "before")

    def note(descriptor: int) -> None:
        at_fsync.append((os.fstat(descriptor).st_size, path.read_text()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_atomically(path, "whole")
    assert at_fsync == [(len("whole"), "before")]
    assert path.read_text() == "whole"


@pytest.mark.thorough
def test_the_dashboard_has_what_the_command_sets_as_hydra_reads_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rare = [
        "trainer.steps=1",
        "trainer.max_time=01:10:30",
        "callbacks={freeze: {match: ['*.bias']}}",
    ]
    succeed(capfd, *SMALL, *rare, "trainer.steps=1")
    events = EventAccumulator("outputs/digits")
    events.Reload()
    (text,) = events.Tensors("overrides/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "01:10:30" in shown
    assert "*.bias" in shown


def test_the_dashboard_has_no_secret_of_the_command_line() -> None:
    overrides = ["recipe=digits", "run_name=a", "+model.api_token=abc", "+model.width=3"]
    overrides += ["+model.passphrase=abcd", "+model.server=https://me:abcde@there/x"]
    config = compose_config(overrides)
    shown = values_to_compare(Settings(config, overrides))
    assert "model.width: 3" in shown
    assert "https://me:***@there/x" in shown
    assert "abc" not in shown


def test_the_files_of_a_run_have_no_secret_that_comes_from_the_environment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = (
        "from torch import nn\ndef net(**_): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"
    )
    Path("my_net.py").write_text(net)
    monkeypatch.setenv("MY_KEY", "hunter2")
    own = ["allow_targets=[my_net]", "~model", "+model={_target_: my_net.net}", "trainer.steps=1"]
    keys = ["+model.api_key=${oc.env:MY_KEY}", "+model.server='https://me:${oc.env:MY_KEY}@there'"]
    said = succeed(capfd, *SMALL, *own, *keys, "+model.other=https://me:hunter3@there")
    files = [path for path in Path("outputs/digits").rglob("*") if path.is_file()]
    assert {"config.yaml", "rank_000.log", "summary.json"} <= {path.name for path in files}
    assert "hunter" not in said
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    typed = {path.name for path in files if b"hunter3" in path.read_bytes()}
    assert typed == {"config.yaml", "overrides.yaml"}
