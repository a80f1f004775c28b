"""Every recipe, for a few steps on small data."""

import json
import math
from pathlib import Path

import pytest
from cli_runs import metrics, succeed
from support.small_data import write_imdb, write_mnist

TINY = {
    "digits": [],
    "mnist_basicnet": ["data.root=data"],
    "imdb_transformer": [
        *("data.root=data", "data.max_len=32", "model.d_model=16", "model.d_hid=16"),
        "model.nhead=2",
    ],
    "python_source_gpt": [
        *("data.seq_len=32", "data.max_bytes=20000", "data.eval_bytes=2000"),
        *("model.d_model=16", "model.n_head=2"),
    ],
}


@pytest.mark.parametrize("recipe", TINY)
def test_every_recipe_trains_a_few_steps_on_small_data(
    recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if recipe == "mnist_basicnet":
        write_mnist("data", n_train=48, n_test=20)
    if recipe == "imdb_transformer":
        pytest.importorskip("torchtext")
        write_imdb("data", n=40)
    few = ["trainer.epochs=null", "trainer.steps=3", "trainer.log_every=1", "data.batch_size=16"]
    cpu = ["world.devices=cpu", "monitor.tensorboard=false"]
    said = succeed(capfd, f"recipe={recipe}", *few, *cpu, *TINY[recipe])
    run = Path("outputs") / recipe
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["world"]["nb_part"] == len(summary["stages"]) == 2
    losses = [line["train/loss"] for line in metrics(run) if "train/loss" in line]
    classes = {"imdb_transformer": 2, "python_source_gpt": 256}.get(recipe, 10)
    assert len(losses) == 3
    # untrained, a model knows about as much as one that guesses
    assert losses[0] == pytest.approx(math.log(classes), rel=0.5)
    assert summary["eval"]["samples"] > 0
    assert 0 <= summary["eval"]["accuracy"] <= 1
    assert ("perplexity" in summary["eval"]) == (recipe == "python_source_gpt")
    if recipe == "python_source_gpt":
        assert summary["eval"]["perplexity"] == pytest.approx(math.exp(summary["eval"]["loss"]))
        for line in metrics(run):
            if "train/loss" in line:
                per_sample = line["train/tokens_per_second"] / line["train/samples_per_second"]
                assert per_sample == pytest.approx(32)
    assert (run / "checkpoints" / "step_00000003").is_dir()
    assert "1 process x 2 stages" in said


def test_the_mfu_has_the_flops_of_forwards_and_backwards_without_recomputation(
    capfd: pytest.CaptureFixture[str],
) -> None:
    width, length, vocabulary, layers = 16, 32, 256, 3
    said = succeed(
        capfd,
        *("recipe=python_source_gpt", *TINY["python_source_gpt"], f"model.n_layer={layers}"),
        *("trainer.steps=2", "trainer.log_every=1", "trainer.eval_every=null"),
        *("world.devices=cpu", "data.batch_size=16", "pipeline.checkpoint=always"),
        *("cluster=h100", "cluster.device=cpu", "cluster.flops_per_s.fp32=1e9"),
    )
    assert "train/mfu is not logged" not in said
    # Narayanan et al., 2021 (arXiv:2104.04473), section 5.1, with 3 forwards in place of their 4
    products = 24 * layers * length * width**2 + 4 * layers * length**2 * width
    forward = products + 2 * length * width * vocabulary
    logged = [line for line in metrics(Path("outputs/python_source_gpt")) if "train/mfu" in line]
    assert len(logged) == 2
    for line in logged:
        rate = 3 * forward * line["train/samples_per_second"]
        assert line["train/mfu"] == pytest.approx(rate / (2 * 1e9))


def test_a_cluster_of_other_devices_trains_and_says_why_there_is_no_mfu(
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = ["trainer.epochs=null", "trainer.steps=2", "trainer.log_every=1"]
    said = succeed(capfd, "recipe=digits", "world.devices=cpu", *steps, "cluster=h100")
    assert "train/mfu is not logged: cluster.device=cuda, and the run is on cpu" in said
    assert not any("train/mfu" in line for line in metrics(Path("outputs/digits")))
