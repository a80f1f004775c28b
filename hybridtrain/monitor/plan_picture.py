"""A picture of a priced plan: time against nodes, memory by device, and the predicted timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from hybridtrain.monitor.timeline_picture import LEFT, RIGHT, TimelinePainter, ticks
from hybridtrain.schedule import Spans
from hybridtrain.text_table import with_unit

_WIDTH = 1080
_ACROSS = _WIDTH - LEFT - RIGHT
_HEAD, _CHART = 30, 250
_LANE, _SMALLEST_LANE, _LANES = 28, 5, 420
_INK, _FAINT, _GRID, _LIMIT = "black", "#555555", "#dddddd", "#cb181d"
_BAR, _CHOSEN = "#9ecae1", "#2171b5"
_KINDS = {
    "weights": "#2171b5",
    "gradients": "#6baed6",
    "state": "#74c476",
    "activations": "#fd8d3c",
    "boundaries": "#bdbdbd",
}
_WORDS = {"state": "optimizer state", "boundaries": "from other stages"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


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
    memory_lane, lane = _lane(len(memory)), _lane(len(timeline))
    longest = max(span.end for spans in timeline for span in spans) or 1e-9
    heights = (_HEAD + 20, _CHART + 60, _HEAD + 30 + len(memory) * memory_lane + 40)
    top = sum(heights)
    probe = TimelinePainter(ImageDraw.Draw(Image.new("RGB", (1, 1))), 1.0, len(timeline), lane)
    image = Image.new("RGB", (_WIDTH, top + 52 + probe.panel_height), "white")
    painter = ImageDraw.Draw(image)
    picture = _Painter(painter)
    picture.text(8, 8, title, size=16)
    picture.times(heights[0], points, nodes)
    picture.memory(heights[0] + heights[1], memory, limit, memory_lane)
    lanes = TimelinePainter(painter, _ACROSS / longest, len(timeline), lane)
    lanes.legend("Predicted timeline", timeline, top)
    lanes.panel(top + 52, of_timeline, timeline, longest)
    return image


def in_ms(step_ms: float) -> str:
    """Returns a time with four digits, or all before the point."""
    return f"{step_ms:,.0f}" if step_ms >= 1000 else f"{step_ms:.4g}"


def _lane(devices: int) -> int:
    """Returns the height of a device's lane, lower where there are many."""
    return max(_SMALLEST_LANE, min(_LANE, _LANES // devices))


class _Painter:
    """Draws the charts of a plan."""

    def __init__(self, painter: ImageDraw.ImageDraw) -> None:
        self._painter = painter

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = _INK,
        anchor: str = "la",
        size: float = 12,
    ) -> float:
        """Writes `text` and returns its length."""
        font = ImageFont.load_default(size=size)
        self._painter.text((x, y), text, fill=colour, font=font, anchor=anchor)
        return self._painter.textlength(text, font=font)

    def times(self, top: int, points: Sequence[NodesPoint], nodes: int) -> None:
        """Draws a bar for each number of nodes, with its time and its layout."""
        self.text(8, top, "Step time in ms, by nodes; below: replicas x devices of each", size=14)
        known = [(point.nodes, ms) for point in points if (ms := point.step_ms) is not None]
        highest = max(ms for _, ms in known)
        bottom = top + _CHART
        scale = (_CHART - 50) / highest
        for tick in ticks(highest):
            y = bottom - tick * scale
            self._painter.line((LEFT, y, _WIDTH - RIGHT, y), fill=_GRID)
            self.text(LEFT - 6, y, f"{tick:g}", _FAINT, "rm")
        column = _ACROSS / len(points)
        for number, point in enumerate(points):
            left, middle = LEFT + number * column, LEFT + (number + 0.5) * column
            name = f"{point.nodes} node{'s' * (point.nodes != 1)}"
            self.text(middle, bottom + 6, name, anchor="ma")
            self.text(middle, bottom + 22, point.layout, _FAINT, "ma", size=11)
            if point.step_ms is None:
                self.text(middle, bottom - 8, "no plan", _LIMIT, "ms")
                continue
            y = bottom - point.step_ms * scale
            colour = _CHOSEN if point.nodes == nodes else _BAR
            self._painter.rectangle((left + column * 0.2, y, left + column * 0.8, bottom), colour)
            first = known[0]
            ideal = bottom - first[1] * first[0] / point.nodes * scale
            ends = (left + column * 0.12, left + column * 0.88)
            self._painter.line((ends[0], ideal, ends[1], ideal), fill=_LIMIT, width=2)
            self.text(middle, min(y, ideal) - 6, in_ms(point.step_ms), anchor="ms")
        told = "red line: that of the fewest nodes, in proportion"
        self.text(_WIDTH - RIGHT, top + 2, told, _FAINT, "ra")

    def memory(
        self, top: int, memory: Sequence[Mapping[str, int]], limit: float, lane: int
    ) -> None:
        """Draws a bar for each device, of its kinds of memory, below what may be used."""
        most = max(limit, *(sum(kinds.values()) for kinds in memory))
        if limit > 4 * max(sum(kinds.values()) for kinds in memory):  # far away, and written
            most = max(sum(kinds.values()) for kinds in memory)
        unit, name = next((u for u in _UNITS if most >= u[0]), _UNITS[-1])
        head = f"Memory of each device of a pipeline, in {name}"
        self.text(8, top, head, size=14)
        self.text(_WIDTH - RIGHT, top + 2, f"limit: {with_unit(round(limit))}", _LIMIT, "ra")
        x: float = LEFT
        for kind, colour in _KINDS.items():
            if any(kinds[kind] for kinds in memory):
                self._painter.rectangle((x, top + 26, x + 14, top + 40), fill=colour)
                x += 19 + self.text(x + 19, top + 26, _WORDS.get(kind, kind)) + 18
        top += _HEAD + 20
        scale = _ACROSS / (most * 1.06)  # room for a number
        bottom = top + len(memory) * lane
        for tick in ticks(most / unit):
            x = LEFT + tick * unit * scale
            self._painter.line((x, top, x, bottom + 3), fill=_GRID)
            self.text(x, bottom + 5, f"{tick:g}", _FAINT, "ma")
        self.text(8, bottom + 5, name, _FAINT)
        every = -(-14 // lane)
        for device, kinds in enumerate(memory):
            y, x = top + device * lane, float(LEFT)
            high = max(lane - 6, lane * 3 // 4)
            if device % every == 0:
                self.text(8, y + high / 2, f"device {device}", anchor="lm")
            for kind, colour in _KINDS.items():
                end = x + kinds[kind] * scale
                if kinds[kind]:
                    self._painter.rectangle((x, y, end, y + high), fill=colour)
                x = end
            if every == 1:
                self.text(x + 5, y + high / 2, f"{sum(kinds.values()) / unit:.3g}", anchor="lm")
        if limit <= most:
            x = LEFT + limit * scale
            self._painter.line((x, top - 2, x, bottom + 3), fill=_LIMIT, width=2)
