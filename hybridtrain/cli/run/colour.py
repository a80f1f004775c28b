"""Colour on a terminal: `error:` in red, and the result of a run in bold.

A non-empty NO_COLOR (https://no-color.org) or TERM=dumb turns it off. Files and pipes get plain
text.
"""

from __future__ import annotations

import os
from typing import Any

_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
_RED = "\x1b[1;31m"
_ERROR = "error:"


def takes_colour(stream: Any) -> bool:
    """Returns whether a stream is a terminal and colour is on."""
    off = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not off and stream.isatty()


def bold(text: str, stream: Any) -> str:
    """Returns `text` in bold for a terminal, and unchanged for any other stream."""
    return f"{_BOLD}{text}{_RESET}" if takes_colour(stream) else text


def with_red_error(text: str, stream: Any) -> str:
    """Returns `text` with a leading `error:` in red, for a terminal."""
    if text.startswith(_ERROR) and takes_colour(stream):
        return f"{_RED}{_ERROR}{_RESET}{text.removeprefix(_ERROR)}"
    return text
