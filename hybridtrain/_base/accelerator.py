"""Asynchronous devices: their streams, events, copies and memory.

The engines use such a device only through an `Accelerator`; this module implements CUDA's. The CPU,
which computes synchronously, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Blocks the host until the device has reached the event."""

    def elapsed_time(self, end: Self) -> float:
        """Returns the milliseconds from this event to `end`; both were made with `timing`."""


class Stream(Protocol):
    """A queue of work for a device, executed in order."""

    def wait_event(self, event: Any) -> None:
        """Makes later work of this stream wait for `event`."""

    def wait_stream(self, stream: Any) -> None:
        """Makes later work of this stream wait for the work currently queued in `stream`."""


class PeakMemory(NamedTuple):
    """The peak memory of a device in bytes: allocated to tensors, and reserved by the allocator."""

    allocated: int
    reserved: int


class Accelerator(Protocol):
    """The interface to a kind of device; only `synchronize` blocks the host."""

    def has(self, device: torch.device) -> bool:
        """Returns whether `device` is of this kind."""
        ...

    def new_stream(self, device: torch.device) -> Stream:
        """Returns a new stream."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """Returns the stream in which this thread queues work of `device`."""
        ...

    def default_stream(self, device: torch.device) -> Stream:
        """Returns the stream in which a new thread queues work of `device`."""
        ...

    def using(self, streams: Iterable[Stream]) -> AbstractContextManager[object]:
        """Makes each of `streams` the current one of its device, in this thread."""
        ...

    def record_event(self, stream: Stream, timing: bool = False) -> Event:
        """Records an event after the work queued in `stream`."""
        ...

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keeps the memory of `tensor` from reuse until `stream` has reached this point.

        The allocator knows only the stream in which the memory was allocated.
        """
        ...

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns a copy on `device`, made in the current streams of both devices."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy in CPU memory, valid once the current stream has reached this point."""
        ...

    @property
    def tensor_type(self) -> type[Tensor]:
        """The type of tensors on these devices that have plain memory."""
        ...

    def host_memory(self, nbytes: int) -> Tensor:
        """Returns bytes of CPU memory that copies to and from a device need not wait for."""
        ...

    def copy_into(self, target: Tensor, source: Tensor) -> None:
        """Copies between a device and `host_memory`, in the current stream of the device."""
        ...

    def set_device(self, device: torch.device) -> None:
        """Makes `device` the current device of this thread."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Blocks the host until all streams of `device` are done."""
        ...

    def peak_memory(self, device: torch.device) -> PeakMemory:
        """Returns the peak memory of this process on `device` since `reset_peak_memory`."""
        ...

    def total_memory(self, device: torch.device) -> int:
        """Returns the total memory of `device` in bytes."""
        ...

    def reset_peak_memory(self, device: torch.device) -> None:
        """Resets the peak memory."""
        ...


class Cuda:
    """The `Accelerator` of CUDA devices."""

    def has(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def default_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.default_stream(device)

    @contextmanager
    def using(self, streams: Iterable[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in streams:
                # Also makes the stream's device the current one, until the block ends.
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def record_event(self, stream: Any, timing: bool = False) -> torch.cuda.Event:
        # blocking: a waiting thread sleeps instead of keeping a CPU core busy
        event = torch.cuda.Event(enable_timing=timing, blocking=True)
        event.record(stream)
        return event

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)  # PyTorch allocates pinned memory for this copy

    @property
    def tensor_type(self) -> type[Tensor]:
        return Tensor

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy_into(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def peak_memory(self, device: torch.device) -> PeakMemory:
        return PeakMemory(
            torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        )

    def total_memory(self, device: torch.device) -> int:
        return int(torch.cuda.get_device_properties(device).total_memory)

    def reset_peak_memory(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)


ACCELERATORS: list[Accelerator] = [Cuda()]
"""The supported kinds of devices; tests add one."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Returns the accelerator of `device`; None for the CPU."""
    for accelerator in ACCELERATORS:
        if accelerator.has(device):
            return accelerator
    return None


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns `tensor` on `device`; a copy to an asynchronous device does not block the host."""
    if tensor.device == device:
        return tensor
    accelerator = accelerator_of(device)
    if accelerator is None:  # the host reads the copy, so it must be complete
        return tensor.to(device)
    return accelerator.copy(tensor, device)


class PendingNumbers:
    """Numbers copied from a device asynchronously; reading them waits for the copy.

    Args:
        values: 0-dim tensors on one device.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        # One copy for all; in double, which holds each of the dtypes exactly.
        stacked = torch.stack([value.detach().double() for value in values])
        accelerator = accelerator_of(stacked.device)
        self._ready: Event | None = None
        self._copy = stacked
        if accelerator is not None:
            self._copy = accelerator.to_host(stacked)
            # In the same stream, so after the copy.
            self._ready = accelerator.record_event(accelerator.current_stream(stacked.device))

    def numbers(self) -> list[float]:
        """Returns the numbers."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._copy.tolist()
