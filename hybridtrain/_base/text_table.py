"""Tables and sizes for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns `text` with escapes in place of control characters, but for tabs and line ends.

    They could move the cursor of a terminal, set its title, or turn the order of its text.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str) -> str:
    """Returns `text` with escapes in place of all control characters."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def text_table(lines: Sequence[Sequence[str]], right_aligned: int) -> list[str]:
    """Returns lines with columns of equal width, the first `right_aligned` flush right."""
    lines = [list(map(in_one_line, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if index < right_aligned else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; the first line is its head, and numbers are flush right."""
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|---" + "|---:" * (len(lines[0]) - 1) + "|", *body])


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Returns a number with its noun, such as `1 node` or `2 nodes`."""
    return f"{number} {noun}{plural * (number != 1)}"


def with_unit(nbytes: float) -> str:
    """Returns `nbytes` in GiB, MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"
