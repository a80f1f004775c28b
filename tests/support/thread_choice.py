"""Steps whose lanes have a thread each, or all have one, as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from hybridtrain.pipeline.engines import threads
from hybridtrain.pipeline.engines.threads import ThreadTrial


class InTurn(ThreadTrial):
    """A thread for each lane, and one for all, step by step."""

    _one_thread = True

    def one_thread_for(self, recorded: bool) -> bool:
        """True and False in turn."""
        self._one_thread = not self._one_thread
        return self._one_thread


class OneThread(InTurn):
    """Every step in one thread."""

    def one_thread_for(self, recorded: bool) -> bool:
        """True."""
        return True


@contextmanager
def threads_of(trial: type[ThreadTrial] | None) -> Iterator[None]:
    """Gives the models that are made in the block another `ThreadTrial`; None: the usual one."""
    with nullcontext() if trial is None else patch.object(threads, "ThreadTrial", trial):
        yield
