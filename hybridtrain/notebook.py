"""Runs in a notebook: `notebook_launcher` starts one, `show_run` shows its curves and timeline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from PIL import Image

from hybridtrain.errors import DataError
from hybridtrain.launch import notebook_launcher
from hybridtrain.monitor import Curve, draw_accounts, draw_curves
from hybridtrain.schedule import Account

__all__ = ["curves_of", "notebook_launcher", "pictures_of", "show_run"]


def show_run(directory: str | Path) -> None:
    """Shows in a notebook the losses of a run, where its time went, and its last timeline.

    Args:
        directory: of the run, where `MetricsFile` and `TimelineFiles` write.

    Raises:
        DataError: it has no `metrics.jsonl`.
    """
    from IPython.display import display

    for picture in pictures_of(directory):
        display(picture)


def pictures_of(directory: str | Path) -> list[Image.Image]:
    """Returns the pictures that `show_run` shows."""
    directory = Path(directory)
    curves, name = curves_of(directory), directory.resolve().name
    losses: dict[str, Curve] = {
        tag: curve for tag, curve in curves.items() if tag.endswith("/loss")
    }
    pictures = [draw_curves(losses, name)]
    accounts: dict[int, dict[str, float]] = {}
    for part in Account._fields:
        for step, value in curves.get(f"account/{part}_ms", []):
            accounts.setdefault(step, {})[part] = value
    if accounts:
        pictures.append(draw_accounts(sorted(accounts.items()), name))
    timeline = directory / "timeline.png"
    if timeline.exists():
        with Image.open(timeline) as image:
            pictures.append(image.copy())
    return pictures


def curves_of(directory: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Returns what a run has logged, by tag: pairs of step and value, NaN where it is not finite.

    Raises:
        DataError: the directory has no `metrics.jsonl`.
    """
    path = Path(directory) / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path} is not there: is it the directory of a run?")
    curves: dict[str, list[tuple[int, float]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line: dict[str, Any] = json.loads(text)
        step = line.pop("step")
        line.pop("time", None)
        for tag, value in line.items():
            curves.setdefault(tag, []).append((step, math.nan if value is None else value))
    return curves
