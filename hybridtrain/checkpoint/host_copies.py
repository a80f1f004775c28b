"""Copies of a state in host memory, which a thread writes while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_Key = tuple[str, str]  # the stem of a file, and the name of a tensor in it


class HostCopies:
    """Copies of tensors in host memory, to be written while training continues.

    Allocating memory (and pinning it for a GPU) costs more than the copy itself. So the buffers for
    everything that this process writes stay allocated between saves.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Returns copies of `tensors`; they overwrite the previous ones."""
        # Tensors that are gone free their memory before new ones need some.
        self._buffers = {key: copy for key, copy in self._buffers.items() if key in tensors}
        for key, tensor in tensors.items():
            copy = self._buffers.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                # Pinned, or a copy from a GPU would block the host and go through a buffer of the
                # driver.
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[key] = copy
            # All copies run before the one wait below.
            copy.copy_(tensor, non_blocking=True)
        # training must not change a tensor before its copy is complete; each stage has its own
        # stream, so synchronize the whole device
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        # The previous save has ended: `CheckpointStore.run` waits for it, so nobody reads these any
        # more.
        return dict(self._buffers)

    @property
    def nbytes(self) -> int:
        """The size of the copies in host memory, in bytes."""
        return sum(copy.nbytes for copy in self._buffers.values())
