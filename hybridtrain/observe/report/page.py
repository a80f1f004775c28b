"""The report: figures and tables of runs in one HTML file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrain._base.files import check_replaceable, reading, write_atomically
from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import ConfigError
from hybridtrain.observe.confusion import MOST_CLASSES, confusion_of, is_confusion
from hybridtrain.observe.report import charts
from hybridtrain.observe.report.record import RunRecord
from hybridtrain.observe.report.settings import that_differ
from hybridtrain.partitioning import Plan
from hybridtrain.schedule import COMPUTING, Action, Spans, receiver_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_DEFINITIONS = {
    "samples per second": "over all replicas, excluding evaluations and checkpoints",
    "median step time": "over all optimizer steps; other times on this page are means over the "
    "recorded steps",
    "devices computing": "mean share of a recorded step that devices spend computing",
    "time": "from the first logged step to the last, including pauses",
}
# compared only if they differ, because a page has room for few columns
_OF_THE_LAYOUT = ("pipeline", "processes")
Table = list[list[str]]
"""Rows of a table; the first one is the header."""


def check_installed() -> None:
    """Checks that the report's dependencies are installed.

    Raises:
        ConfigError: a package is missing; names the extra to install.
    """
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a report needs {' and '.join(missing)}: pip install 'hybridtrain[report]'"
        )


# of a page, and of the pages of version 0.2.0
_MARKS = (
    b'<meta name="generator" content="hybridtrain">',
    b":root { --back: #fff; --ink: #1c1c1c;",
)


def write_report(directories: Sequence[str | Path], path: str | Path | None = None) -> Path:
    """Writes the report of one run, or a comparison of several.

    The report is a single file that includes its scripts and opens from disk without a network.

    Args:
        directories: the directories of the runs.
        path: the file to write; None for `report.html` in the run's directory, or in the working
            directory for several runs.

    Returns:
        the path.

    Raises:
        ConfigError: Plotly or Jinja2 is missing, or the file cannot be written.
        DataError: a directory is not a run directory.
    """
    check_installed()
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    records = _with_own_names([RunRecord.read(directory) for directory in directories])
    if path is None:
        path = (records[0].directory if len(records) == 1 else Path()) / "report.html"
    source = files("hybridtrain.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    sections = [_sections(record) for record in records]
    accounts = _accounts(records)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )
    page = template.render(
        title=_title(records),
        plotly=get_plotlyjs(),
        curves=[_html(figure) for figure in charts.curves(records)],
        compared=_compared(records) if len(records) > 1 else None,
        accounts=_html(accounts) if len(records) > 1 and accounts is not None else None,
        runs=sections,
        colours=charts.RUN_COLOURS,
    )
    path = Path(path)
    check_replaceable(path, lambda head: any(mark in head for mark in _MARKS), "a report")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def _with_own_names(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the records named by the shortest path suffixes that distinguish them."""
    paths = [record.directory.resolve().parts for record in records]

    def name(path: tuple[str, ...]) -> str:
        length = 1
        while len({other for other in paths if other[-length:] == path[-length:]}) > 1:
            length += 1
        return "/".join(path[-length:])

    return [replace(record, name=name(path)) for record, path in zip(records, paths, strict=True)]


def _html(figure: Figure) -> str:
    html: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displayModeBar": False},
    )
    return html


def _title(records: Sequence[RunRecord]) -> str:
    """Returns the names of a few runs, or the common folder of many."""
    if len(records) <= 3:
        return ", ".join(record.name for record in records)
    folders = {record.directory.resolve().parent for record in records}
    return f"{len(records)} runs" + (f" of {folders.pop().name}" if len(folders) == 1 else "")


def _sections(record: RunRecord) -> dict[str, Any]:
    """Returns the sections of a report on one run.

    Raises:
        DataError: a file of the run has unexpected content.
    """
    with reading(record.directory / "timeline.json"):
        timeline = _timeline(record)
    with reading(record.directory / "summary.json"):
        return _of_summary(record, timeline)


def _timeline(record: RunRecord) -> Figure | None:
    if record.timeline is None:
        return None
    predicted, measured = record.timeline
    return charts.timeline(predicted, measured, _bytes_of(record.plan, measured))


