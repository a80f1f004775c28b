"""Steps whose lanes have a thread each, or all have one, as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from hybridtrain.pipeline.engines import threads
from hybridtrain.pipeline.engines.threads import ThreadTrial
from hybridtrain.schedule import Schedule


class InTurn(ThreadTrial):
    """A thread for each lane, and one for all, step by step."""

    def took(self, seconds: float, schedule: Schedule) -> None:
        """Takes turns."""
        self.one_thread = not self.one_thread


class OneThread(ThreadTrial):
    """Every step in one thread."""

    def __init__(self, tells: bool) -> None:
        super().__init__(tells)
        self.one_thread = True

    def took(self, seconds: float, schedule: Schedule) -> None:
        """Stays."""


@contextmanager
def threads_of(trial: type[ThreadTrial] | None) -> Iterator[None]:
    """Gives the models that are made in the block another `ThreadTrial`; None: the usual one."""
    with nullcontext() if trial is None else patch.object(threads, "ThreadTrial", trial):
        yield
