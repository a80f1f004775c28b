"""The state that is in other processes, where rank 0 alone writes.

Rank 0 knows names, shapes and dtypes of all tensors beforehand, and asks for the values one tensor
at a time, when it writes them. So no process ever holds the whole model, and no file system need be
shared:

    rank 0      writes header, own tensors ...  asks for "5.weight"  writes it ...  end
    rank 1                                      sends it

Of a tensor in parts, the processes that have them put it together, and the first of them sends it.
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
        return key in self._number and (
            0 not in self.table.holders[key] or self.table.infos[key].sharded
        )

    def value(self, stem: str, name: str, tensor: Tensor) -> Tensor:
        """Returns the values of `tensor`, which may be in other processes; rank 0 calls it."""
        if not self.has(stem, name):
            return tensor
        key = self._key(stem, name)
        self._ask(self._number[key])
        received = self._provide(key)
        assert received is not None
        return received

    def serve(self) -> None:
        """Takes part in what rank 0 asks for, until it calls `end`; returns at once on rank 0."""
        if self._rank == 0:
            return
        while (number := self._ask(0)) != _END:
            self._provide(self._keys[number])

    def end(self) -> None:
        """Lets the other processes go on; rank 0 calls it."""
        self._ask(_END)

    def _key(self, stem: str, name: str) -> Key:
        return stem, self.table.aliases.get(stem, {}).get(name, name)

    def _provide(self, key: Key) -> Tensor | None:
        """Puts a tensor together where it is in parts; returns it on rank 0."""
        source = self.table.holders[key][0]
        tensor = self.table.value(key)
        if source == 0:
            return tensor
        info = self.table.infos[key]
        if self._rank == 0:
            received = torch.empty(info.shape, dtype=info.dtype)
            dist.recv(_flat(received), group=self._group, group_src=source)
            return received
        if self._rank == source:
            assert tensor is not None
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            dist.send(_flat(plain), group=self._group, group_dst=0)
        return None

    def _ask(self, number: int) -> int:
        """Returns rank 0's `number` on every process."""
        asked = torch.tensor([number])
        dist.broadcast(asked, group=self._group, group_src=0)
        return int(asked)


def _flat(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor: gloo does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)
