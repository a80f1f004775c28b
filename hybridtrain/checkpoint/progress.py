"""Checks of a checkpoint's `state.json`, whose numbers steer the run that is resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtrain.errors import CheckpointError

_LARGEST = 2**63 - 1


def read_progress(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `state.json` of the checkpoint at `path`, which is verified.

    Raises:
        CheckpointError: it is not a dict, or not of the step that the manifest names.
    """
    file = path / "state.json"
    try:
        if file.name not in manifest["files"]:
            raise ValueError("it is not in the manifest")
        saved = json.loads(file.read_bytes())
        if not isinstance(saved, dict):
            raise ValueError(f"it holds {type(saved).__name__} where a dict should be")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    _check_number(file, saved, "draws_step")
    if "step" in saved and saved["step"] != manifest["step"]:
        raise CheckpointError(
            f"{file} is of step {saved['step']!r} and its manifest of step {manifest['step']}: "
            f"they are not of the same save"
        )
    return saved


def check_progress(saved: Mapping[str, Any], total_steps: int) -> None:
    """Checks the types and bounds of a `Trainer`'s state.

    Args:
        saved: its `state_dict`.
        total_steps: the length of the run that is resumed.

    Raises:
        CheckpointError: names the entry.
    """
    file = "the checkpoint's state.json"
    for name in ("step", "samples", "epoch", "row", "rows_per_step"):  # words: ok
        _check_number(file, saved, name, at_least=int(name == "rows_per_step"))
    if saved["step"] > total_steps:
        raise CheckpointError(
            f"the checkpoint is of step {saved['step']}, and this run has steps={total_steps}: "
            f"give it at least as many steps, or resume an earlier checkpoint"
        )
    if saved["epoch"] > saved["step"]:
        raise CheckpointError(
            f"{file} is damaged: epoch={saved['epoch']} after step={saved['step']}"
        )
    scaler = saved.get("scaler")
    if scaler is not None and not (
        isinstance(scaler, dict)
        and {"scale", "growth_factor", "backoff_factor", "growth_interval"} <= scaler.keys()
        and all(
            type(value) in (int, float) and math.isfinite(value) and value >= 0
            for value in scaler.values()
        )
    ):
        raise CheckpointError(f"{file} is damaged: scaler={scaler!r}")


def _check_number(file: object, saved: Mapping[str, Any], name: str, at_least: int = 0) -> None:
    value = saved.get(name)
    if type(value) is not int or not at_least <= value <= _LARGEST:
        raise CheckpointError(
            f"{file} is damaged: {name}={value!r} must be a whole number of {at_least} or more"
        )
