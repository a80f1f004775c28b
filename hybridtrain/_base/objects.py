"""Exchanges values between processes outside a step, encoded by the `codec`.

PyTorch's object collectives (`broadcast_object_list` etc.) unpickle received data, which can run
arbitrary code. The functions here send the number of bytes, then the bytes, on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtrain._base.codec import CodecError, decode, encode

MOST_BYTES = 1 << 36
"""The largest value, in bytes, because received lengths are not trusted either."""


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the `value` of each process of `group`, ordered by group rank.

    Raises:
        CodecError: a process's value cannot be encoded; raised in all processes.
    """
    data, problem = _encoded(value)
    size = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    # All processes see the same lengths, so an error here is raised in all of them.
    lengths = [_checked(int(tensor)) for tensor in sizes]
    most = max(lengths)
    # `all_gather` needs the same size everywhere.
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: data.numel()] = data
    received = [torch.empty(most, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    # only now: a process that raised earlier would leave the others waiting in the collective
    if problem is not None:
        raise problem
    return [_decoded(tensor[:length]) for tensor, length in zip(received, lengths, strict=True)]


def broadcast(value: Any, group: dist.ProcessGroup | None, source: int) -> Any:
    """Returns the `value` of rank `source` in `group`, on all processes of the group.

    Raises:
        CodecError: the value cannot be encoded; raised in all processes.
    """
    is_source = dist.get_rank(group) == source
    data, problem = _encoded(value if is_source else None)
    length = torch.tensor([data.numel()])
    dist.broadcast(length, group=group, group_src=source)
    if not is_source:
        data = torch.empty(_checked(int(length)), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=source)
    # After the broadcast, which has told the others.
    if problem is not None:
        raise problem
    return value if is_source else _decoded(data)


def send(value: Any, group: dist.ProcessGroup | None, target: int) -> None:
    """Sends `value` to the process with rank `target` in `group`, which calls `receive`.

    Raises:
        CodecError: the value cannot be encoded; raised in both processes.
    """
    data, problem = _encoded(value)
    dist.send(torch.tensor([data.numel()]), group=group, group_dst=target)
    # Also of an error, whose text is the data: the receiver must not wait.
    dist.send(data, group=group, group_dst=target)
    if problem is not None:
        raise problem


def receive(group: dist.ProcessGroup | None, source: int) -> Any:
    """Receives a value from the process with rank `source` in `group`.

    Raises:
        CodecError: the received bytes cannot be decoded in this process.
    """
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=source)
    data = torch.empty(_checked(int(length)), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=source)
    return _decoded(data)


_REFUSED = b"!"  # not a tag of the codec


def _encoded(value: Any) -> tuple[Tensor, CodecError | None]:
    """Returns `value` as bytes; or an error, with its text as bytes for the other processes."""
    problem: CodecError | None = None
    try:
        data = encode(value)
    except CodecError as error:
        problem = CodecError(f"cannot send a value to the other processes ({error})")
        data = _REFUSED + str(problem).encode("utf-8", "replace")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), problem


def _decoded(data: Tensor) -> Any:
    content = data.numpy().data
    if bytes(content[:1]) == _REFUSED:
        raise CodecError(str(content[1:], "utf-8", "replace"))
    try:
        return decode(content)
    except CodecError as error:
        raise CodecError(f"cannot read a value from another process: {error}") from error


def _checked(length: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise CodecError(f"another process announced a value of {length} bytes")
    return length
