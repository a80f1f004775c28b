"""Pictures of a step's timeline, of curves over the steps of a run, and of a plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from hybridtrain._base.text_table import with_unit
from hybridtrain.observe.confusion import Confusion
from hybridtrain.schedule import (
    Spans,
    WaitFor,
    bubble_fraction,
    copies_of,
    critical_path,
    length,
    waits,
    window,
)

# by action kind, for up to four stages that share a device; later stages are darker. Hue and
# brightness both differ, so the colours work with red-green colour blindness
COLOURS = {
    "F": ("#9ecae1", "#6baed6", "#4292c6", "#2171b5"),
    "B": ("#fdd0a2", "#fdae6b", "#fd8d3c", "#d94801"),
    "I": ("#fa9fb5", "#f768a1", "#dd3497", "#ae017e"),
    "W": ("#fff7bc", "#fee391", "#fec44f", "#ec9d14"),
}
_WORDS = {"F": "forward", "B": "backward", "I": "to the input", "W": "to the weights"}
# by the direction of a copy, see `CopySpan.back`: name and colour
COPIES = {False: ("copy to the host", "#bcbddc"), True: ("copy back", "#a1d99b")}
# by kind of memory, as in `DeviceMemory`: name and colour
MEMORY = {
    "weights": ("weights", "#2171b5"),
    "gradients": ("gradients", "#6baed6"),
    "state": ("optimizer state", "#74c476"),
    "activations": ("activations", "#fd8d3c"),
    "boundaries": ("from other stages", "#bdbdbd"),
    "temporaries": ("temporary", "#e7cb94"),
    "libraries": ("libraries", "#c49c94"),
}
# by part of the time breakdown, from the bottom of a bar: computing first, then waiting
PARTS = {
    "forward": "#6baed6",
    "backward": "#fd8d3c",
    "recompute": "#fdd0a2",
    "optimizer": "#9e9ac8",
    "bubble": "#d9d9d9",
    "imbalance": "#969696",
    "messages": "#41ab5d",
    "reduction": "#c7e9c0",
    "stragglers": "#00441b",
    "data": "#f0e442",
    "host": "#525252",
}
# by what a device waits for: label, colour, and the distance of the hatching's lines in pixels
WAITS: dict[WaitFor, tuple[str, str, int]] = {
    "stage": ("waits for another stage", "#bdbdbd", 8),
    "message": ("for a message", "#41ab5d", 6),
    "host": ("for the host", "#525252", 4),
}
CRITICAL = "#cb181d"  # the border of actions on the critical path
MOST_BARS = 60
_CURVES = ("#2171b5", "#d94801", "#238b45", "#6a51a3", "#737373")
_INK, _FAINT, _GRID, _LIMIT = "black", "#444444", "#dddddd", "#cb181d"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

_LEFT, _RIGHT = 74, 24
# timeline layout: the legend, and a panel of device rows with an axis below
_LEGEND, _TITLE, _AXIS = 52, 24, 30
_LANE, _BAR = 28, 22
_NARROWEST, _WIDEST = 1000, 4000
_ACTION = 18  # room for the label of a short action
# TensorBoard's image card shows every third pixel, so lines of letters are three pixels wide
_CARD, _CARD_ZOOM = 350, 3
# plan layout: rows are lower if there are many devices
_WIDTH, _HEAD, _CHART = 1080, 30, 250
_ACROSS = _WIDTH - _LEFT - _RIGHT
_SMALLEST_LANE, _LANES = 5, 420
# confusion matrix layout: cell width and height, and the maximum length of a name
_CELL, _NAME = (58, 26), 20

Curve = Sequence[tuple[int, float]]


class _Canvas:
    """A white image with the drawing primitives of all pictures.

    Args:
        width: the width in units; all coordinates are in units.
        height: the height in units.
        zoom: pixels per unit.
    """

    def __init__(self, width: float, height: float, zoom: int = 1) -> None:
        self.width = width
        self.image = Image.new("RGB", (round(width * zoom), round(height * zoom)), "white")
        self._painter = ImageDraw.Draw(self.image)
        self._zoom = zoom

    def line(self, points: Sequence[Any], fill: str, width: int = 1) -> None:
        """Draws a line through (x, y, x, y, ...) or pairs of them."""
        flat = [part for point in points for part in _pair(point)]
        self._painter.line(self._scaled(flat), fill, width * self._zoom)

    def rectangle(self, box: Sequence[float], fill: str) -> None:
        """Fills (left, top, right, bottom)."""
        self._painter.rectangle(self._scaled(box), fill)

    def outline(self, box: Sequence[float], colour: str) -> None:
        """Draws the border of a box, two units wide."""
        self._painter.rectangle(self._scaled(box), outline=colour, width=2 * self._zoom)

    def dot(self, x: float, y: float, fill: str) -> None:
        """Draws a small disc."""
        self._painter.ellipse(self._scaled((x - 2, y - 2, x + 2, y + 2)), fill)

    def hatch(self, box: Sequence[float], colour: str, every: float) -> None:
        """Draws slanted lines into a box."""
        left, top, right, bottom = box
        x = left - (bottom - top)
        while x < right:
            # from the lower to the upper edge, within the box
            begin, end = max(left, x), min(right, x + bottom - top)
            self.line((begin, bottom - (begin - x), end, bottom - (end - x)), colour)
            x += every

    def text(
        self, x: float, y: float, text: str, colour: str = _INK, anchor: str = "la", size: int = 12
    ) -> float:
        """Writes `text` and returns its length."""
        font = ImageFont.load_default(size=size * self._zoom)
        place = self._scaled((x, y))
        self._painter.text((place[0], place[1]), text, fill=colour, font=font, anchor=anchor)
        return self._painter.textlength(text, font=font) / self._zoom

    def entry(self, x: float, y: float, colour: str, text: str) -> float:
        """Draws a legend entry and returns the x position of the next one."""
        self.rectangle((x, y, x + 14, y + 14), fill=colour)
        return x + 19 + self.text(x + 19, y, text) + 18

    def axis(self, top: float, bottom: float, unit: str, most: float, scale: float) -> None:
        """Draws an axis from 0 to `most` at the `bottom` of bars; `scale` is in units per 1."""
        for tick in ticks(most):
            x = _LEFT + tick * scale
            self.line((x, top, x, bottom + 3), fill=_GRID)
            self.text(x, bottom + 5, f"{tick:g}", _FAINT, "ma")
        self.text(8, bottom + 5, unit, _FAINT)

    def _scaled(self, numbers: Sequence[float]) -> list[float]:
        return [number * self._zoom for number in numbers]


def _pair(point: float | Sequence[float]) -> Sequence[float]:
    return point if isinstance(point, Sequence) else (point,)


def draw(predicted: Spans, measured: Spans, title: str = "", card: bool = False) -> Image.Image:
    """Draws the predicted timeline of a step above the measured one.

    See `draw_timelines`.
    """
    timelines = {"predicted": predicted, "measured": measured}
    return draw_timelines(timelines, title, marked=("measured",), card=card)


def draw_timelines(
    timelines: Mapping[str, Spans],
    title: str = "",
    marked: Collection[str] = (),
    card: bool = False,
) -> Image.Image:
    """Draws timelines on a common time scale, each with its length and bubble fraction.

    Args:
        timelines: the spans of each device in seconds, by name; all with the same number of
            devices.
        title: the title, for example the run and the step.
        marked: the timelines in which waiting is hatched by cause, and actions on the critical path
            have a red border (`critical_path`).
        card: draw a narrow picture with large letters; otherwise the labels of the actions
            determine the width, within bounds.
    """
    longest = max(map(length, timelines.values())) or 1e-9
    last = [*timelines.values()][-1]
    durations = sorted(end - start for lane in last for _, start, end in lane)
    short = durations[len(durations) // 4]
    wanted = longest / max(short, longest / 1e4) * _ACTION
    across = round(min(max(wanted, _NARROWEST), _WIDEST))
    if card:
        across = _CARD - _LEFT - _RIGHT
    width = across + _LEFT + _RIGHT
    of_all = [
        entry for name, spans in timelines.items() for entry in _entries(spans, name in marked)
    ]
    entries = list(dict.fromkeys(of_all))
    legend = _legend_height(entries, width)
    panel = _panel_height(last, _LANE)
    canvas = _Canvas(width, legend + len(timelines) * panel, zoom=_CARD_ZOOM if card else 1)
    _draw_legend(canvas, 0, title, entries)
    for number, (name, spans) in enumerate(timelines.items()):
        text = f"{name}: {length(spans) * 1e3:.4g} ms, {bubble_fraction(spans):.1%} idle"
        top = legend + number * panel
        _draw_lanes(canvas, top, text, spans, longest, across / longest, marks=name in marked)
    return canvas.image


def _rows(spans: Spans) -> int:
    """Returns the number of rows: one for the actions of a device, and one for its copies."""
    return len(spans) * (2 if copies_of(spans) else 1)


def _panel_height(spans: Spans, lane: int) -> int:
    return _TITLE + _rows(spans) * lane + _AXIS


class _Entry(NamedTuple):
    """An entry of a timeline's legend; `every` is the hatching distance, None for a filled box."""

    text: str
    colour: str
    every: int | None = None

    @property
    def across(self) -> float:
        """The width, including the space after it."""
        return 19 + ImageFont.load_default(size=12).getlength(self.text) + 18


