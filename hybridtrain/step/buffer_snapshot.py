"""The buffers of a model before a step, to undo what a step that is skipped did to them.

A forward changes running statistics and counters in place, and a batch that is not finite would
leave NaN in them for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hybridtrain.accelerator import put


class BufferSnapshot:
    """Keeps copies of the buffers of `net`; a `take` copies those that have changed since the last.

    Masks and other constants are copied once, by the first `take`. A tensor's version tells of
    changes in place, but not of a batch norm's own: these are seen by their type, or by comparing
    once, at the second `take`. Where modules or names of buffers are others than at the last
    `take`, it begins anew; to notice that takes about 30 us for 200 modules.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._look()

    def _look(self) -> None:
        """Notes where the buffers are now; None is a place too, which a forward may fill."""
        modules = list(self._net.modules())
        # TorchScript's modules and buffers cannot be replaced
        self._own = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self._children = [module._modules.values() for module in self._own]
        self._tables = [module._buffers for module in self._own]
        self._objects = list(chain.from_iterable(self._children))
        self._names = list(chain.from_iterable(self._tables))
        self._places = [
            (module, name)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is None or not (buffer.is_inference() or buffer.is_meta)
        ]
        self._known = [frozenset(table) for table in self._tables]
        self._taken: list[tuple[Tensor | None, int]] = [(None, -1)] * len(self._places)
        self._copies: list[Tensor] = [torch.empty(0)] * len(self._places)
        self._takes = 0
        self._unversioned = {
            index for index, (module, _) in enumerate(self._places) if isinstance(module, _NormBase)
        }

    def _is_as_before(self) -> bool:
        children = list(chain.from_iterable(self._children))
        return (
            len(children) == len(self._objects)
            and all(map(is_, children, self._objects))
            and list(chain.from_iterable(self._tables)) == self._names
        )

    @torch.no_grad()
    def take(self) -> bool:
        """Copies the buffers that may have changed; returns whether there may be new ones."""
        new = not self._is_as_before()
        if new:
            self._look()
        if not self._places:
            return new
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
                new |= self._taken[index][0] is None
                self._copies[index] = torch.empty_like(buffer)
            self._taken[index] = buffer, buffer._version
            copies, buffers = groups[buffer.device, buffer.dtype]
            copies.append(self._copies[index])
            buffers.append(buffer)
        for copies, buffers in groups.values():
            torch._foreach_copy_(copies, buffers)
        return new

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the buffers the values that they had at the last `take`; removes new ones."""
        for module, table, known in zip(self._own, self._tables, self._known, strict=True):
            for name in table.keys() - known:
                delattr(module, name)
        for index in self._may_have_changed():
            module, name = self._places[index]
            taken, _ = self._taken[index]
            buffer = module._buffers.get(name)
            if taken is not None and buffer is not None and buffer.device != taken.device:
                buffer.copy_(self._copies[index])  # a new module, which was moved to its stage
                continue
            module._buffers[name] = taken
            if taken is not None:
                taken.copy_(self._copies[index])
                self._taken[index] = taken, taken._version

    @torch.no_grad()
    def restore_where(self, flag: Tensor) -> None:
        """Gives the buffers back their values where `flag` is true, on their devices.

        No host waits for the flag, a 0-dim tensor. A buffer that was made, deleted, or replaced by
        one of another shape is left unchanged.
        """
        flags: dict[torch.device, Tensor] = {}
        for index in self._may_have_changed():
            (module, name), copy = self._places[index], self._copies[index]
            buffer = module._buffers.get(name)
            if buffer is None or self._taken[index][0] is None or buffer.shape != copy.shape:
                continue
            here = flags.setdefault(buffer.device, put(flag, buffer.device))
            buffer.copy_(torch.where(here, copy, buffer))

    def _may_have_changed(self) -> Sequence[int]:
        # at the first step nothing is known yet, and every copy is new
        return self._changed() if self._takes > 1 else range(len(self._places))

    def _changed(self) -> list[int]:
        """Returns the places whose buffer may not be what the last `take` has seen."""
        return [
            index
            for index, ((module, name), (taken, version)) in enumerate(
                zip(self._places, self._taken, strict=True)
            )
            if (buffer := module._buffers.get(name)) is not taken  # replaced or deleted
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
