"""A picture of curves over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

_COLOURS = ("#2171b5", "#d94801", "#238b45", "#6a51a3", "#737373")
_WIDTH, _HEIGHT = 900, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 24, 34, 30

Curve = Sequence[tuple[int, float]]


def draw_curves(curves: Mapping[str, Curve], title: str = "") -> Image.Image:
    """Draws each curve of (step, value) on one pair of axes; values that are not finite are gaps.

    Args:
        curves: by name.
        title: above them.
    """
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    painter, font = ImageDraw.Draw(image), ImageFont.load_default(size=12)
    points = [p for curve in curves.values() for p in curve if math.isfinite(p[1])]
    painter.text((8, 8), title, fill="black", font=font)
    if not points:
        return image
    steps, values = [p[0] for p in points], [p[1] for p in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> tuple[float, float]:
        x = (step - first) / ((last - first) or 1)
        y = (value - low) / ((high - low) or 1)
        return (
            _LEFT + x * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM),
        )

    for part in range(5):
        value = low + (high - low) * part / 4
        y = place(first, value)[1]
        painter.line((_LEFT, y, _WIDTH - _RIGHT, y), fill="#dddddd")
        painter.text((_LEFT - 6, y), f"{value:.4g}", fill="#444444", font=font, anchor="rm")
    for step in (first, last):
        x = place(step, low)[0]
        text = f"step {step}"
        painter.text((x, _HEIGHT - 20), text, fill="#444444", font=font, anchor="ma")
    across = _WIDTH - _RIGHT
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = [place(step, value) for step, value in curve if math.isfinite(value)]
        if len(line) > 1:
            painter.line(line, fill=colour, width=2)
        for x, y in line if len(line) < 30 else ():
            painter.ellipse((x - 2, y - 2, x + 2, y + 2), fill=colour)
        across -= round(painter.textlength(name, font=font)) + 14
        painter.text((across, 8), name, fill=colour, font=font)
    return image
