"""The buffers of a model before a step, to undo what a step that is skipped did to them.

A forward changes running statistics and counters in place, and a batch that is not finite would
leave NaN in them for ever.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class BufferSnapshot:
    """Keeps copies of the buffers of `net`; a `take` copies those that have changed since the last.

    Masks and other constants are copied once, by the first `take`. A tensor's version tells of
    changes in place, but not of a batch norm's own: these are seen by their type, or by comparing
    once, at the second `take`.
    """

    def __init__(self, net: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in net.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        self._taken: list[tuple[Tensor | None, int]] = [(None, -1)] * len(self._places)
        self._copies: list[Tensor] = [torch.empty(0)] * len(self._places)
        self._takes = 0
        self._unversioned = {
            index for index, (module, _) in enumerate(self._places) if isinstance(module, _NormBase)
        }

    @torch.no_grad()
    def take(self) -> None:
        """Copies the buffers that may have changed."""
        if not self._places:
            return
        self._takes += 1
        if self._takes == 2:
            self._compare()
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for index in self._changed():
            module, name = self._places[index]
            buffer = module._buffers[name]
            if buffer is None:
                self._taken[index] = None, -1
                continue
            if buffer is not self._taken[index][0]:
                self._copies[index] = torch.empty_like(buffer)
            self._taken[index] = buffer, buffer._version
            copies, buffers = groups[buffer.device, buffer.dtype]
            copies.append(self._copies[index])
            buffers.append(buffer)
        for copies, buffers in groups.values():
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers the values that they had at the last `take`."""
        # at the first step nothing is known yet, and every copy is new
        for index in self._changed() if self._takes > 1 else range(len(self._places)):
            module, name = self._places[index]
            taken, _ = self._taken[index]
            module._buffers[name] = taken
            if taken is not None:
                taken.copy_(self._copies[index])
                self._taken[index] = taken, taken._version

    def _changed(self) -> list[int]:
        """Returns the places whose buffer may not be what the last `take` has seen."""
        return [
            index
            for index, ((module, name), (taken, version)) in enumerate(
                zip(self._places, self._taken, strict=True)
            )
            if (buffer := module._buffers[name]) is not taken  # another one was put in its place
            or (buffer is not None and buffer._version != version)
            or (index in self._unversioned and module.training)
        ]

    def _compare(self) -> None:
        """Finds the buffers that a step has changed under the same version."""
        changed = set(self._changed())
        for index, (taken, _) in enumerate(self._taken):
            if index in changed or taken is None:
                continue
            if not torch.equal(taken, self._copies[index]):
                self._unversioned.add(index)
