"""A step's timeline as a Chrome trace and as a picture, predicted above measured.

`chrome_trace` is for chrome://tracing and ui.perfetto.dev, `draw` for people in a hurry.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from hybridtrain.files import atomic_file, write_atomically
from hybridtrain.monitor.base import Monitor
from hybridtrain.schedule import Spans, bubble_fraction

# forward and backward, for up to four stages that share a device; darker ones are later stages
_COLOURS = {
    "F": ("#9ecae1", "#6baed6", "#4292c6", "#2171b5"),
    "B": ("#a1d99b", "#74c476", "#41ab5d", "#238b45"),
}
_WIDTH, _LANE, _MARGIN, _TITLE = 1200, 26, 70, 22


class TimelineFiles(Monitor):
    """Keeps `timeline.json` (Chrome's trace format) and `timeline.png` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`; the files of an earlier step are replaced."""
        trace = json.dumps(chrome_trace(measured, f"step {step}"))
        write_atomically(self.directory / "timeline.json", trace)
        with atomic_file(self.directory / "timeline.png") as file:
            draw(predicted, measured).save(file, format="PNG")


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
                "cat": "forward" if action.kind == "F" else "backward",
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


def draw(predicted: Spans, measured: Spans) -> Image.Image:
    """Draws both timelines on one time scale, each with its length and bubble fraction."""
    lanes = len(measured)
    panel = _TITLE + lanes * _LANE + 10
    image = Image.new("RGB", (_WIDTH, 2 * panel + 10), "white")
    painter = ImageDraw.Draw(image)
    font = ImageFont.load_default()
    longest = max(_length(predicted), _length(measured))
    for number, (title, spans) in enumerate((("predicted", predicted), ("measured", measured))):
        top = 5 + number * panel
        begin = min(lane[0].start for lane in spans)
        scale = (_WIDTH - _MARGIN - 10) / longest
        text = f"{title}: {_length(spans) * 1e3:.1f} ms, bubble {bubble_fraction(spans):.1%}"
        painter.text((8, top + 4), text, fill="black", font=font)
        for device, lane in enumerate(spans):
            y = top + _TITLE + device * _LANE
            painter.text((8, y + 6), f"device {device}", fill="black", font=font)
            for action, start, end in lane:
                left = _MARGIN + (start - begin) * scale
                right = max(left + 1, _MARGIN + (end - begin) * scale - 1)
                colours = _COLOURS[action.kind]
                colour = colours[min(action.stage // lanes, len(colours) - 1)]
                painter.rectangle((left, y, right, y + _LANE - 4), fill=colour)
                if right - left > 14:
                    label = f"{action.kind}{action.microbatch}"
                    painter.text((left + 2, y + 6), label, fill="black", font=font)
    return image


def _length(spans: Spans) -> float:
    return max(lane[-1].end for lane in spans) - min(lane[0].start for lane in spans)
