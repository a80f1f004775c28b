"""`trainer.deterministic=true`, typed: it sets PyTorch for one run, not for the next one."""

import os
from typing import Any

import pytest
import torch
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.loop import Trainer


def test_a_deterministic_run_sets_pytorch_and_the_next_run_of_the_process_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # is undone afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    found = []
    fit = Trainer.fit

    def noted_fit(trainer: Trainer, *texts: Any) -> Any:
        found.append(
            (torch.are_deterministic_algorithms_enabled(), trainer.model.world.repeats_bits)
        )
        return fit(trainer, *texts)

    monkeypatch.setattr(Trainer, "fit", noted_fit)
    for words in (["trainer.deterministic=true"], ["run_name=next"]):
        assert main([*SMALL, *words]) == 0
    assert found == [(True, True), (False, False)]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
