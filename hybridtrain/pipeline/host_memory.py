"""Host memory for what leaves a device: buffers that are used again, and counted."""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from hybridtrain._base.accelerator import Accelerator, Event
from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import UserError, argument, setting

_SMALLEST = 4096  # bytes of the smallest buffer


class HostBuffer:
    """A buffer in host memory; goes back to its pool when nothing holds it.

    Attributes:
        memory: its bytes; at least as many as asked for.
        ready: the event after which nothing writes or reads it; None: now.
    """

    __slots__ = ("_returned", "memory", "ready")

    def __init__(
        self,
        memory: Tensor,
        ready: Event | None,
        returned: deque[tuple[Tensor, Event | None]],
    ) -> None:
        self.memory = memory
        self.ready = ready
        self._returned = returned

    def part(self, dtype: torch.dtype, count: int) -> Tensor:
        """Returns its beginning as a tensor of `count` elements."""
        return self.memory[: count * dtype.itemsize].view(dtype)

    def __del__(self) -> None:
        # Nothing but an append, which is atomic: the garbage collector may call this in any thread,
        # between any two instructions.
        self._returned.append((self.memory, self.ready))


class HostMemory:
    """The buffers of a device, in pinned memory if copies to it need that.

    It keeps the buffers of a step for the next one, and no more: `end_step` frees those that the
    step has not used.

    Args:
        accelerator: the accelerator of the device; None for the CPU.

    Attributes:
        nbytes: bytes of all buffers, in use or not.
        most_nbytes: the most so far.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self.nbytes = self.most_nbytes = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[Tensor, Event | None]]] = {}
        self._in_use: dict[int, int] = {}  # by size
        self._most_in_use: dict[int, int] = {}  # in the step
        # appended by `HostBuffer.__del__`, which may run anywhere, also where the lock is held
        self._returned: deque[tuple[Tensor, Event | None]] = deque()

    @property
    def in_use(self) -> int:
        """Bytes of the buffers in use."""
        with self._lock:
            self._take_back()
            return sum(size * count for size, count in self._in_use.items())

    def take(self, nbytes: int) -> HostBuffer:
        """Returns a buffer of at least `nbytes`.

        Raises:
            UserError: the host has no memory for it.
        """
        size = _size_class(nbytes)
        with self._lock:
            self._take_back()
            in_use = self._in_use.get(size, 0) + 1
            free = self._free.get(size)
            memory, ready = free.pop() if free else (self._new(size), None)
            self._in_use[size] = in_use
            self._most_in_use[size] = max(in_use, self._most_in_use.get(size, 0))
        return HostBuffer(memory, ready, self._returned)

    def end_step(self) -> None:
        """Frees the buffers that have not been used since the last call."""
        with self._lock:
            self._take_back()
            for size, free in self._free.items():
                count = len(free) + self._in_use.get(size, 0)
                # Never more than are free: `_most_in_use` is at least what is in use now.
                for _ in range(count - self._most_in_use.get(size, 0)):
                    free.pop()
                    self.nbytes -= size
            self._most_in_use = dict(self._in_use)

    def _take_back(self) -> None:
        while self._returned:
            memory, ready = self._returned.popleft()
            size = memory.numel()
            self._in_use[size] -= 1
            # The event goes along: the copy out of the buffer may still run, and the next user
            # waits for it.
            self._free.setdefault(size, []).append((memory, ready))

    def _new(self, size: int) -> Tensor:
        try:
            if self._accelerator is None:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            else:
                memory = self._accelerator.host_memory(size)
        except RuntimeError as error:
            raise UserError(
                f"the host has no memory for {with_unit(size)} more of offloaded activations, "
                f"with {with_unit(self.nbytes)} of them there: lower {argument('batch_size')}, or "
                f"set {setting('offload', 'none')}"
            ) from error
        self.nbytes += size
        self.most_nbytes = max(self.most_nbytes, self.nbytes)
        return memory


def _size_class(nbytes: int) -> int:
    """Returns the bytes of a buffer: up to an eighth more, so that similar sizes share buffers."""
    step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step
