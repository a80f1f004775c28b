"""A picture of a step's timeline: predicted above measured, on one axis of milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from PIL import Image, ImageDraw, ImageFont

from hybridtrain.schedule import Spans, bubble_fraction

# by kind of action, for up to four stages that share a device; darker ones are later stages
COLOURS = {
    "F": ("#9ecae1", "#6baed6", "#4292c6", "#2171b5"),
    "B": ("#a1d99b", "#74c476", "#41ab5d", "#238b45"),
    "I": ("#fdd0a2", "#fdae6b", "#fd8d3c", "#d94801"),
    "W": ("#dadaeb", "#bcbddc", "#9e9ac8", "#6a51a3"),
}
_WORDS = {"F": "forward", "B": "backward", "I": "to the input", "W": "to the weights"}
LEFT, RIGHT, _TOP = 74, 24, 52
_LANE, _BAR, _TITLE, _AXIS = 28, 22, 24, 30
_NARROWEST, _WIDEST = 1000, 4000
# room for the label of a short action
_ACTION = 18


def draw(predicted: Spans, measured: Spans, title: str = "") -> Image.Image:
    """Draws both timelines on one time scale, each with its length and bubble fraction.

    The picture is as wide as the labels of the actions need, within bounds.

    Args:
        predicted: the spans of each device, in seconds.
        measured: likewise.
        title: for example the run and the step.
    """
    lanes = len(measured)
    longest = max(_length(predicted), _length(measured)) or 1e-9
    durations = sorted(end - start for lane in measured for _, start, end in lane)
    short = durations[len(durations) // 4]
    wanted = longest / max(short, longest / 1e4) * _ACTION
    width = round(min(max(wanted, _NARROWEST), _WIDEST)) + LEFT + RIGHT
    height = _TOP + 2 * (_TITLE + lanes * _LANE + _AXIS)
    image = Image.new("RGB", (width, height), "white")
    picture = TimelinePainter(ImageDraw.Draw(image), (width - LEFT - RIGHT) / longest, lanes)
    panel = picture.panel_height
    picture.legend(title, measured)
    for number, (name, spans) in enumerate((("predicted", predicted), ("measured", measured))):
        text = f"{name}: {_length(spans) * 1e3:.4g} ms, bubble {bubble_fraction(spans):.1%}"
        picture.panel(_TOP + number * panel, text, spans, longest)
    return image


class TimelinePainter:
    """A painter with a time scale.

    Args:
        painter: of the image.
        scale: pixels of a second.
        devices: how many.
        lane: the height of a device's lane, in pixels.
    """

    def __init__(
        self, painter: ImageDraw.ImageDraw, scale: float, devices: int, lane: int = _LANE
    ) -> None:
        self._painter = painter
        self._scale = scale
        self._devices = devices
        self._lane = lane
        self._font = ImageFont.load_default(size=12)
        self._bold = ImageFont.load_default(size=14)

    @property
    def panel_height(self) -> int:
        """The height of `panel`, in pixels."""
        return _TITLE + self._devices * self._lane + _AXIS

    def legend(self, title: str, spans: Spans, top: int = 0) -> None:
        """Writes the title, and what the colours of `spans` mean."""
        actions = {span.action for lane in spans for span in lane}
        stages = max(action.stage for action in actions) + 1
        kinds = {action.kind for action in actions}
        self._painter.text((8, top + 6), title, fill="black", font=self._bold)
        x = 8.0
        shades = -(-stages // self._devices)
        for kind in (kind for kind in COLOURS if kind in kinds):
            for shade in range(min(shades, len(COLOURS[kind]))):
                first, end = shade * self._devices, min((shade + 1) * self._devices, stages)
                if shade + 1 == len(COLOURS[kind]):
                    end = stages  # the last colour is that of all further ones
                which = f"{first}" if end == first + 1 else f"{first} to {end - 1}"
                if shade == 0:
                    which = f"{_WORDS[kind]} ({kind}), stage{'s' * (end > 1)} {which}"
                x = self._entry(x, top + 30, COLOURS[kind][shade], which)
        if len(kinds) == 2:  # room for more
            note = "number: micro-batch    white: waiting"
            self._painter.text((x, top + 30), note, fill="#666666", font=self._font)

    def _entry(self, x: float, y: float, colour: str, text: str) -> float:
        self._painter.rectangle((x, y, x + 14, y + 14), fill=colour)
        self._painter.text((x + 19, y), text, fill="black", font=self._font)
        return x + 19 + self._painter.textlength(text, font=self._font) + 18

    def panel(self, top: int, text: str, spans: Spans, longest: float) -> None:
        """Draws the lanes of one timeline, above its axis."""
        begin = min(lane[0].start for lane in spans)
        bottom = top + _TITLE + self._devices * self._lane
        self._painter.text((8, top + 3), text, fill="black", font=self._bold)
        for tick in ticks(longest * 1e3):
            x = LEFT + tick / 1e3 * self._scale
            self._painter.line((x, top + _TITLE, x, bottom + 3), fill="#dddddd")
            self._painter.text((x, bottom + 5), f"{tick:g}", "#444444", self._font, anchor="ma")
        self._painter.text((8, bottom + 5), "ms", fill="#444444", font=self._font)
        for device, lane in enumerate(spans):
            y = top + _TITLE + device * self._lane
            name = f"device {device}"
            bar = self._lane * _BAR // _LANE
            every = -(-14 // self._lane)  # lanes that a line of text is as high as
            if device % every == 0:
                left_middle = 8, y + bar / 2
                self._painter.text(left_middle, name, "black", self._font, anchor="lm")
            for action, start, end in lane:
                left = LEFT + (start - begin) * self._scale
                # a gap of one pixel between two actions
                right = max(left + 1, LEFT + (end - begin) * self._scale - 1)
                colours = COLOURS[action.kind]
                shade = min(action.stage // self._devices, len(colours) - 1)
                self._painter.rectangle((left, y, right, y + bar), fill=colours[shade])
                ink = "white" if shade > 1 else "black"
                label = str(action.microbatch)
                fits = self._painter.textlength(label, font=self._font) + 2 <= right - left
                if fits and every == 1:
                    middle = (left + right) / 2, y + bar / 2
                    self._painter.text(middle, label, ink, self._font, anchor="mm")


def ticks(length: float) -> Iterator[float]:
    """Yields 0 and up to about ten round numbers, up to `length`."""
    rough = length / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    for number in range(int(length / step + 1e-9) + 1):
        yield round(number * step, 12)


def _length(spans: Spans) -> float:
    return max(lane[-1].end for lane in spans) - min(lane[0].start for lane in spans)