def _entries(spans: Spans, marks: bool = True) -> list[_Entry]:
    """Returns the legend of the colours and hatching of `spans`."""
    devices = len(spans)
    actions = {span.action for lane in spans for span in lane}
    stages = max(action.stage for action in actions) + 1
    kinds = {action.kind for action in actions}
    entries = []
    for kind in (kind for kind in COLOURS if kind in kinds):
        for shade in range(min(-(-stages // devices), len(COLOURS[kind]))):
            first, end = shade * devices, min((shade + 1) * devices, stages)
            if shade + 1 == len(COLOURS[kind]):
                end = stages  # all further stages have the last colour
            which = f"{first}" if end == first + 1 else f"{first} to {end - 1}"
            if shade == 0:
                which = f"{_WORDS[kind]} ({kind}), stage{'s' * (end > 1)} {which}"
            entries.append(_Entry(which, COLOURS[kind][shade]))
    if copies_of(spans):
        entries += [_Entry(*words_and_colour) for words_and_colour in COPIES.values()]
    if marks:
        reasons = {wait.reason for wait in waits(spans)}
        entries += [_Entry(*WAITS[reason]) for reason in WAITS if reason in reasons]
        entries.append(_Entry("critical path", CRITICAL, 0))
    return entries


def _places(entries: Sequence[_Entry], width: float) -> list[tuple[float, int]]:
    """Returns the x position and line of each legend entry."""
    places, x, line = [], 8.0, 0
    for entry in entries:
        if x > 8 and x + entry.across > width:
            x, line = 8.0, line + 1
        places.append((x, line))
        x += entry.across
    return places


def _legend_height(entries: Sequence[_Entry], width: float) -> int:
    return _LEGEND + 20 * _places(entries, width)[-1][1]


def _draw_legend(canvas: _Canvas, top: int, title: str, entries: Sequence[_Entry]) -> None:
    """Draws the title, and the legend in as many lines as it needs."""
    canvas.text(8, top + 6, title, size=14)
    for entry, (x, line) in zip(entries, _places(entries, canvas.width), strict=True):
        y = top + 30 + 20 * line
        box = (x, y, x + 14, y + 14)
        if entry.every is None:
            canvas.rectangle(box, entry.colour)
        elif entry.every:
            canvas.hatch(box, entry.colour, entry.every)
        else:
            canvas.outline(box, entry.colour)
        canvas.text(x + 19, y, entry.text)


def _draw_lanes(
    canvas: _Canvas,
    top: int,
    text: str,
    spans: Spans,
    longest: float,
    scale: float,
    lane_height: int = _LANE,
    marks: bool = False,
) -> None:
    """Draws the device rows of one timeline above its axis.

    Args:
        canvas: the canvas to draw on.
        top: the top of the panel.
        text: the text above the rows.
        spans: the spans, in seconds.
        longest: the end of the axis, in seconds.
        scale: units per second.
        lane_height: the height of a device's row.
        marks: whether to draw causes of waiting and the critical path.
    """
    begin = window(spans)[0]
    canvas.text(8, top + 3, text, size=14)
    bottom = top + _TITLE + _rows(spans) * lane_height
    per_device = _rows(spans) // len(spans)
    canvas.axis(top + _TITLE, bottom, "ms", longest * 1e3, scale / 1e3)
    bar = lane_height * _BAR // _LANE
    every = -(-14 // lane_height)  # number of rows per line of text

    def box(row: int, start: float, end: float) -> tuple[float, float, float, float]:
        left, right = (_LEFT + round((time - begin) * scale) for time in (start, end))
        y = top + _TITLE + row * lane_height
        # leaves a gap of one unit between two actions; PIL includes a box's right border
        return left, y, max(left, right - 2), y + bar

    for wait in waits(spans) if marks else ():
        _, colour, between = WAITS[wait.reason]
        canvas.hatch(box(wait.device * per_device, wait.start, wait.end), colour, between)
    critical = set(critical_path(spans)) if marks else set()
    for device, lane in enumerate(spans):
        row = device * per_device
        if device % every == 0:
            y = top + _TITLE + row * lane_height + bar / 2
            canvas.text(8, y, f"device {device}", anchor="lm")
        for action, start, end in lane:
            left, y, right, below = place = box(row, start, end)
            shade = min(action.stage // len(spans), len(COLOURS[action.kind]) - 1)
            canvas.rectangle(place, COLOURS[action.kind][shade])
            if action in critical and right - left > 3:
                canvas.outline(place, CRITICAL)
            label = str(action.microbatch)
            if every == 1 and 7 * len(label) + 2 <= right - left:  # a digit is 7 units wide
                ink = "white" if shade > 1 and action.kind != "W" else _INK
                canvas.text((left + right) / 2, (y + below) / 2, label, ink, "mm")
    for device, copies in enumerate(copies_of(spans)):
        if device % every == 0:
            y = top + _TITLE + (2 * device + 1) * lane_height + bar / 2
            canvas.text(8, y, "copies", _FAINT, "lm")
        for copy in copies:  # to the host in the upper half, back in the lower one
            left, y, right, below = box(2 * device + 1, copy.start, copy.end)
            middle = (y + below) / 2
            half = (middle, below) if copy.back else (y, middle - 1)
            canvas.rectangle((left, half[0], right, half[1]), COPIES[copy.back][1])


def ticks(length: float) -> Iterator[float]:
    """Yields 0 and about ten round numbers up to `length`."""
    rough = length / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    for number in range(int(length / step + 1e-9) + 1):
        yield round(number * step, 12)


def draw_curves(curves: Mapping[str, Curve], title: str = "") -> Image.Image:
    """Draws curves of (step, value) on one pair of axes; non-finite values are gaps.

    Args:
        curves: the curves, by name.
        title: the title.
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
            canvas.dot(x, y, colour)
        across -= canvas.text(across, 8, name, colour, "ra") + 14
    return canvas.image


def draw_accounts(
    accounts: Sequence[tuple[int, Mapping[str, float]]], title: str = "", card: bool = False
) -> Image.Image:
    """Draws a bar for each recorded step, divided into its time breakdown.

    Args:
        accounts: pairs of a step and its parts in milliseconds, by name, in the order of `Account`.
        title: the title.
        card: draw a narrow picture with large letters.
    """
    accounts = list(accounts)[-MOST_BARS:]
    names = [name for name in PARTS if any(parts.get(name, 0.0) > 0 for _, parts in accounts)]
    width, height, legend, zoom = (_CARD, 280, 116, _CARD_ZOOM) if card else (900, 420, 200, 1)
    top, below, axis = 56, 30, 36
    canvas = _Canvas(width, height, zoom)
    canvas.text(8, 8, title, size=14)
    caption = f"ms per step, mean over devices; percent for step {accounts[-1][0]}"
    canvas.text(8, 30, caption, _FAINT)
    most = max(sum(parts.values()) for _, parts in accounts) or 1e-9
    bottom = float(height - below)
    scale = (bottom - top) / most
    for tick in ticks(most):
        y = bottom - tick * scale
        canvas.line((axis, y, width - legend, y), fill=_GRID)
        canvas.text(axis - 6, y, f"{tick:g}", _FAINT, "rm")
    column = min(80.0, (width - legend - axis) / len(accounts))
    every = math.ceil((40 if card else 60) / column)
    for number, (step, parts) in enumerate(accounts):
        left, y = axis + number * column, bottom
        right = left + column * (0.9 if column > 20 else 1)  # small gaps would be uneven
        for name in names:
            above = y - parts.get(name, 0.0) * scale
            canvas.rectangle((left, above, right, y), fill=PARTS[name])
            y = above
        if number % every == 0:
            canvas.text(left + column * 0.45, bottom + 6, str(step), _FAINT, "ma")
    last = accounts[-1][1]
    for line, name in enumerate(reversed(names)):
        share = last.get(name, 0.0) / (sum(last.values()) or 1.0)
        text = f"{name} {share:.0%}"
        canvas.entry(width - legend + 10, top + (19 if card else 22) * line, PARTS[name], text)
    return canvas.image


@dataclass(frozen=True)
class NodesPoint:
    """The fastest layout for a number of nodes.

    Attributes:
        nodes: the number of nodes.
        step_ms: the step time; None if no layout fits or uses all nodes.
        layout: the label under the bar.
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
    """Draws step times, memory and the timeline of a plan, one below the other.

    Args:
        title: the title.
        points: the step time by number of nodes.
        nodes: the number of nodes in the plan.
        memory: for each device of a pipeline, the bytes by kind, as in `DeviceMemory`.
        limit: the usable bytes of a device.
        timeline: the predicted spans of each device, in seconds.
        of_timeline: a description of the timeline.
    """
    lane = max(_SMALLEST_LANE, min(_LANE, _LANES // _rows(timeline)))
    longest = max(span.end for spans in timeline for span in spans) or 1e-9
    of_memory = _HEAD + 20 + _CHART + 60
    bottom = of_memory + _HEAD + 30 + len(memory) * lane + 40
    entries = _entries(timeline, marks=False)
    legend = _legend_height(entries, _WIDTH)
    canvas = _Canvas(_WIDTH, bottom + legend + _panel_height(timeline, lane))
    canvas.text(8, 8, title, size=16)
    _draw_times(canvas, _HEAD + 20, points, nodes)
    _draw_memory(canvas, of_memory, memory, limit, lane)
    _draw_legend(canvas, bottom, "Predicted timeline", entries)
    scale = _ACROSS / longest
    _draw_lanes(canvas, bottom + legend, of_timeline, timeline, longest, scale, lane)
    return canvas.image


def draw_confusion(confusion: Confusion, title: str = "") -> Image.Image:
    """Draws a confusion matrix with one row per true class and one column per predicted class.

    A cell's darkness is its share of the row's samples.
    """
    classes, counts = confusion
    names = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in classes]
    left = 30 + 7 * max(map(len, names))
    width, height = left + _CELL[0] * len(names) + 20, 70 + _CELL[1] * len(names)
    canvas = _Canvas(max(width, 320), height)
    canvas.text(8, 6, title, size=14)
    canvas.text(8, 28, "rows: true class; columns: predicted class", _FAINT)
    for number, (name, line) in enumerate(zip(names, counts, strict=True)):
        top = 64 + number * _CELL[1]
        canvas.text(left + (number + 0.5) * _CELL[0], 50, name[:8], _FAINT, "ma", size=11)
        canvas.text(left - 8, top + _CELL[1] / 2, name, anchor="rm")
        total = sum(line) or 1.0
        for column, count in enumerate(line):
            x, share = left + column * _CELL[0], count / total
            red, green, blue = (
                round(255 + (dark - 255) * share)
                for dark in (33, 113, 181)  # index into COLOURS
            )
            box = (x, top, x + _CELL[0] - 1, top + _CELL[1] - 1)
            canvas.rectangle(box, fill=f"#{red:02x}{green:02x}{blue:02x}")
            colour = "white" if share > 0.5 else _INK
            middle = x + _CELL[0] / 2, top + _CELL[1] / 2
            canvas.text(*middle, f"{count:g}" if count else "", colour, "mm")
    return canvas.image


def in_ms(step_ms: float) -> str:
    """Formats a time with four digits, or with all digits before the point."""
    return f"{step_ms:,.0f}" if step_ms >= 1000 else f"{step_ms:.4g}"


def _draw_times(canvas: _Canvas, top: int, points: Sequence[NodesPoint], nodes: int) -> None:
    """Draws a bar for each number of nodes, with step time and layout."""
    canvas.text(8, top, "Step time in ms by nodes; below: replicas x devices per replica", size=14)
    caption = "red line: linear scaling from the fewest nodes"
    canvas.text(_WIDTH - _RIGHT, top + 2, caption, _FAINT, "ra")
    measured = [(point.nodes, ms) for point in points if (ms := point.step_ms) is not None]
    highest, bottom = max(ms for _, ms in measured), top + _CHART
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
        ideal = bottom - measured[0][1] * measured[0][0] / point.nodes * scale
        ends = (left + column * 0.12, left + column * 0.88)
        canvas.line((ends[0], ideal, ends[1], ideal), fill=_LIMIT, width=2)
        canvas.text(middle, min(y, ideal) - 6, in_ms(point.step_ms), anchor="ms")


def _draw_memory(
    canvas: _Canvas, top: int, memory: Sequence[Mapping[str, int]], limit: float, lane: int
) -> None:
    """Draws a bar per device, divided into kinds of memory, with a line at the limit."""
    fullest = max(sum(kinds.values()) for kinds in memory)
    # a limit far above the bars is only a label
    most = max(limit, fullest) if limit <= 4 * fullest else fullest
    unit, name = next((u for u in _UNITS if most >= u[0]), _UNITS[-1])
    canvas.text(8, top, f"Memory per device of a pipeline, in {name}", size=14)
    caption = f"limit: {with_unit(round(limit))}"
    canvas.text(_WIDTH - _RIGHT, top + 2, caption, _LIMIT, "ra")
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
