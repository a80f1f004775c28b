"""Copies of a state in host memory, which a thread writes while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_Key = tuple[str, str]  # the stem of a file, and the name of a tensor in it


class HostCopies:
    """Copies of tensors in host memory, to be written while training goes on.

    New memory costs more than the copy: pages to map on a CPU, to pin for a GPU. So one copy of
    all that this process writes stays allocated between two saves.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Returns copies, in the memory of the last ones, which are overwritten."""
        self._buffers = {key: copy for key, copy in self._buffers.items() if key in tensors}
        for key, tensor in tensors.items():
            copy = self._buffers.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[key] = copy
            copy.copy_(tensor, non_blocking=True)
        # training must not change what is not copied yet; each stage has its own stream, so
        # the whole device is waited for
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return dict(self._buffers)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that the copies hold."""
        return sum(copy.nbytes for copy in self._buffers.values())
