"""Which of two values is better: by the value itself, for every command that compares runs."""

import json
from pathlib import Path

import pytest
from cli_runs import fail, metrics, succeed

from hybridtrain.cli import main

DIGITS = [
    *("recipe=digits", "world.devices=cpu", "trainer.epochs=null", "trainer.steps=20"),
    *("trainer.eval_every=5", "trainer.log_every=20", "run_name=a"),
]


def test_a_large_accuracy_is_best_for_the_checkpoint_and_for_all_callbacks(tmp_path: Path) -> None:
    callbacks = (
        "callbacks={early_stopping: {patience: 1, value: accuracy}, "
        "plateau: {value: accuracy, patience: 1}, best_weights: {value: accuracy, k: 1}}"
    )
    assert main([*DIGITS, "checkpoint.best=accuracy", callbacks]) == 0
    run = tmp_path / "outputs/a"
    by_step = {x["step"]: x["eval/accuracy"] for x in metrics(run) if "eval/accuracy" in x}
    best = max(by_step, key=lambda step: (by_step[step], -step))
    assert best > 5
    marked = json.loads((run / "checkpoints/best.json").read_text())
    assert (marked["step"], marked["criterion"]) == (best, "max accuracy")
    (kept,) = (run / "best_weights").iterdir()
    assert kept.stem == f"step_{best:08d}"
    assert max(by_step) == 20  # nothing ended the run while accuracy rose
    assert metrics(run)[-2]["train/lr"] > 1e-5


@pytest.mark.thorough
def test_a_run_that_was_stopped_early_says_so_and_trains_on_without_the_callback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping = "callbacks={early_stopping: {patience: 1, min_delta: 9}}"
    succeed(capfd, *DIGITS, stopping)
    for rerun in ([*DIGITS, stopping], ["run_name=a"]):
        said = succeed(capfd, *rerun)
        assert "by early_stopping at step 10 of 20" in said
        assert "raise trainer." not in said
    said = fail(capfd, "run_name=a", "trainer.steps=15")
    assert "by early_stopping at step 10 of 15, with trainer.steps=20, not 15" in said
    assert "callbacks=null" in said
    succeed(capfd, "run_name=a", "trainer.steps=15", "callbacks=null")
    assert json.loads((tmp_path / "outputs/a/summary.json").read_text())["steps"] == 15


@pytest.mark.thorough
def test_results_and_search_take_the_largest_accuracy_and_ask_for_what_they_do_not_know(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sweep = [*DIGITS[:-1], "checkpoint.best=accuracy", "optim.lr=1e-5,3e-3", "run_name=s"]
    assert main(["search", *sweep, "search.trials=2", "search.sampler=random"]) == 0
    capfd.readouterr()
    for order in ([], ["sort=accuracy"]):
        assert main(["results", "s-search", *order]) == 0
        shown = capfd.readouterr()
        values = [float(word) for word in shown.out.split() if word.startswith("0.")]
        best = max(
            json.loads(file.read_text())["eval"]["accuracy"]
            for file in Path("outputs/s-search").glob("*/summary.json")
        )
        assert values
        assert f"{best:.4g}\n" in shown.err
    f1 = "trainer.metrics={mean: {_target_: torchmetrics.MeanMetric}}"
    assert "set checkpoint.best_mode=min or" in fail(capfd, *DIGITS, f1, "checkpoint.best=mean")
    assert "search.mode=min or search.mode=max" in fail(
        capfd, "search", *sweep, f1, "search.metric=mean"
    )


@pytest.mark.thorough
def test_the_loss_follows_the_model_that_is_chosen(capfd: pytest.CaptureFixture[str]) -> None:
    short = [*DIGITS[:-2], "trainer.steps=1"]
    succeed(capfd, *short, "run_name=own")
    succeed(capfd, *short, "model=timm", "model.name=resnet10t", "run_name=logits")
    losses = [
        json.loads(Path(f"outputs/{name}/summary.json").read_text())["eval"]["loss"]
        for name in ("own", "logits")
    ]
    assert min(losses) > 0.5  # the negative log-likelihood of logits would be about 0, or below
