"""Pictures: of a step's timeline, of curves over the steps of a run, and of a priced plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from hybridtrain.schedule import Spans, bubble_fraction, length
from hybridtrain.text_table import with_unit

# by kind of action, for up to four stages that share a device; darker ones are later stages
COLOURS = {
    "F": ("#9ecae1", "#6baed6", "#4292c6", "#2171b5"),
    "B": ("#a1d99b", "#74c476", "#41ab5d", "#238b45"),
    "I": ("#fdd0a2", "#fdae6b", "#fd8d3c", "#d94801"),
    "W": ("#dadaeb", "#bcbddc", "#9e9ac8", "#6a51a3"),
}
_WORDS = {"F": "forward", "B": "backward", "I": "to the input", "W": "to the weights"}
# by kind of memory, as in `DeviceMemory`: its name and colour
MEMORY = {
    "weights": ("weights", "#2171b5"),
    "gradients": ("gradients", "#6baed6"),
    "state": ("optimizer state", "#74c476"),
    "activations": ("activations", "#fd8d3c"),
    "boundaries": ("from other stages", "#bdbdbd"),
}
# by part of an account, from the bottom of a bar: computing, then what is not
PARTS = {
    "forward": "#6baed6",
    "backward": "#74c476",
    "recompute": "#c7e9c0",
    "optimizer": "#9e9ac8",
    "bubble": "#d9d9d9",
    "imbalance": "#fdae6b",
    "messages": "#e6550d",
    "reduction": "#fa9fb5",
    "stragglers": "#c51b8a",
    "data": "#cb181d",
    "host": "#737373",
}
MOST_BARS = 60
_CURVES = ("#2171b5", "#d94801", "#238b45", "#6a51a3", "#737373")
_INK, _FAINT, _GRID, _LIMIT = "black", "#444444", "#dddddd", "#cb181d"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

_LEFT, _RIGHT = 74, 24
# of a timeline: its legend, and its panel of lanes with an axis below
_LEGEND, _TITLE, _AXIS = 52, 24, 30
_LANE, _BAR = 28, 22
_NARROWEST, _WIDEST = 1000, 4000
_ACTION = 18  # room for the label of a short action
# of a plan: lanes are lower where there are many devices
_WIDTH, _HEAD, _CHART = 1080, 30, 250
_ACROSS = _WIDTH - _LEFT - _RIGHT
_SMALLEST_LANE, _LANES = 5, 420

Curve = Sequence[tuple[int, float]]


class _Canvas:
    """A white image, and what all pictures draw on it."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), "white")
        painter = ImageDraw.Draw(self.image)
        self.line, self.rectangle, self.ellipse = painter.line, painter.rectangle, painter.ellipse
        self._painter = painter

    def text(
        self, x: float, y: float, text: str, colour: str = _INK, anchor: str = "la", size: int = 12
    ) -> float:
        """Writes `text` and returns its length."""
        font = ImageFont.load_default(size=size)
        self._painter.text((x, y), text, fill=colour, font=font, anchor=anchor)
        return self._painter.textlength(text, font=font)

    def entry(self, x: float, y: float, colour: str, text: str) -> float:
        """Draws an entry of a legend and returns where the next one begins."""
        self.rectangle((x, y, x + 14, y + 14), fill=colour)
        return x + 19 + self.text(x + 19, y, text) + 18

    def axis(self, top: float, bottom: float, unit: str, most: float, scale: float) -> None:
        """Draws an axis up to `most` at the `bottom` of bars, with a grid; `scale`: pixels of 1."""
        for tick in ticks(most):
            x = _LEFT + tick * scale
            self.line((x, top, x, bottom + 3), fill=_GRID)
            self.text(x, bottom + 5, f"{tick:g}", _FAINT, "ma")
        self.text(8, bottom + 5, unit, _FAINT)


