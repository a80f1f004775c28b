"""Asynchronous copies of values from one stage's device to another's.

On GPUs a copy runs on side streams of both devices. The sender starts it as soon as the value
exists; the receiver's stream waits for an event. Neither device's main stream waits for work that
the other queued after the value, and the host does not wait. On the CPU, and between stages that
share a device, the value itself is passed on.

    stage 0's device   compute F0 | compute F1 |
      to stage 1                  copy F0      copy F1
    stage 1's device
      from stage 0                copy F0      copy F1
      compute                             F0 .. waits for its copy alone

Each combination of source, target and kind of values has its own side stream. The host runs ahead
of the devices, and a queued copy blocks later copies in its stream until its source has computed:
an activation of a later micro-batch would block a gradient that is ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrain._base.accelerator import Event, Stream, accelerator_of, put
from hybridtrain._base.microbatch import map_tensors


class Transfer(NamedTuple):
    """A pending message: the values, and the event after which they are on the target device."""

    values: Any
    ready_event: Event | None = None


def send(values: Any, source: torch.device, target: torch.device, kind: str = "") -> Transfer:
    """Starts copying the tensors in `values`, a pytree, to `target`; the sender calls it.

    Tensors in CPU memory, such as the lengths for `pack_padded_sequence`, stay there.

    Args:
        values: the values on `source`.
        source: the device of the sender.
        target: the device of the receiver.
        kind: values of the same kind arrive in the order of sending.
    """
    accelerator = accelerator_of(target)
    if accelerator is None or accelerator_of(source) is not accelerator:
        return Transfer(map_tensors(lambda tensor: move(tensor, target), values))
    outbound = side_stream(source, source, target, kind)
    inbound = side_stream(target, source, target, kind)
    # The value is complete in the sender's current stream only.
    outbound.wait_stream(accelerator.current_stream(source))

    def copy(tensor: Tensor) -> Tensor:
        # In CPU memory, or already at its place.
        if tensor.device != source:
            return tensor
        moved = move(tensor, target)
        # its memory is not reused before the copy is done
        accelerator.record_stream(tensor, outbound)
        return moved

    # PyTorch runs a copy between GPUs in the source's current stream, and lets the target's current
    # stream wait for it: both must be side streams.
    with accelerator.using([outbound, inbound]):
        moved = map_tensors(copy, values)
        return Transfer(moved, accelerator.record_event(inbound))


def receive(transfer: Transfer, device: torch.device) -> Any:
    """Returns the values, usable on the current stream of `device`."""
    accelerator = accelerator_of(device)
    if transfer.ready_event is not None and accelerator is not None:
        stream = accelerator.current_stream(device)
        # On the device: the host goes on.
        stream.wait_event(transfer.ready_event)
        # The side stream has allocated them, and would reuse their memory as soon as they are
        # freed.
        keep_until(stream, transfer.values, device)
    return transfer.values


def keep_until(stream: Stream, values: Any, device: torch.device) -> None:
    """Keeps the memory of the tensors of `values` on `device` until `stream` has read them."""
    accelerator = accelerator_of(device)
    assert accelerator is not None
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.device == device:
            accelerator.record_stream(leaf, stream)


class Inputs:
    """The inputs of the micro-batches on the first stage's device, copied one ahead.

    Args:
        source: gives the inputs of a micro-batch, in CPU memory or on the device.
        chunks: the number of micro-batches.
        device: the device of the first stage.
    """

    def __init__(self, source: Callable[[int], Any], chunks: int, device: torch.device) -> None:
        self._source = source
        self._chunks = chunks
        self._device = device
        self._begun: dict[int, Transfer] = {}

    def take(self, microbatch: int) -> Any:
        """Returns the inputs of `microbatch`, and starts copying the inputs of the next."""
        # The next one is copied while this one is computed. No more than one, since each takes
        # memory of the device.
        for number in (microbatch, microbatch + 1):
            if number < self._chunks and number not in self._begun:
                self._begun[number] = self._begin(number)
        return receive(self._begun.pop(microbatch), self._device)

    def _begin(self, microbatch: int) -> Transfer:
        values, device = self._source(microbatch), self._device
        accelerator = accelerator_of(device)
        # Values that are on the device already need no stream.
        on_host = [
            isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.device != device
            for leaf in tree_leaves(values)
        ]
        if accelerator is None or not any(on_host):
            return Transfer(values)
        stream = side_stream(device, "inputs")
        # the current stream may still use memory that the copies get
        with accelerator.using([stream]):
            moved = map_tensors(lambda tensor: move(tensor, device), values)
            return Transfer(moved, accelerator.record_event(stream))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a detached copy on `device` with the same `requires_grad`, or `tensor` itself."""
    if tensor.device == device:
        return tensor
    moved = put(tensor.detach(), device)
    return moved.requires_grad_() if tensor.requires_grad else moved


def sync_streams(devices: Iterable[torch.device], before: bool, values: Any = None) -> None:
    """Orders the GPU work of the stages' threads with a caller that uses other streams.

    The threads use the default streams. `before` a step, these wait for work that the caller has
    queued; after it, the caller's streams wait for them. The memory of `values`, which the caller
    gets, belongs to the default streams, and is kept until the caller's streams have read it.
    """
    for device in devices:
        accelerator = accelerator_of(device)
        assert accelerator is not None
        current, theirs = accelerator.current_stream(device), accelerator.default_stream(device)
        first, second = (current, theirs) if before else (theirs, current)
        # Equal for a caller that uses the default stream, as most do.
        if first != second:
            # On the device; the host does not wait.
            second.wait_stream(first)
            keep_until(current, values, device)


_side_streams: dict[tuple[Hashable, ...], Stream] = {}
_side_streams_lock = threading.Lock()


def side_stream(device: torch.device, *use: Hashable) -> Stream:
    """Returns the stream of `device` for this use, the same one each time; None for the CPU."""
    key = (device, *use)
    # Threads of several stages ask for the same stream. Two streams for one use would lose the
    # order of its copies.
    with _side_streams_lock:
        if key not in _side_streams:
            accelerator = accelerator_of(device)
            assert accelerator is not None
            _side_streams[key] = accelerator.new_stream(device)
        return _side_streams[key]
