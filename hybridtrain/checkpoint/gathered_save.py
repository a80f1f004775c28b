"""The state that is in other processes, where rank 0 alone writes.

Rank 0 knows names, shapes and dtypes of all tensors beforehand, and asks for the values one tensor
at a time, when it writes them. So no process ever holds the whole model, and no file system need be
shared:

    rank 0      writes header, own tensors ...  asks for "5.weight"  writes it ...  end
    rank 1                                      sends it
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtrain.checkpoint.state_table import Key, StateTable

_END = -1


class GatheredState:
    """The whole state of a run, as rank 0 reads it and the other processes serve it.

    Args:
        table: what each process has.
        group: a gloo group of all processes, in which rank 0 may write for long.
    """

    def __init__(self, table: StateTable, group: dist.ProcessGroup) -> None:
        self.table = table
        self._group = group
        self._rank = dist.get_rank(group)
        self._keys = list(table.infos)
        self._number = {key: number for number, key in enumerate(self._keys)}

    def has(self, stem: str, name: str) -> bool:
        """Returns whether rank 0 has to ask for this tensor."""
        key = self._key(stem, name)
        return key in self._number and 0 not in self.table.holders[key]

    def value(self, stem: str, name: str, tensor: Tensor) -> Tensor:
        """Returns the values of `tensor`, which may be in other processes; rank 0 calls it."""
        if not self.has(stem, name):
            return tensor
        key = self._key(stem, name)
        info, source = self.table.infos[key], self.table.holders[key][0]
        self._ask(self._number[key])
        received = torch.empty(info.shape, dtype=info.dtype)
        dist.recv(_flat(received), group=self._group, group_src=source)
        return received

    def serve(self) -> None:
        """Sends what rank 0 asks this process for, until it calls `end`; nothing on rank 0."""
        if self._rank == 0:
            return
        while (number := self._ask(0)) != _END:
            key = self._keys[number]
            if self._rank == self.table.holders[key][0]:
                value = self.table.value(key)
                plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
                dist.send(_flat(plain), group=self._group, group_dst=0)

    def end(self) -> None:
        """Lets the other processes go on; rank 0 calls it."""
        self._ask(_END)

    def _key(self, stem: str, name: str) -> Key:
        return stem, self.table.aliases.get(stem, {}).get(name, name)

    def _ask(self, number: int) -> int:
        """Returns rank 0's `number` on every process."""
        asked = torch.tensor([number])
        dist.broadcast(asked, group=self._group, group_src=0)
        return int(asked)


def _flat(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor: gloo does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
