"""Tables and sizes for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# also halves of characters, by which Python stands for bytes of a file name that are no UTF-8, and
# which no terminal takes
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Returns `text` with control characters escaped, except tabs and line ends.

    Control characters could move a terminal's cursor, set its title, or reverse its text.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str) -> str:
    """Returns `text` with all control characters escaped."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


class Block(str):
    """Lines that are already formatted for a log, so that `in_log` keeps their line breaks."""


def in_log(value: Any) -> Any:
    """Returns an argument for a log line: text without line breaks, unless it is a `Block`.

    Otherwise a name from a config or a file could forge a log line.
    """
    if isinstance(value, Block):
        return Block(printable(value))  # a record may pass several filters
    return in_one_line(str(value)) if isinstance(value, str | Path | BaseException) else value


def text_table(lines: Sequence[Sequence[str]], right_aligned: int) -> list[str]:
    """Returns lines with aligned columns; the first `right_aligned` columns are right-aligned."""
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
    """Returns a Markdown table with a header row, right-aligned except for the first column."""
    cells = [[in_one_line(cell).replace("|", "\\|") for cell in line] for line in lines]
    head, *body = ("| " + " | ".join(line) + " |" for line in cells)
    return "\n".join([head, "|---" + "|---:" * (len(lines[0]) - 1) + "|", *body])


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Formats a number with its noun, such as `1 node` or `2 nodes`."""
    return f"{number} {noun}{plural * (number != 1)}"


def with_unit(nbytes: float) -> str:
    """Formats `nbytes` in GiB, MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"
