"""Flags that any process may set, and that all processes then read at the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridtrain.world import World


class StepFlags:
    """Requests that all processes must follow in the same step, such as to stop.

    A flag that is set on one process before a step begins is read on all of them at its end: they
    take the largest value, by one all-reduce of a few bytes that runs while the step computes. With
    one process nothing is sent.

    Args:
        world: the processes.
        names: the flags.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = tuple(names)
        self._requested: dict[str, str] = {}  # by name, the reason; not sent yet
        self._sent: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._values = torch.zeros(len(self._names), dtype=torch.int32)
        self._work: dist.Work | None = None

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone speaks."""
        return self._world.is_main

    def set(self, name: str, reason: str = "") -> None:
        """Sets a flag; safe in a signal handler and in any thread."""
        if name not in self._names:
            raise ValueError(f"there is no flag {name!r}; the flags are: {', '.join(self._names)}")
        self._requested.setdefault(name, reason)

    def requested(self, name: str) -> str | None:
        """Returns why a flag was set on this process since the last `begin`, if it was."""
        return self._requested.get(name)

    def clear(self) -> None:
        """Forgets what was set and what is on the way: of a run that has ended in a step."""
        self._requested.clear()
        self._sent = {}
        self._work = None
        self._values = torch.zeros_like(self._values)  # the old ones may still be sent

    def begin(self) -> None:
        """Sends what was set so far; called by every process at the start of a step."""
        self._sent = {}
        if self._requested:
            for name in self._names:  # one by one: a handler may add another meanwhile
                if name in self._requested:
                    self._sent[name] = self._requested.pop(name)
        if self._world.size > 1:
            for name in self._sent:
                self._values[self._names.index(name)] = 1
            self._work = self._world.begin_max(self._values)

    def read(self) -> frozenset[str]:
        """Returns the flags that any process had set before this step's `begin`.

        All processes call it, and get the same. A flag counts once: to be read again it must be set
        again.
        """
        if self._work is None:
            self._reasons |= self._sent
            return frozenset(self._sent)
        self._work.wait()
        self._work = None
        values = self._values.tolist()
        if not any(values):
            return frozenset()
        names = frozenset(name for name, value in zip(self._names, values, strict=True) if value)
        self._values.zero_()
        for reasons in reversed(self._world.gather(self._sent)):  # the lowest rank's count
            self._reasons |= reasons
        return names

    def reason(self, name: str) -> str | None:
        """Returns why a flag was set, once `read` has returned it; the same on all processes."""
        return self._reasons.get(name)
