"""The grid as a table, in Markdown and CSV: every cell, with the reason where it is blank."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from scripts.bench.grid.cells import Cell
from scripts.bench.grid.results import Outcome, rounded

HEADER = (
    *("devices", "ntasks", "nb_part", "batch per device", "chunks"),
    *("samples/s", "step ms", "epoch s", "predicted samples/s", "binds", "blank because"),
)


def rows(
    outcomes: Sequence[Outcome], predicted_ms: Callable[[Cell], float] | None = None
) -> list[list[str]]:
    """Returns a line for each cell.

    Args:
        outcomes: of all cells.
        predicted_ms: returns what a measured cell was predicted to take; None: these are predicted.
    """
    return [_row(outcome, predicted_ms) for outcome in outcomes]


def _row(outcome: Outcome, predicted_ms: Callable[[Cell], float] | None) -> list[str]:
    cell = outcome.cell
    values = [cell.devices, cell.ntasks, cell.devices / cell.ntasks]
    line = [f"{value:g}" for value in (*values, cell.batch_per_device, cell.chunks)]
    times = [""] * 4
    if outcome.samples_per_s is not None and outcome.step_ms is not None:
        times = [rounded(outcome.samples_per_s), f"{outcome.step_ms:.2f}", f"{outcome.epoch_s:.2f}"]
        ms = predicted_ms(cell) if predicted_ms else outcome.step_ms
        times.append(rounded(cell.samples / ms * 1e3))
    failed = f"{outcome.failure}: " if outcome.failure else ""
    return [*line, *times, str(outcome.facts.get("binds", "")), failed + outcome.reason]


def as_csv(lines: Sequence[Sequence[str]]) -> str:
    """Returns the table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEADER, *lines])
    return text.getvalue()


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Returns the table as Markdown; `|` in a reason would end its column."""
    ruler = ["---:"] * (len(HEADER) - 2) + ["---"] * 2
    cells = [[cell.replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEADER, ruler, *cells]) + "\n"
