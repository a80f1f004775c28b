"""`pipeline.head`, which computes a loss without the logits."""

from pathlib import Path

import pytest
from cli_runs import fail, metrics, succeed
from support.launch import SMALL

RUN = (*SMALL, "trainer.steps=3", "trainer.epochs=null", "trainer.log_every=1")
QUIET = ("monitor.report=false", "monitor.tensorboard=false")


def test_a_run_without_logits_says_so_and_has_the_losses_of_a_plain_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    losses = {}
    for name, keys in {
        "plain": ["pipeline.head=plain"],
        "fused": ["pipeline.head=fused"],
        "cut": ["pipeline.head=fused", "pipeline.nb_part=2", "pipeline.schedule=zb-h1"],
    }.items():
        said = succeed(capfd, *RUN, *QUIET, *keys, f"run_name={name}")
        assert ("pipeline.head=fused: '" in said) == (name != "plain")
        logged = metrics(Path(f"outputs/{name}"))
        losses[name] = [line["train/loss"] for line in logged if "train/loss" in line]
    assert len(losses["plain"]) == 3
    assert losses["fused"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["fused"] == losses["cut"]


def test_an_unknown_head_is_one_line_with_the_choices(capfd: pytest.CaptureFixture[str]) -> None:
    said = fail(capfd, *RUN, "pipeline.head=chunked", "run_name=a")
    assert "pipeline.head=chunked" in said
    assert "auto, fused, plain" in said
