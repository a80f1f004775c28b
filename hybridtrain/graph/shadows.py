"""Stand-ins for Python builtins in the globals of traced code.

Only `engine="distributed"` needs this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hybridtrain.graph.code_names import names_used
from hybridtrain.graph.traced_graph import Untraceable, line_of


class Shadows:
    """Replaces Python builtins in the globals of the user's code while it is traced.

    `type(x)` and `hasattr(x, name)` cannot be answered by a stand-in `x` itself.
    """

    def __init__(self, functions: Mapping[str, Any], matches: bool = False) -> None:
        self._functions = functions
        self._matches = matches  # whether structural `match` statements are handled elsewhere
        self._held: list[tuple[dict[str, Any], str]] = []

    def put_into(self, frame: FrameType) -> None:
        """Makes the stand-ins visible to the function that `frame` begins to run."""
        held = frame.f_globals
        for name in names_used(frame.f_code).globals & self._functions.keys():
            if name not in held:
                held[name] = self._functions[name]
                self._held.append((held, name))
        if self._matches and names_used(frame.f_code).matches:
            place = line_of(frame, frame.f_code.co_firstlineno)
            Untraceable(
                "matches the structure of a value with a match statement", place
            )  # recorded

    @contextmanager
    def removed_at_end(self) -> Iterator[None]:
        """Removes the stand-ins from all globals at the end of the block."""
        try:
            yield
        finally:
            for held, name in self._held:
                held.pop(name, None)
            self._held.clear()
