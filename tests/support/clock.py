"""A clock that stands still until a test moves it."""

from __future__ import annotations


class Clock:
    """Returns `now`, in seconds, when it is called, as `time.monotonic` does."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
