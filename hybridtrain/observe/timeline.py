"""A step's timeline as files: a picture, and a trace for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridtrain._base.files import atomic_file, parse_json, read_file, write_atomically
from hybridtrain.loop import Run, Tracker
from hybridtrain.observe.pictures import COPIES, draw
from hybridtrain.schedule import (
    WORDS,
    Action,
    CopySpan,
    Span,
    Spans,
    SpansWithCopies,
    copies_of,
)


class TimelineFiles(Tracker):
    """Writes `timeline.json` (Chrome's trace format) and `timeline.png` to `directory`."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def on_start(self, run: Run) -> None:
        """Creates the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def on_timeline(self, run: Run, predicted: Spans, measured: Spans) -> None:
        """Writes the files, replacing the files of an earlier step."""
        step = run.step
        title = f"{self.directory.resolve().name}, step {step}"
        events = [
            *chrome_trace(measured, f"step {step}")["traceEvents"],
            *chrome_trace(predicted, f"step {step}, predicted", 1)["traceEvents"],
        ]
        trace = {"traceEvents": events, "displayTimeUnit": "ms"}
        write_atomically(self.directory / "timeline.json", json.dumps(trace))
        with atomic_file(self.directory / "timeline.png") as file:
            draw(predicted, measured, title).save(file, format="PNG")


def chrome_trace(spans: Spans, process: str, number: int = 0) -> dict[str, Any]:
    """Converts spans (in seconds) to Chrome's trace event format, one thread per device.

    The copies of a device's offloaded activations have a thread of their own.

    Args:
        spans: the spans of a step.
        process: the process name.
        number: the process ID.
    """

    def name(what: str, device: int, text: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": number, "tid": device, "args": {"name": text}}

    events = [name("process_name", 0, process)]
    for device, lane in enumerate(spans):
        events.append(name("thread_name", device, f"device {device}"))
        events += [
            {
                "name": f"{action.kind}{action.microbatch}",
                "cat": WORDS[action.kind],
                "ph": "X",
                "pid": number,
                "tid": device,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
            for action, start, end in lane
        ]
    for device, copies in enumerate(copies_of(spans)):
        thread = len(spans) + device
        events.append(name("thread_name", thread, f"device {device}, copies"))
        events += [
            {
                "name": f"{'<' if copy.back else '>'}{copy.microbatch}",
                "cat": COPIES[copy.back][0],
                "ph": "X",
                "pid": number,
                "tid": thread,
                "ts": copy.start * 1e6,
                "dur": (copy.end - copy.start) * 1e6,
                "args": {"stage": copy.stage, "microbatch": copy.microbatch},
            }
            for copy in copies
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_of_trace(path: Path) -> tuple[Spans, Spans] | None:
    """Returns the predicted and the measured spans of a `timeline.json`, in seconds.

    Returns None if the file does not exist, or has no predicted spans (an older version).
    """
    if not path.exists():
        return None
    kinds: dict[str, Any] = {words: kind for kind, words in WORDS.items()}
    directions = {words: back for back, (words, _) in COPIES.items()}
    lanes: tuple[dict[int, list[Span]], ...] = ({}, {})
    copies: tuple[dict[int, list[CopySpan]], ...] = ({}, {})
    for event in parse_json(read_file(path))["traceEvents"]:
        if event["ph"] == "X":
            number, thread, what = event["pid"], event["tid"], event["cat"]
            held = event["args"]["stage"], event["args"]["microbatch"]
            start = event["ts"] / 1e6
            end = start + event["dur"] / 1e6
            if what in directions:
                copy = CopySpan(*held, directions[what], start, end)
                copies[number].setdefault(thread, []).append(copy)
            else:
                span = Span(Action(kinds[what], *held), start, end)
                lanes[number].setdefault(thread, []).append(span)
    measured, predicted = (
        SpansWithCopies.of(
            [of_process[device] for device in sorted(of_process)],
            [of_copies.get(len(of_process) + device, []) for device in range(len(of_process))],
        )
        for of_process, of_copies in zip(lanes, copies, strict=True)
    )
    return (predicted, measured) if predicted and measured else None