def _of_summary(record: RunRecord, timeline: Figure | None) -> dict[str, Any]:
    """Returns the sections that come from a run's `summary.json`."""
    summary = record.summary
    figures = {}
    if (account := summary.get("account")) is not None:
        several = any(device["replica"] for device in account["devices"])
        bars = {
            f"replica {d['replica']}, " * several + f"device {d['device']}": _parts(d)
            for d in account["devices"]
        }
        bars["mean"] = account["mean"]
        title = "by device, mean over the recorded steps"
        # the figure over the steps, next to it, has the legend
        figures["account"] = charts.account(bars, title, legend=len(record.accounts) < 2)
    if len(record.accounts) > 1:
        figures["account_over_steps"] = charts.account_over_steps(record)
    if timeline is not None:
        figures["timeline"] = timeline
    last = {tag: curve[-1][1] for tag, curve in record.curves.items()}
    matrix = confusion_of(last)
    if matrix is not None and len(matrix.classes) <= MOST_CLASSES:
        figures["confusion"] = charts.confusion(matrix)
    if peaks := _peaks(summary):
        limits = {
            device: memory["total"]
            for device, memory in summary.get("device_memory", {}).items()
            if "total" in memory
        }
        figures["memory"] = charts.memory(peaks, limits)
    return {
        "name": record.name,
        "facts": _facts(record),
        "definitions": _DEFINITIONS,
        # by name: readers of a shared report do not have the directory
        "checkpoint": Path(path).name if (path := summary.get("checkpoint")) else None,
        "best": record.best,
        "advice": summary.get("advice", []),
        "figures": {name: _html(figure) for name, figure in figures.items()},
        "stages": _stage_table(record),
        "of_stages": [_html(figure) for figure in charts.stages(record)],
        "predicted": _predicted(summary),
        "warnings": record.warnings,
        "overrides": record.overrides,
        "config": record.config,
        "environment": summary.get("environment", {}),
    }


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Returns the key facts of a run, as names and values."""
    summary = record.summary
    evaluation = {
        tag.removeprefix("eval/"): curve[-1][1]
        for tag, curve in record.curves.items()
        if tag.startswith("eval/") and not is_confusion(tag)
    }
    if record.done:
        evaluation = {k: v for k, v in (summary["eval"] or {}).items() if k != "samples"}
        evaluation = {k: v for k, v in evaluation.items() if not is_confusion(f"eval/{k}")}
    loss = summary["train_loss"] if record.done else record.last("train/loss")
    facts = [("state", "done" if record.done else "not finished"), ("steps", f"{record.steps:,}")]
    facts += [("training loss", _number(loss))] if loss is not None else []
    facts += [(f"{name}, evaluation", _metric(name, value)) for name, value in evaluation.items()]
    rate = summary.get("samples_per_second") or record.last("train/samples_per_second")
    facts += [("samples per second", f"{rate:,.0f}")] if rate else []
    if record.done:
        facts.append(("median step time", _time(summary["step_ms"]["p50"])))
    if account := (summary.get("account") or {}).get("mean"):
        computing = sum(account[name] for name in COMPUTING) / (sum(account.values()) or 1)
        facts.append(("devices computing", f"{computing:.0%} of a step"))
    facts.append(("time", str(timedelta(seconds=round(record.seconds)))))
    if record.plan is not None:
        plan = record.plan
        parameters = sum(cost.parameters for cost in plan.costs)
        facts.append(("model", f"{plan.model}, {parameters:,} parameters"))
        facts.append(
            (
                "pipeline",
                f"{len(plan.stages)} stages, {plan.schedule}, {plan.chunks} micro-batches",
            )
        )
    if world := summary.get("world"):
        facts.append(("processes", f"{world['processes']}, engine {world['engine']}"))
    skipped = {name: summary.get(f"{name}_steps") for name in ("skipped", "overflow", "empty")}
    facts += [(f"{name} steps", str(count)) for name, count in skipped.items() if count]
    return facts


def _compared(records: Sequence[RunRecord]) -> Table:
    """Returns one row per run, with the settings that differ and the results."""
    settings = [record.settings for record in records]
    keys = that_differ(settings)
    results = [dict(_facts(record)) for record in records]

    def differs(name: str) -> bool:
        return len({result.get(name) for result in results}) > 1

    columns = [
        name
        for name in dict.fromkeys(name for result in results for name in result)
        if name not in ("model", "time") and (name not in _OF_THE_LAYOUT or differs(name))
    ]
    return [
        ["run", *keys, *columns],
        *(
            [
                record.name,
                *(_setting(run_settings.get(key)) for key in keys),
                *(r.get(c, "") for c in columns),
            ]
            for record, run_settings, r in zip(records, settings, results, strict=True)
        ),
    ]


def _accounts(records: Sequence[RunRecord]) -> Figure | None:
    """Returns the mean time breakdowns of several runs in one figure, or None."""
    means = {
        record.name: account["mean"]
        for record in records
        if (account := record.summary.get("account")) is not None
    }
    if not means:
        return None
    return charts.account(means, "time breakdown of a step, by run", legend=True)


def _stage_table(record: RunRecord) -> Table:
    lines: Table = []
    for number, stage in enumerate(record.summary.get("stages", [])):
        layers = stage["layers"]
        lines.append(
            [
                str(number),
                f"{layers[0]} ... {layers[-1]}" if len(layers) > 1 else "".join(layers),
                str(len(layers)),
                f"{stage['parameters']:,}",
                f"{stage['forward_ms']:.3f}",
                f"{stage['backward_ms']:.3f}",
                with_unit(stage["peak_memory_bytes"]),
            ]
        )
    head = ["stage", "from ... to", "layers", "parameters", "forward, ms", "backward, ms"]
    return [[*head, "peak memory"], *lines] if lines else []


def _predicted(summary: Mapping[str, Any]) -> Table:
    """Returns the predictions made before the run next to the measurements."""
    predicted, measured = summary.get("predicted"), summary.get("measured")
    if not predicted or not measured:
        return []
    lines: Table = []

    def add(name: str, form: Any, expected: Any, actual: Any) -> None:
        if actual is not None:
            ratio = f"{actual / expected:.2f}" if expected else ""
            lines.append(
                [name, "unknown" if expected is None else form(expected), form(actual), ratio]
            )

    add("median step time", _time, predicted["step_ms"], measured["step_ms"])
    add("idle", lambda share: f"{share:.1%}", predicted["bubble"], measured["bubble"])
    memory = predicted["memory_bytes"] or [None] * len(measured["memory_bytes"])
    for device, (expected, actual) in enumerate(zip(memory, measured["memory_bytes"], strict=True)):
        add(f"memory of device {device}", with_unit, expected, actual)
    return [["", "predicted", "measured", "measured / predicted"], *lines]


def _parts(device: Mapping[str, float]) -> dict[str, float]:
    return {name: ms for name, ms in device.items() if name not in ("replica", "device")}


def _peaks(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the peak memory of each device, in bytes."""
    if memory := summary.get("device_memory"):
        return {device: peaks["allocated"] for device, peaks in memory.items()}
    measured = (summary.get("measured") or {}).get("memory_bytes") or []
    return {f"device {number}": peak for number, peak in enumerate(measured)}


def _bytes_of(plan: Plan | None, spans: Spans) -> dict[Action, int]:
    """Returns the bytes that actions send to another stage, if the plan measured them."""
    if plan is None or len(plan.stages) != 1 + max(s.action.stage for lane in spans for s in lane):
        return {}
    crossing = [stage.layers[-1].crossing_bytes if stage.layers else 0 for stage in plan.stages]
    sent = {}
    for action in (span.action for lane in spans for span in lane):
        receiver = receiver_of(action, len(plan.stages))
        if receiver is not None and (size := crossing[min(action.stage, receiver.stage)]):
            sent[action] = size
    return sent


def _setting(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _metric(name: str, value: float) -> str:
    """Formats an accuracy in percent, and other values with four digits."""
    is_share = "accuracy" in name and 0 <= value <= 1
    return f"{value:.1%}" if is_share else _number(value)


def _time(ms: float) -> str:
    """Formats milliseconds, in seconds from one second on."""
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.2f} ms"
