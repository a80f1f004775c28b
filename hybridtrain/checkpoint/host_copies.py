"""Copies of tensors in host memory, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from hybridtrain.checkpoint.tensor_files import without_aliases


class HostCopies:
    """Copies tensors to memory that is kept for the next copy of the same tensors.

    New memory costs more than the copy: pages to map on a CPU, to pin for a GPU. So one copy of
    all that is saved stays allocated between two saves.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._devices: set[torch.device] = set()

    @torch.no_grad()
    def take(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies `tensors`; on a GPU the copy may be under way until `wait`.

        Names of one tensor get the same copy. The copies of the last call with the same `group`
        are overwritten.
        """
        kept, others = without_aliases(tensors)
        copies = {}
        for name, tensor in kept.items():
            copies[name] = self._buffer((group, name), tensor)
            copies[name].copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                self._devices.add(tensor.device)
        # in the order of the names, which decides the name that a file has a tensor under
        return {name: copies[others.get(name, name)] for name in tensors}

    def drop_others(self, groups: Container[str], kept: Container[tuple[str, str]]) -> None:
        """Frees the copies of all tensors of `groups` but those `kept`, each by group and name."""
        self._buffers = {
            key: copy for key, copy in self._buffers.items() if key[0] not in groups or key in kept
        }

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that the copies hold."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def wait(self) -> None:
        """Returns when the copies are complete."""
        # training must not change what is not copied yet; each stage has its own stream, so
        # the whole device is waited for
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer
