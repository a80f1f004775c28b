"""The record of a run, read from the files in its directory, during or after the run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hybridtrain._base.files import json_lines, read_file, read_json, reading
from hybridtrain._base.yaml_text import load_yaml
from hybridtrain.errors import DataError
from hybridtrain.observe.report.settings import RunSettings
from hybridtrain.observe.timeline import spans_of_trace
from hybridtrain.partitioning import Plan
from hybridtrain.schedule import Account, Spans

Curves = dict[str, list[tuple[int, float]]]
"""The logged values of a run by tag: pairs of step and value, NaN for non-finite values."""

_WARNING = re.compile(r"[\d-]+ [\d:,]+ (?P<level>WARNING|ERROR) [\w.]+: (?P<text>.*)")
_MOST_WARNINGS = 20


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's files.

    Attributes:
        name: the name of the run.
        directory: the run directory.
        curves: the logged values.
        seconds: the time from the first to the last logged step, including pauses between attempts.
        summary: the content of `summary.json`; empty if the run has not ended.
        plan: the plan of the stages; None if the directory has none, as for a `Trainer` in Python.
        timeline: the predicted and measured spans of the last recorded step, in seconds.
        config: the text of the resolved config.
        overrides: the overrides of the command line.
        warnings: the logged warnings, each with its number of occurrences.
        best: the checkpoint that is marked as the best: its name, and why; None: there is no mark.
    """

    name: str
    directory: Path
    curves: Curves
    seconds: float
    summary: Mapping[str, Any]
    plan: Plan | None
    timeline: tuple[Spans, Spans] | None
    config: str
    overrides: Sequence[str]
    warnings: Sequence[tuple[str, int]]
    best: tuple[str, str] | None

    @classmethod
    def read(cls, directory: str | Path) -> RunRecord:
        """Reads the directory of a run.

        Raises:
            DataError: the directory has no `metrics.jsonl`.
        """
        directory = Path(directory)
        curves, seconds = _metrics(directory)
        plan, timeline = directory / "plan.yaml", directory / "timeline.json"
        summary = read_json(directory / "summary.json")
        with reading(directory / "summary.json"):
            summary = {} if summary is None else dict(summary, steps=int(summary["steps"]))
        with reading(directory / "overrides.yaml"):
            overrides = load_yaml(_text(directory / "overrides.yaml") or "[]")
            if not isinstance(overrides, list):
                raise TypeError("not a list")
        with reading(directory / "config.yaml"):
            config = _text(directory / "config.yaml")
            if not isinstance(load_yaml(config) or {}, dict):
                raise TypeError("not a mapping")
        with reading(plan):
            cut = Plan.read(plan) if plan.is_file() else None
        with reading(timeline):
            spans = spans_of_trace(timeline)
        mark = directory / "checkpoints" / "best.json"
        with reading(mark):
            best = read_json(mark)
            if best is not None:
                reason = f"{best.get('criterion') or 'value'} {float(best['value']):.4g}"
                best = f"step_{int(best['step']):08d}", reason
        return cls(
            name=directory.resolve().name,
            directory=directory,
            curves=curves,
            seconds=seconds,
            summary=summary,
            plan=cut,
            timeline=spans,
            config=config,
            overrides=[*map(str, overrides)],
            warnings=_warnings(directory / "logs"),
            best=best,
        )

    @property
    def steps(self) -> int:
        """The last logged step."""
        return max((curve[-1][0] for curve in self.curves.values()), default=0)

    @property
    def done(self) -> bool:
        """True if the run has ended and was not resumed after that."""
        return bool(self.summary) and self.summary["steps"] >= self.steps

    @cached_property
    def accounts(self) -> list[tuple[int, dict[str, float]]]:
        """The recorded steps, and the parts of each in milliseconds."""
        return accounts_of(self.curves)

    @property
    def settings(self) -> RunSettings:
        """The settings of the run, to compare with other runs."""
        return RunSettings(yaml.safe_load(self.config) or {}, self.overrides)

    def last(self, tag: str) -> float | None:
        """Returns the last value of a curve, or None if there is no such curve."""
        curve = self.curves.get(tag)
        return curve[-1][1] if curve else None


def curves_of(directory: str | Path) -> Curves:
    """Returns the logged values of a run by tag: (step, value) pairs, NaN for non-finite values.

    Raises:
        DataError: the directory has no `metrics.jsonl`.
    """
    return _metrics(Path(directory))[0]


def accounts_of(curves: Curves) -> list[tuple[int, dict[str, float]]]:
    """Returns the recorded steps among curves, and the parts of each in milliseconds."""
    accounts: dict[int, dict[str, float]] = {}
    for part in Account._fields:
        for step, value in curves.get(f"account/{part}_ms", []):
            accounts.setdefault(step, {})[part] = value
    return sorted(accounts.items())


def _metrics(directory: Path) -> tuple[Curves, float]:
    """Returns the curves and the seconds from the first line to the last."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path} does not exist: is this a run directory?")
    curves: Curves = {}
    times: list[float] = []
    for line in json_lines(path):
        step, time = line.pop("step"), line.pop("time", None)
        if isinstance(time, int | float) and math.isfinite(time):
            times.append(time)
        for tag, value in line.items():
            if value is None or isinstance(value, int | float):
                curves.setdefault(tag, []).append((step, math.nan if value is None else value))
    return curves, times[-1] - times[0] if times else 0.0


def _warnings(folder: Path) -> list[tuple[str, int]]:
    """Returns the warnings and errors of all processes, the most frequent first."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("rank_*.log")):
        with reading(path):
            text = read_file(path).decode(errors="replace")
        matches = map(_WARNING.match, text.splitlines())
        counts.update(match["text"] for match in matches if match)
    return counts.most_common(_MOST_WARNINGS)


def _text(path: Path) -> str:
    return read_file(path).decode() if path.exists() else ""
