"""One cell: a launch with a deadline, and its comparison with the unsplit model."""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.exactness import plain
from scripts.bench.exactness.cases import Case, Masks
from scripts.bench.exactness.systems import SYSTEMS
from scripts.bench.exactness.worker import launch

# Largest difference that counts as rounding, relative to the weights.
ROUNDING = 1e-7

_ERROR = re.compile(
    r"^(?:\[rank\d+\]:)?\s*(?:[\w.]+\.)?(\w+(?:Error|Exception|Iteration)): *(.*)$", re.MULTILINE
)


@dataclass(frozen=True)
class Result:
    """The content of a cell.

    Attributes:
        verdict: `bitwise`, `1e-7 (2e-17)`, `wrong by 12%`, `refused`, `hangs`, `other draws`, ...
        note: what a footnote says about it.
        draws: a digest of the masks that the dropout layers have drawn; empty: none.
    """

    verdict: str
    note: str = ""
    draws: str = ""


def measure(system: str, key: str, way: str, deadline_s: float) -> Result:
    """Trains a case with a system in processes of their own, and compares the end.

    Args:
        system: a key of `SYSTEMS`.
        key: of `CASES`.
        way: `plain`, as its quick start says, or `remedy`.
        deadline_s: seconds after which the processes are killed.
    """
    case = SYSTEMS[system].case(key)
    with tempfile.TemporaryDirectory() as folder:
        count = SYSTEMS[system].processes(case)
        status, output = launch(system, key, way, count, Path(folder), deadline_s)
        if status is None:
            return Result("hangs", f"Still running after {deadline_s:g} s.")
        if status != 0:
            return Result("refused" if _ERROR.search(output) else "crashes", _first_error(output))
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(count)]
    return compare(case, ranks)


def compare(case: Case, ranks: list[dict[str, Any]]) -> Result:
    """Compares what all processes have at the end with the unsplit model.

    Args:
        case: the case.
        ranks: for each process its weights and buffers, its replica, and its dropout masks.
    """
    replicas: dict[int, dict[str, Tensor]] = {}
    for rank in ranks:
        replicas.setdefault(rank["replica"], {}).update(rank["values"])
    masks = _in_order(case, ranks)
    first, *others = (_parameters(case, values) for values in replicas.values())
    if any(not _equal(first, values) for values in others):
        return Result("replicas differ", "The replicas end with different weights.")
    references = (
        [plain.train(case, weighing, masks) for weighing in plain.WEIGHINGS]
        if masks
        else _references(case)
    )
    verdict, note = _verdict(case, replicas[0], references)
    if len(replicas) > 1 and _same_masks(masks, case):
        note = f"{note} Both replicas draw the same masks.".strip()
    return Result(verdict, note, _digest(masks))


def same_draws(result: Result, base: Result) -> Result:
    """Returns the result of a case that must draw the masks of another run."""
    if not result.draws or not base.draws or result.draws == base.draws:
        return result
    note = (
        f"Compared with the unsplit model on these masks: {result.verdict}. {result.note}".strip()
    )
    return Result("other draws", note, result.draws)


def _verdict(
    case: Case, values: dict[str, Tensor], references: list[dict[str, Tensor]]
) -> tuple[str, str]:
    if any(_equal(values, reference) for reference in references):
        return "bitwise", ""
    reference, start = references[0], plain.first_weights(case)
    names = set(_parameters(case, reference))
    groups = [sorted(names), sorted(reference.keys() - names)]  # weights, and buffers if any
    groups = [group for group in groups if group]
    differences = [_norm(values, group, reference) for group in groups]
    rounding = max(
        d / _norm(reference, group) for d, group in zip(differences, groups, strict=True)
    )
    if rounding <= ROUNDING:
        return f"1e-7 ({rounding:.0e})", ""
    errors = [
        difference / _norm(reference, group, start)
        for difference, group in zip(differences, groups, strict=True)
    ]
    note = ""
    if errors[0] <= ROUNDING:
        note = "The weights are right, but the running statistics of batch norm are not."
    return f"wrong by {_percent(max(errors))}", note


def _percent(error: float) -> str:
    return f"{100 * error:.2g}%" if error < 0.995 else f"{100 * error:.0f}%"


def _norm(
    values: dict[str, Tensor], names: list[str], less: dict[str, Tensor] | None = None
) -> float:
    """Returns the norm of values, or of their difference from others."""
    squares = [
        (values[name].double() - (0 if less is None else less[name].double())).square().sum()
        for name in names
    ]
    return float(sum(squares)) ** 0.5


def _parameters(case: Case, values: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        f"{position}.{name}"
        for position, layer in enumerate(case.model())
        for name, _ in layer.named_parameters()
    }
    return {name: value for name, value in values.items() if name in names}


@cache
def _references(case: Case) -> list[dict[str, Tensor]]:
    return [plain.train(case, weighing) for weighing in plain.WEIGHINGS]


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    same_names = first.keys() == second.keys()
    return same_names and all(value.equal(second[name]) for name, value in first.items())


def _in_order(case: Case, ranks: list[dict[str, Any]]) -> Masks:
    """Returns the masks of each layer by step, replica and micro-batch."""
    drawn: dict[str, dict[int, list[Tensor]]] = {}
    for rank in ranks:
        for name, masks in rank["masks"].items():
            drawn.setdefault(name, {})[rank["replica"]] = masks
    count = case.microbatches_per_replica * case.accumulate
    return {
        name: [
            mask
            for start in range(0, len(by_replica[0]), count)
            for replica in sorted(by_replica)
            for mask in by_replica[replica][start : start + count]
        ]
        for name, by_replica in drawn.items()
    }


def _same_masks(masks: Masks, case: Case) -> bool:
    """Returns whether the first micro-batch has the same masks in both replicas."""
    count = case.microbatches_per_replica * case.accumulate
    return bool(masks) and all(drawn[0].equal(drawn[count]) for drawn in masks.values())


def _digest(masks: Masks) -> str:
    drawn = [mask.numpy().tobytes() for name in sorted(masks) for mask in masks[name]]
    return hashlib.sha256(b"".join(drawn)).hexdigest() if drawn else ""


def _first_error(output: str) -> str:
    """Returns the last error that a process has printed, or the end of its output."""
    errors = [f"{name}: {text}" for name, text in _ERROR.findall(output) if text.strip()]
    lines = output.strip().splitlines() or ["no output"]
    return (errors or lines)[-1][:300]
