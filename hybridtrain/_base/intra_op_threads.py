"""The intra-op threads of kernels on the CPU: their number decides the order of sums.

PyTorch's setting is one per thread. The lanes of a process share what its caller has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def threads_per_lane(lanes: int) -> int:
    """Returns a lane's share of the intra-op threads."""
    return max(1, torch.get_num_threads() // lanes)


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Computes with `count` intra-op threads in the block."""
    outside = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(outside)
