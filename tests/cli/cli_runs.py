"""Runs a command in this process, and reads the run directory that it leaves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridtrain.cli import main

LAST = "step_00000006"
# The values that differ between two equal runs.
MEASURED = (
    *("time", "train/samples_per_second", "train/tokens_per_second", "train/mfu"),
    *("train/step_ms", "pipeline/", "account/", "replicas/", "stage"),
)


def succeed(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must end well, and returns what it wrote to the terminal."""
    capfd.readouterr()
    code = main(arguments)
    written = capfd.readouterr()
    assert code == 0, written.err
    if arguments[0] not in (
        "evaluate",
        "export",
        "predict",
    ):  # which print their result, for scripts
        assert written.out == ""
    return written.err


def fail(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must end with a message and no traceback, and returns the message."""
    capfd.readouterr()
    code = main(arguments)
    err = capfd.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    return err[err.index("error: ") :]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[dict[str, Any]]:
    """The lines of the metrics without what was measured."""
    return [
        {key: value for key, value in line.items() if not key.startswith(MEASURED)}
        for line in metrics(run)
    ]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Bitwise equal weights and optimizer states, and the same place in the run."""
    for name in ("model", "optimizer"):
        weights = [load_file(path / f"{name}.safetensors") for path in (one, other)]
        assert_same(*weights)
    for name in ("optimizer.json", "state.json"):
        assert json.loads((one / name).read_text()) == json.loads((other / name).read_text())


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, Sequence) and not isinstance(one, str):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but the logs, which every command writes to."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "logs"
    }
