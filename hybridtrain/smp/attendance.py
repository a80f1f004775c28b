"""The agreement of all replicas that they train on: one that has ended leaves the others waiting.

Every training step begins with an agreement of all processes, and so does the end of every script.
A process in a step that meets one at its end knows that this replica has no further batch.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from hybridtrain.errors import BatchError


class Attendance:
    """Agrees with the other processes, in `group`, that all of them train on.

    Args:
        group: all processes; None where there is one replica.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._steps = 0
        self._failed = False
        self._pending: tuple[torch.Tensor, Any] | None = None

    def begin(self) -> None:
        """Begins the agreement of a training step."""
        if self._group is not None:
            self._begin(leaves=False)

    def finish(self) -> None:
        """Waits for the agreement.

        Raises:
            BatchError: a process has left, so that nobody would answer this step.
        """
        if self._pending is None:
            return
        least, most, left = self._agreed()
        if left:
            self._failed = True
            raise BatchError(
                f"a replica has ended after {-least} training steps, and this one is in its step "
                f"{most}: every replica needs the same number of batches. Give each of them as "
                f"many samples, and set drop_last=True in the DataLoader"
            )

    def leave(self) -> None:
        """Says that this process has no further batch, at the end of its script."""
        group, self._group = self._group, None
        failed = self._failed or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if group is None or failed or self._pending is not None:
            return
        self._group = group
        with suppress(RuntimeError):  # the others are gone
            self._begin(leaves=True)
            self._agreed()
        self._group = None

    def _begin(self, leaves: bool) -> None:
        assert self._group is not None
        self._steps += not leaves
        values = torch.tensor([-self._steps, self._steps, int(leaves)])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        # not dist.all_reduce, whose checks and logging take longer
        self._pending = values, self._group.allreduce([values], options)

    def _agreed(self) -> list[int]:
        assert self._pending is not None
        values, work = self._pending
        work.wait()
        self._pending = None
        found: list[int] = values.tolist()
        return found
