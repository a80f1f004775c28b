"""A step's timeline as files: a picture, and a trace for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridtrain.files import atomic_file, write_atomically
from hybridtrain.monitor.base import Monitor
from hybridtrain.monitor.pictures import draw
from hybridtrain.schedule import WORDS, Spans


class TimelineFiles(Monitor):
    """Keeps `timeline.json` (Chrome's trace format) and `timeline.png` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`; the files of an earlier step are replaced."""
        title = f"{self.directory.resolve().name}, step {step}"
        trace = json.dumps(chrome_trace(measured, f"step {step}"))
        write_atomically(self.directory / "timeline.json", trace)
        with atomic_file(self.directory / "timeline.png") as file:
            draw(predicted, measured, title).save(file, format="PNG")


def chrome_trace(spans: Spans, process: str) -> dict[str, Any]:
    """Returns spans (in seconds) in Chrome's trace event format, one thread per device."""

    def name(what: str, device: int, text: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": 0, "tid": device, "args": {"name": text}}

    events = [name("process_name", 0, process)]
    for device, lane in enumerate(spans):
        events.append(name("thread_name", device, f"device {device}"))
        events += [
            {
                "name": f"{action.kind}{action.microbatch}",
                "cat": WORDS[action.kind],
                "ph": "X",
                "pid": 0,
                "tid": device,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
            for action, start, end in lane
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
