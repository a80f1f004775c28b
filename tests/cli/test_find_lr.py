"""A learning rate that is found instead of guessed."""

import json
from pathlib import Path

import pytest
from cli_runs import fail
from support.launch import SMALL

from hybridtrain.cli import main


def test_find_lr_prints_a_rate_and_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main(["find-lr", *SMALL]) == 0
    written = capfd.readouterr()
    found = json.loads(written.out)
    assert 1e-6 < found["lr"] < 1
    assert 20 < found["steps"] <= 100
    assert f"optim.lr={found['lr']:.1e}" in written.err
    assert not Path("outputs").exists()


@pytest.mark.thorough
def test_a_loss_that_never_falls_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert "does not fall" in fail(
        capfd, "find-lr", *SMALL, "optim=sgd", "++optim.maximize=true", "data.batch_size=512"
    )
