"""The wire between stages of one process: two queues for each border, and copies between devices.

    lane 0   F0 F1 .. B0 ..        stage 0 --activations--> stage 1
    lane 1      F0 B0 F1 ..                <---gradients---

A thread whose message is not there yet waits in the queue; there is no barrier and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from hybridtrain.launch import Lane
from hybridtrain.pipeline import transfer
from hybridtrain.pipeline.engines.actions import Aborted
from hybridtrain.pipeline.stage import Stage
from hybridtrain.schedule import Action


class _Line(NamedTuple):
    """One direction of a border.

    Attributes:
        queue: the messages that nobody has taken yet; None ends a wait.
        between: the devices on its two sides, and its name; None: they are one.
    """

    queue: SimpleQueue[Any]
    between: tuple[torch.device, torch.device, str] | None


class QueueWire:
    """Hands on values in memory; see `Wire`. It is one step's."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._aborted = False
        self._lines: dict[tuple[str, int], _Line] = {}
        for before, after in pairwise(stages):
            apart = before.device != after.device
            forth = (before.device, after.device, "F") if apart else None
            back = (after.device, before.device, "B") if apart else None
            self._lines["F", after.index] = _Line(SimpleQueue(), forth)
            # which part of a backward takes the gradients is the same to the line
            line = _Line(SimpleQueue(), back)
            self._lines["B", before.index] = self._lines["I", before.index] = line

    def send(self, to: Action, message: list[Any]) -> None:
        """Puts the message into a queue; begins the copy if it goes to another device."""
        queue, between = self._lines[to.kind, to.stage]
        queue.put(message if between is None else transfer.send(message, *between))

    def receive(self, action: Action, doing: Lane) -> list[Any]:
        """Takes the next message out of a queue.

        Raises:
            Aborted: there is none, and none will come.
        """
        queue, between = self._lines[action.kind, action.stage]
        if queue.empty():
            doing.wait(True)
            message = queue.get()
            doing.wait(False)
        else:
            message = queue.get()
        if message is None or self._aborted:
            raise Aborted
        if between is not None:
            message = transfer.receive(message, between[1])
        return message  # type: ignore[no-any-return]

    def abort(self) -> None:
        """Ends the waits in `receive`, and those to come."""
        self._aborted = True
        for queue, _ in self._lines.values():
            queue.put(None)
