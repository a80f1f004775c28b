"""Metrics with a value per class: in the log, in files and TensorBoard, and to compare runs by."""

import json
from pathlib import Path

import pytest
from cli_runs import fail, metrics, succeed
from support.launch import SMALL
from support.small_data import write_images
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NAMES = ["blue", "green", "red"]
PETS = [
    *("recipe=image_folder_vit", "data.root=pets", "model=timm", "model.name=resnet10t"),
    *("data.image_size=32", "data.batch_size=8", "data.workers=0", "pipeline.nb_part=1"),
    *("pipeline.chunks=1", "world.devices=cpu", "trainer.epochs=null", "trainer.steps=2"),
    *("lr_schedule.warmup_steps=0", "monitor.report=false"),
]


def recall(classes: int) -> str:
    target = "torchmetrics.classification.MulticlassRecall"
    return f"{{_target_: {target}, num_classes: {classes}, average: none}}"


@pytest.mark.thorough
def test_the_values_have_the_names_of_the_classes_wherever_they_are_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("timm")
    write_images("pets", per_class=6)
    several = [f"trainer.metrics={{recall: {recall(3)}}}", "checkpoint.best=recall/red"]
    said = succeed(capfd, *PETS, *several, "run_name=a")
    run = Path("outputs/a")
    keys = [f"recall/{name}" for name in NAMES]
    evaluation = json.loads((run / "summary.json").read_text())["eval"]
    assert [key for key in evaluation if "recall" in key] == keys
    assert all(f"{key} {evaluation[key]:.4f}" in said for key in keys)
    assert {f"eval/{key}" for key in keys} <= metrics(run)[-1].keys()
    assert json.loads((run / "checkpoints/best.json").read_text())["criterion"] == "max recall/red"
    events = EventAccumulator(str(run))
    events.Reload()
    assert {f"1_overview/eval_{key}" for key in keys} <= {*events.Tags()["scalars"]}
    succeed(capfd, *PETS, *several, "run_name=b", "seed=1")
    capfd.readouterr()
    from hybridtrain.cli import main

    assert main(["results", "outputs", "sort=-recall/green"]) == 0
    shown = capfd.readouterr()
    assert all(key in shown.out.splitlines()[0] for key in keys)
    assert "best by recall/green: " in shown.err


@pytest.mark.thorough
def test_without_names_the_classes_have_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    said = succeed(capfd, *SMALL, f"trainer.metrics={{recall: {recall(10)}}}", "run_name=a")
    evaluation = json.loads(Path("outputs/a/summary.json").read_text())["eval"]
    assert [*evaluation] == ["loss", "samples", *(f"recall/{n}" for n in range(10))]
    assert f"recall/9 {evaluation['recall/9']:.4f}" in said


@pytest.mark.parametrize(
    "more",
    [
        ["checkpoint.best={}"],
        ["callbacks={{early_stopping: {{value: {}}}}}"],
        ["callbacks={{best_weights: {{value: {}}}}}"],
        ["checkpoint.best={}", "trainer.eval_first=true"],
    ],
)
@pytest.mark.parametrize("value", ["recall", "recall/10"])
@pytest.mark.quick_cases(1)
def test_a_value_that_the_metric_does_not_have_is_refused_before_the_first_step(
    value: str, more: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(value) for word in more]
    said = fail(capfd, *SMALL, f"trainer.metrics={{recall: {recall(10)}}}", *words)
    assert f"{value} is not a value of the evaluation: recall has recall/0, recall/1, " in said
    assert not list(Path("outputs/digits").glob("checkpoints/step_*"))


def test_a_metric_that_returns_several_tensors_is_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    curve = "{_target_: torchmetrics.classification.MulticlassROC, num_classes: 10}"
    said = fail(capfd, *SMALL, f"trainer.metrics={{m: {curve}}}")
    assert "the metric 'm' returns a tuple, " in said
