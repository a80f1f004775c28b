"""A copy of a process's activity in memory that the other processes of its host can read.

A process that is stopped cannot say where it stands, and one that has died even less. So it writes
each action to a small piece of memory as well, which the others have opened at the start: what was
written last stays readable. Linux only.

    bytes    0 .. 63    the phase, in UTF-8
            64 .. 1087  for each of 64 lanes, two numbers: its action (0: none), and 1 if it waits
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hybridtrain.launch.processes import ProcessId, is_seen_from_here

if TYPE_CHECKING:
    from hybridtrain.schedule import Action

_PHASE_BYTES = 64
LANES = 64
_KINDS = "FBIW"
_SIZE = _PHASE_BYTES + LANES * 16


class Doing(NamedTuple):
    """The phase of a process, and kind, stage and micro-batch of the actions of its lanes."""

    phase: str
    busy: list[tuple[str, int, int]]
    waiting: list[tuple[str, int, int]]


class SharedActivity:
    """The copy of this process.

    Attributes:
        descriptor: of the memory, for the others.
        numbers: of the lanes; see the head of this file.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hybridtrain-activity")
        os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        self.numbers = memoryview(self._memory)[_PHASE_BYTES:].cast("q")

    def write_phase(self, phase: str | None) -> None:
        """Writes the phase."""
        text = (phase or "").encode()[:_PHASE_BYTES]
        self._memory[:_PHASE_BYTES] = text.ljust(_PHASE_BYTES, b"\0")


def share() -> SharedActivity | None:
    """Returns the copy of this process, or None where the system cannot do it."""
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        return SharedActivity()
    return None


def number_of(action: Action) -> int:
    """Returns an action as a number above 0."""
    kind, stage, microbatch = action
    return ((stage << 32 | microbatch) << 2 | _KINDS.index(kind)) + 1


def open_of(process: ProcessId, descriptor: int) -> mmap.mmap | None:
    """Opens the copy of another process; None if it is of another host or cannot be read."""
    if descriptor < 0 or not is_seen_from_here(process):
        return None
    with suppress(OSError, ValueError), open(f"/proc/{process.pid}/fd/{descriptor}", "rb") as file:
        return mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
    return None


def read(memory: mmap.mmap) -> Doing:
    """Returns what a process is doing, or was doing at its end."""
    phase = memory[:_PHASE_BYTES].rstrip(b"\0").decode(errors="replace")
    numbers = memoryview(memory)[_PHASE_BYTES:].cast("q")
    busy: list[tuple[str, int, int]] = []
    waiting: list[tuple[str, int, int]] = []
    for lane in range(LANES):
        number, waits = numbers[2 * lane : 2 * lane + 2]
        if number:
            place = (number - 1) >> 2
            kind = _KINDS[(number - 1) & 3]
            (waiting if waits else busy).append((kind, place >> 32, place & 0xFFFFFFFF))
    return Doing(phase, busy, waiting)