def draw(predicted: Spans, measured: Spans, title: str = "") -> Image.Image:
    """Draws both timelines on one time scale, each with its length and share of idle time.

    The picture is as wide as the labels of the actions need, within bounds.

    Args:
        predicted: the spans of each device, in seconds.
        measured: likewise.
        title: for example the run and the step.
    """
    longest = max(length(predicted), length(measured)) or 1e-9
    durations = sorted(end - start for lane in measured for _, start, end in lane)
    short = durations[len(durations) // 4]
    wanted = longest / max(short, longest / 1e4) * _ACTION
    across = round(min(max(wanted, _NARROWEST), _WIDEST))
    panel = _panel_height(measured, _LANE)
    canvas = _Canvas(across + _LEFT + _RIGHT, _LEGEND + 2 * panel)
    _draw_legend(canvas, 0, title, measured)
    for number, (name, spans) in enumerate((("predicted", predicted), ("measured", measured))):
        text = f"{name}: {length(spans) * 1e3:.4g} ms, idle {bubble_fraction(spans):.1%}"
        _draw_lanes(canvas, _LEGEND + number * panel, text, spans, longest, across / longest)
    return canvas.image


def _panel_height(spans: Spans, lane: int) -> int:
    return _TITLE + len(spans) * lane + _AXIS


def _draw_legend(canvas: _Canvas, top: int, title: str, spans: Spans) -> None:
    """Writes the title, and what the colours of `spans` mean."""
    devices = len(spans)
    actions = {span.action for lane in spans for span in lane}
    stages = max(action.stage for action in actions) + 1
    kinds = {action.kind for action in actions}
    canvas.text(8, top + 6, title, size=14)
    x = 8.0
    for kind in (kind for kind in COLOURS if kind in kinds):
        for shade in range(min(-(-stages // devices), len(COLOURS[kind]))):
            first, end = shade * devices, min((shade + 1) * devices, stages)
            if shade + 1 == len(COLOURS[kind]):
                end = stages  # the last colour is that of all further ones
            which = f"{first}" if end == first + 1 else f"{first} to {end - 1}"
            if shade == 0:
                which = f"{_WORDS[kind]} ({kind}), stage{'s' * (end > 1)} {which}"
            x = canvas.entry(x, top + 30, COLOURS[kind][shade], which)
    if len(kinds) == 2:  # room for more
        canvas.text(x, top + 30, "number: micro-batch    white: waiting", "#666666")


def _draw_lanes(
    canvas: _Canvas,
    top: int,
    text: str,
    spans: Spans,
    longest: float,
    scale: float,
    lane_height: int = _LANE,
) -> None:
    """Draws the lanes of one timeline above its axis; `scale`: pixels of a second."""
    begin = min(lane[0].start for lane in spans)
    canvas.text(8, top + 3, text, size=14)
    bottom = top + _TITLE + len(spans) * lane_height
    canvas.axis(top + _TITLE, bottom, "ms", longest * 1e3, scale / 1e3)
    bar = lane_height * _BAR // _LANE
    every = -(-14 // lane_height)  # lanes that a line of text is as high as
    for device, lane in enumerate(spans):
        y = top + _TITLE + device * lane_height
        if device % every == 0:
            canvas.text(8, y + bar / 2, f"device {device}", anchor="lm")
        for action, start, end in lane:
            left = _LEFT + (start - begin) * scale
            # a gap of one pixel between two actions
            right = max(left + 1, _LEFT + (end - begin) * scale - 1)
            shade = min(action.stage // len(spans), len(COLOURS[action.kind]) - 1)
            canvas.rectangle((left, y, right, y + bar), fill=COLOURS[action.kind][shade])
            label = str(action.microbatch)
            if every == 1 and 7 * len(label) + 2 <= right - left:  # a digit is 7 pixels wide
                ink = "white" if shade > 1 else _INK
                canvas.text((left + right) / 2, y + bar / 2, label, ink, "mm")


def ticks(length: float) -> Iterator[float]:
    """Yields 0 and up to about ten round numbers, up to `length`."""
    rough = length / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    for number in range(int(length / step + 1e-9) + 1):
        yield round(number * step, 12)


def draw_curves(curves: Mapping[str, Curve], title: str = "") -> Image.Image:
    """Draws each curve of (step, value) on one pair of axes; values that are not finite are gaps.

    Args:
        curves: by name.
        title: above them.
    """
    width, height, top, below = 900, 320, 34, 30
    canvas = _Canvas(width, height)
    canvas.text(8, 8, title)
    points = [p for curve in curves.values() for p in curve if math.isfinite(p[1])]
    if not points:
        return canvas.image
    steps, values = [p[0] for p in points], [p[1] for p in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> tuple[float, float]:
        x = (step - first) / ((last - first) or 1)
        y = (value - low) / ((high - low) or 1)
        return _LEFT + x * (width - _LEFT - _RIGHT), height - below - y * (height - top - below)

    for part in range(5):
        value = low + (high - low) * part / 4
        y = place(first, value)[1]
        canvas.line((_LEFT, y, width - _RIGHT, y), fill=_GRID)
        canvas.text(_LEFT - 6, y, f"{value:.4g}", _FAINT, "rm")
    for step in (first, last):
        canvas.text(place(step, low)[0], height - 20, f"step {step}", _FAINT, "ma")
    across = float(width - _RIGHT)
    for number, (name, curve) in enumerate(curves.items()):
        colour = _CURVES[number % len(_CURVES)]
        line = [place(step, value) for step, value in curve if math.isfinite(value)]
        if len(line) > 1:
            canvas.line(line, fill=colour, width=2)
        for x, y in line if len(line) < 30 else ():
            canvas.ellipse((x - 2, y - 2, x + 2, y + 2), fill=colour)
        across -= canvas.text(across, 8, name, colour, "ra") + 14
    return canvas.image


def draw_accounts(
    accounts: Sequence[tuple[int, Mapping[str, float]]], title: str = ""
) -> Image.Image:
    """Draws a bar for each recorded step, divided into the parts of its time.

    Args:
        accounts: steps, and their parts in milliseconds, by name, in the order of `Account`.
        title: above them.
    """
    accounts = list(accounts)[-MOST_BARS:]
    names = [name for name in PARTS if any(parts.get(name, 0.0) > 0 for _, parts in accounts)]
    height, top, below, legend = 420, 40, 30, 200
    canvas = _Canvas(900, height)
    canvas.text(8, 10, f"{title}: milliseconds of a step, the mean of all devices", size=14)
    most = max(sum(parts.values()) for _, parts in accounts) or 1e-9
    bottom = float(height - below)
    scale = (bottom - top) / most
    for tick in ticks(most):
        y = bottom - tick * scale
        canvas.line((_LEFT, y, 900 - legend, y), fill=_GRID)
        canvas.text(_LEFT - 6, y, f"{tick:g}", _FAINT, "rm")
    column = min(80.0, (900 - legend - _LEFT) / len(accounts))
    every = -(-60 // round(column))
    for number, (step, parts) in enumerate(accounts):
        left, y = _LEFT + number * column, bottom
        for name in names:
            above = y - parts.get(name, 0.0) * scale
            canvas.rectangle((left, above, left + column * 0.9, y), fill=PARTS[name])
            y = above
        if number % every == 0:
            canvas.text(left + column * 0.45, bottom + 6, str(step), _FAINT, "ma")
    last = accounts[-1][1]
    for line, name in enumerate(reversed(names)):
        share = last.get(name, 0.0) / (sum(last.values()) or 1.0)
        text = f"{name} {share:.1%}"
        canvas.entry(900 - legend + 14, top + 22 * line, PARTS[name], text)
    return canvas.image


@dataclass(frozen=True)
class NodesPoint:
    """The fastest layout of a number of nodes.

    Attributes:
        nodes: how many.
        step_ms: of its step; None: nothing fits, or nothing uses all of them.
        layout: what is written under it.
    """

    nodes: int
    step_ms: float | None
    layout: str = ""


def draw_plan(
    title: str,
    points: Sequence[NodesPoint],
    nodes: int,
    memory: Sequence[Mapping[str, int]],
    limit: float,
    timeline: Spans,
    of_timeline: str,
) -> Image.Image:
    """Draws three panels, one under the other.

    Args:
        title: above them.
        points: the time of a step by the number of nodes.
        nodes: the number of the plan.
        memory: for each device of a pipeline its bytes by kind, those of `DeviceMemory`.
        limit: the bytes of a device that may be used.
        timeline: the predicted spans of each device, in seconds.
        of_timeline: what they are of.
    """
    lane = max(_SMALLEST_LANE, min(_LANE, _LANES // len(timeline)))
    longest = max(span.end for spans in timeline for span in spans) or 1e-9
    of_memory = _HEAD + 20 + _CHART + 60
    bottom = of_memory + _HEAD + 30 + len(memory) * lane + 40
    canvas = _Canvas(_WIDTH, bottom + _LEGEND + _panel_height(timeline, lane))
    canvas.text(8, 8, title, size=16)
    _draw_times(canvas, _HEAD + 20, points, nodes)
    _draw_memory(canvas, of_memory, memory, limit, lane)
    _draw_legend(canvas, bottom, "Predicted timeline", timeline)
    scale = _ACROSS / longest
    _draw_lanes(canvas, bottom + _LEGEND, of_timeline, timeline, longest, scale, lane)
    return canvas.image


def in_ms(step_ms: float) -> str:
    """Returns a time with four digits, or all before the point."""
    return f"{step_ms:,.0f}" if step_ms >= 1000 else f"{step_ms:.4g}"


def _draw_times(canvas: _Canvas, top: int, points: Sequence[NodesPoint], nodes: int) -> None:
    """Draws a bar for each number of nodes, with its time and its layout."""
    canvas.text(8, top, "Step time in ms, by nodes; below: replicas x devices of each", size=14)
    told = "red line: that of the fewest nodes, in proportion"
    canvas.text(_WIDTH - _RIGHT, top + 2, told, _FAINT, "ra")
    known = [(point.nodes, ms) for point in points if (ms := point.step_ms) is not None]
    highest, bottom = max(ms for _, ms in known), top + _CHART
    scale = (_CHART - 50) / highest
    for tick in ticks(highest):
        y = bottom - tick * scale
        canvas.line((_LEFT, y, _WIDTH - _RIGHT, y), fill=_GRID)
        canvas.text(_LEFT - 6, y, f"{tick:g}", _FAINT, "rm")
    column = _ACROSS / len(points)
    for number, point in enumerate(points):
        left = _LEFT + number * column
        middle = left + column / 2
        name = f"{point.nodes} node{'s' * (point.nodes != 1)}"
        canvas.text(middle, bottom + 6, name, anchor="ma")
        canvas.text(middle, bottom + 22, point.layout, _FAINT, "ma", size=11)
        if point.step_ms is None:
            canvas.text(middle, bottom - 8, "no plan", _LIMIT, "ms")
            continue
        y = bottom - point.step_ms * scale
        colour = "#2171b5" if point.nodes == nodes else "#9ecae1"
        canvas.rectangle((left + column * 0.2, y, left + column * 0.8, bottom), fill=colour)
        ideal = bottom - known[0][1] * known[0][0] / point.nodes * scale
        ends = (left + column * 0.12, left + column * 0.88)
        canvas.line((ends[0], ideal, ends[1], ideal), fill=_LIMIT, width=2)
        canvas.text(middle, min(y, ideal) - 6, in_ms(point.step_ms), anchor="ms")


def _draw_memory(
    canvas: _Canvas, top: int, memory: Sequence[Mapping[str, int]], limit: float, lane: int
) -> None:
    """Draws a bar for each device, of its kinds of memory, below what may be used."""
    fullest = max(sum(kinds.values()) for kinds in memory)
    most = max(limit, fullest) if limit <= 4 * fullest else fullest  # far away, it is only written
    unit, name = next((u for u in _UNITS if most >= u[0]), _UNITS[-1])
    canvas.text(8, top, f"Memory of each device of a pipeline, in {name}", size=14)
    told = f"limit: {with_unit(round(limit))}"
    canvas.text(_WIDTH - _RIGHT, top + 2, told, _LIMIT, "ra")
    x: float = _LEFT
    for kind, (words, colour) in MEMORY.items():
        if any(kinds[kind] for kinds in memory):
            x = canvas.entry(x, top + 26, colour, words)
    top += _HEAD + 20
    scale = _ACROSS / (most * 1.06)  # room for a number
    bottom = top + len(memory) * lane
    canvas.axis(top, bottom, name, most / unit, unit * scale)
    every = -(-14 // lane)
    for device, kinds in enumerate(memory):
        y, x = top + device * lane, float(_LEFT)
        high = max(lane - 6, lane * 3 // 4)
        if device % every == 0:
            canvas.text(8, y + high / 2, f"device {device}", anchor="lm")
        for kind, (_, colour) in MEMORY.items():
            end = x + kinds[kind] * scale
            if kinds[kind]:
                canvas.rectangle((x, y, end, y + high), fill=colour)
            x = end
        if every == 1:
            canvas.text(x + 5, y + high / 2, f"{sum(kinds.values()) / unit:.3g}", anchor="lm")
    if limit <= most:
        x = _LEFT + limit * scale
        canvas.line((x, top - 2, x, bottom + 3), fill=_LIMIT, width=2)
