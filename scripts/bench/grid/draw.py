"""Heat maps of the grid: one picture for each number of devices.

rows       batch per device, in a block for each number of processes
columns    chunks
colour     samples per second, from 0 to the most of the picture
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from scripts.bench.grid.results import ERROR, MEMORY, TIMEOUT, Outcome, rounded

MARKS = {MEMORY: "OOM", TIMEOUT: "timeout", ERROR: "error"}

# viridis, at even distances
_COLOURS = (
    *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141)),
    *((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37)),
)
_WIDTH, _HEIGHT = 92, 40  # of a cell
_LEFT, _TOP, _RIGHT, _BOTTOM = 210, 96, 130, 100
_BLOCK = 26  # above each block, for its name
_BEST = "#d62728"
_GREY = "#555555"


def heat_map(outcomes: Sequence[Outcome], title: str, subtitle: str) -> Image.Image:
    """Draws the cells of one number of devices.

    The fastest number of chunks of each line has a frame. Impossible cells are blank, cells that
    have failed have a mark.

    Args:
        outcomes: of all cells, those of one number of devices.
        title: says what was predicted or measured.
        subtitle: says of which model, and on what.
    """
    tasks = sorted({outcome.cell.ntasks for outcome in outcomes})
    batches = sorted({outcome.cell.batch_per_device for outcome in outcomes})
    chunks = sorted({outcome.cell.chunks for outcome in outcomes})
    wide = len(chunks) * _WIDTH
    high = len(tasks) * (_BLOCK + len(batches) * _HEIGHT)
    image = Image.new("RGB", (_LEFT + wide + _RIGHT, _TOP + high + _BOTTOM), "white")
    picture = _Picture(image, max([outcome.samples_per_s or 0 for outcome in outcomes]))
    picture.text((16, 14), title, size=20)
    for number, part in enumerate(subtitle.splitlines()):
        picture.text((16, 44 + 20 * number), part, size=14, fill=_GREY)
    for column, m in enumerate(chunks):
        x = _LEFT + (column + 0.5) * _WIDTH
        picture.text((x, _TOP + high + 18), str(m), anchor="mm")
    under = _TOP + high + 44
    picture.text((_LEFT + wide / 2, under), "chunks (micro-batches per process)", anchor="mm")
    y = _TOP
    for ntasks in tasks:
        block = [outcome for outcome in outcomes if outcome.cell.ntasks == ntasks]
        picture.text((_LEFT, y + 4), _name(block[0]), size=14)
        y += _BLOCK
        for batch in batches:
            same = [outcome for outcome in block if outcome.cell.batch_per_device == batch]
            name = f"{batch} samples per device"
            picture.text((_LEFT - 10, y + _HEIGHT / 2), name, anchor="rm")
            picture.line(y, same, chunks)
            y += _HEIGHT
    legend = "blank: impossible    frame: fastest number of chunks of its line"
    for failure in sorted({outcome.failure for outcome in outcomes if outcome.failure}):
        legend += f"    {MARKS[failure]}: {failure}"
    picture.text((16, under + 24), legend, size=13, fill=_GREY)
    if any("host_ms" in outcome.facts for outcome in outcomes):
        said = "hatched: the host's time decides; below: with twice and with half of it"
        picture.text((16, under + 42), said, size=13, fill=_GREY)
    picture.colour_bar(_LEFT + wide + 28, _TOP + _BLOCK, high - _BLOCK)
    return image


def _name(outcome: Outcome) -> str:
    """Returns the name of a block."""
    ntasks, nb_part = outcome.cell.ntasks, outcome.cell.nb_part
    if nb_part == 1:
        kind = "data parallelism alone"
    elif ntasks == 1:
        kind = "a pipeline alone"
    else:
        kind = "hybrid"
    return f"ntasks {ntasks} x nb_part {nb_part}: {kind}"


class _Picture:
    """A painter with a colour scale.

    Args:
        image: what is painted on.
        most: the value of the brightest colour.
    """

    def __init__(self, image: Image.Image, most: float) -> None:
        self._image = image
        self._painter = ImageDraw.Draw(image)
        self._most = most or 1.0

    def text(
        self,
        at: tuple[float, float],
        text: str,
        *,
        size: int = 15,
        anchor: str = "la",
        fill: str = "black",
    ) -> None:
        """Writes `text`; `anchor` as Pillow's."""
        font = ImageFont.load_default(size=size)
        self._painter.text(at, text, fill=fill, font=font, anchor=anchor)

    def line(self, y: float, outcomes: Sequence[Outcome], chunks: Sequence[int]) -> None:
        """Draws the cells of one batch size."""
        best = max(outcomes, key=lambda outcome: outcome.samples_per_s or 0)
        for outcome in outcomes:
            x = _LEFT + chunks.index(outcome.cell.chunks) * _WIDTH
            box = (x + 1, y + 1, x + _WIDTH - 2, y + _HEIGHT - 2)
            middle = x + _WIDTH / 2, y + _HEIGHT / 2
            value = outcome.samples_per_s
            if value is None:
                mark = MARKS.get(outcome.failure, "")
                self._painter.rectangle(box, outline="#e0e0e0" if not mark else "#999999")
                self.text(middle, mark, anchor="mm", size=14, fill=_GREY)
                continue
            colour = self._colour(value)
            self._painter.rectangle(box, fill=colour)
            ink = "black" if sum(colour) > 380 else "white"
            if host_ms := outcome.facts.get("host_ms"):
                self._hatch(box, tuple(round(0.85 * part) for part in colour))
                slow, fast = (rounded(outcome.cell.samples / ms * 1e3) for ms in host_ms)
                below = middle[0], middle[1] + 10
                self.text(below, f"{slow} ... {fast}", anchor="mm", size=10, fill=ink)
                middle = middle[0], middle[1] - 7
            self.text(middle, rounded(value), anchor="mm", fill=ink)
            if outcome is best and len(outcomes) > 1 and outcome.cell.nb_part > 1:
                self._painter.rectangle(box, outline=_BEST, width=3)

    def _hatch(self, box: tuple[float, float, float, float], colour: tuple[int, ...]) -> None:
        """Draws slanting lines into a cell."""
        left, top, right, bottom = box
        high = bottom - top
        for start in range(round(left - high), round(right), 8):
            from_x, to_x = max(left, start), min(right, start + high)
            ends = (from_x, bottom - (from_x - start), to_x, bottom - (to_x - start))
            self._painter.line(ends, fill=colour, width=2)

    def colour_bar(self, x: float, y: float, high: float) -> None:
        """Draws the scale, with ticks at round numbers."""
        for row in range(round(high)):
            colour = self._colour(self._most * (1 - row / high))
            self._painter.line((x, y + row, x + 20, y + row), fill=colour)
        power = 10.0 ** math.floor(math.log10(self._most / 5))
        step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= self._most / 5)
        for number in range(int(self._most / step + 1e-9) + 1):
            at = y + high * (1 - number * step / self._most)
            self._painter.line((x + 20, at, x + 25, at), fill="black")
            self.text((x + 30, at), f"{number * step:,g}", anchor="lm", size=14)
        self.text((x + 10, y - 14), "samples/s", anchor="mm", size=14)

    def _colour(self, value: float) -> tuple[int, int, int]:
        """Returns the colour of a value, between the two that are next to it."""
        at = min(max(value / self._most, 0.0), 1.0) * (len(_COLOURS) - 1)
        below = min(int(at), len(_COLOURS) - 2)
        share = at - below
        pairs = zip(_COLOURS[below], _COLOURS[below + 1], strict=True)
        red, green, blue = (round(a + share * (b - a)) for a, b in pairs)
        return red, green, blue
