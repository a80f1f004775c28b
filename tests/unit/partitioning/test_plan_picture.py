"""The picture of a priced plan: what is drawn is in proportion to the numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from hybridtrain.observe import NodesPoint, draw_plan, pictures
from hybridtrain.schedule import make_schedule, simulate

MIB = 2**20
BLUE, ORANGE, RED = (0x21, 0x71, 0xB5), (0xFD, 0x8D, 0x3C), (0xCB, 0x18, 0x1D)


def drawn(devices=2, limit=100 * MIB, weights=10 * MIB):
    kinds = dict.fromkeys(pictures.MEMORY, 0) | {"activations": 40 * MIB, "state": weights}
    spans = simulate(make_schedule("1f1b", devices, 2 * devices), [1.0] * 64, [2.0] * 64)
    points = [NodesPoint(1, None), NodesPoint(2, 80.0, "4 x 2"), NodesPoint(4, 50.0, "8 x 2")]
    return draw_plan("title", points, 4, [kinds] * devices, limit, spans, "1f1b").convert("RGB")


def rows_of(image, colour, width):
    """The rows with so many pixels of a colour, or more."""
    pixels = image.load()
    counts = Counter(
        y for y in range(image.height) for x in range(image.width) if pixels[x, y] == colour
    )
    return {y: n for y, n in counts.items() if n >= width}


def test_bars_are_as_high_as_their_times_and_as_wide_as_their_bytes():
    image = drawn()
    chosen = len(rows_of(image, BLUE, 100))
    other = len(rows_of(image, (0x9E, 0xCA, 0xE1), 150))
    assert chosen / 200 == pytest.approx(50 / 80, abs=0.02)
    assert other > chosen
    orange = set(rows_of(image, ORANGE, 100).values())
    assert len(orange) == 1
    (wide,) = orange
    assert wide / 982 == pytest.approx(40 / (100 * 1.06), abs=0.01)


def test_a_limit_that_is_far_away_leaves_the_bars_their_width():
    def lines(image):
        pixels = image.load()
        columns = Counter(
            x for x in range(image.width) for y in range(image.height) if pixels[x, y] == RED
        )
        return [x for x, count in columns.items() if count > 50]

    assert lines(drawn(limit=60 * MIB))
    far = drawn(limit=10_000 * MIB)
    assert not lines(far)
    assert max(rows_of(far, ORANGE, 100).values()) > 600


@pytest.mark.parametrize("devices", [1, 8, 64])
def test_a_picture_of_many_devices_stays_of_a_size_that_can_be_looked_at(devices):
    image = drawn(devices)
    assert image.width == 1080
    assert image.height < 1600
