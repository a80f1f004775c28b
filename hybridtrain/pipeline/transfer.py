"""Asynchronous copies of values from one stage's device to another's.

On GPUs a copy runs on side streams of both devices. The sender starts it as soon as the value is
there; the receiver's stream waits for an event. Neither device's main stream waits for work that
was queued on the other after the value, and the host waits for nothing. On the CPU, and between
stages that share a device, the value itself is passed on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain.microbatch import map_tensors


class Transfer(NamedTuple):
    """A message on its way: the values, and the event after which they are on the target device."""

    values: Any
    ready_event: torch.cuda.Event | None = None


def send(values: Any, source: torch.device, target: torch.device) -> Transfer:
    """Starts to copy the tensors in `values`, a pytree, to `target`; the sender calls it."""
    if source.type != "cuda" or target.type != "cuda":
        return Transfer(map_tensors(lambda tensor: move(tensor, target), values))
    outbound, inbound = _side_stream(source, "out"), _side_stream(target, "in")
    outbound.wait_stream(torch.cuda.current_stream(source))

    def copy(tensor: Tensor) -> Tensor:
        moved = move(tensor, target)
        tensor.record_stream(outbound)  # its memory is not reused before the copy is done
        return moved

    with torch.cuda.stream(outbound), torch.cuda.stream(inbound):
        moved = map_tensors(copy, values)
        return Transfer(moved, inbound.record_event())


def receive(transfer: Transfer, device: torch.device) -> Any:
    """Returns the values, usable on the current stream of `device`."""
    if transfer.ready_event is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(transfer.ready_event)
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), transfer.values)
    return transfer.values


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a detached copy on `device` with the same `requires_grad`, or `tensor` itself."""
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device, non_blocking=True)
    return moved.requires_grad_() if tensor.requires_grad else moved


def sync_streams(devices: Iterable[torch.device], before: bool) -> None:
    """Orders the work of the stages' threads with that of a caller who uses other streams of GPUs.

    The threads use the default streams. `before` a step these wait for what the caller has queued;
    after it the caller's streams wait for them.
    """
    for device in devices:
        own, theirs = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        first, second = (own, theirs) if before else (theirs, own)
        if first != second:
            second.wait_stream(first)


# One for each direction: what arrives must not wait for what leaves after a long computation.
_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_side_streams_lock = threading.Lock()


def _side_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    with _side_streams_lock:
        if (device, direction) not in _side_streams:
            _side_streams[device, direction] = torch.cuda.Stream(device)
        return _side_streams[device, direction]
