"""Streams to the terminal, or to whatever stdout and stderr lead to."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO


class LastingStream:
    """A text stream that goes silent when nobody reads it any more, and does not raise.

    A run whose terminal is closed, or whose `| head` has seen enough, trains on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.broken = False

    def write(self, text: str) -> int:
        """Writes `text`, or nothing if the stream is broken."""
        if not self.broken:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: it is closed
                if isinstance(error, UnicodeError):
                    raise
                self.broken = True
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if it is not broken."""
        if not self.broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self.broken = True

    def isatty(self) -> bool:
        """Returns whether a terminal is there."""
        return not self.broken and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stream":  # asked for by copy, of an empty object
            raise AttributeError(f"'LastingStream' object has no attribute {name!r}")
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Makes `LastingStream`s of stdout and stderr, until the end of the block."""
    before = sys.stdout, sys.stderr
    streams = LastingStream(before[0]), LastingStream(before[1])
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()
            if stream.broken:
                _lead_nowhere(stream)


def print_result(values: Mapping[str, Any]) -> None:
    """Prints one line of JSON to stdout, where nothing else is printed; NaN is `null`."""
    print(json_line(values), flush=True)


def json_line(values: Mapping[str, Any]) -> str:
    """Returns one line of JSON; see `finite`."""
    return json.dumps(finite(values), allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """Returns a tree with None for NaN and the infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lead_nowhere(stream: LastingStream) -> None:
    """Lets the interpreter flush at its exit what could not be written, without an error."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # there is no file below it
