"""A batch made of shares, one for each logical replica that a process runs.

With `world.replicas=4` on two processes, each process runs two logical replicas. Its batch is not
one batch of twice the size: each share is cut into micro-batches, weighted and seeded as if it ran
in its own process, and the micro-batches of all shares run through one schedule:

    process 0    replica 0: micro-batches 0 1 2    replica 1: micro-batches 0 1 2
    schedule              F0 F1 F2 ...                      F3 F4 F5 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils._pytree import register_pytree_node


class Share(NamedTuple):
    """The origin of a share: its logical replica and its batch.

    Attributes:
        replica: the index of the logical replica.
        samples: the number of samples that count; 0 for a padding share.
        ahead: the index of its batch in the optimizer step, minus the index of the batch it runs
            with; see `data.in_order_of_replicas`.
    """

    replica: int
    samples: int
    ahead: int = 0


class Shares:
    """The inputs, or the targets, of several shares; a pytree node.

    Attributes:
        parts: for each share, a pytree of tensors with its samples in dim 0.
        shares: the origin of each part.
    """

    def __init__(self, parts: Sequence[Any], shares: Sequence[Share]) -> None:
        self.parts = tuple(parts)
        self.shares = tuple(shares)

    def __repr__(self) -> str:
        numbers = ", ".join(str(share.replica) for share in self.shares)
        return f"Shares(of the logical replicas {numbers})"


register_pytree_node(
    Shares,
    lambda batch: (list(batch.parts), batch.shares),
    lambda parts, shares: Shares(tuple(parts), shares),
)


class MicrobatchPlace(NamedTuple):
    """The origin of a micro-batch: its logical replica and its index there.

    Attributes:
        replica: the index of the logical replica.
        ahead: the same as in its `Share`.
        number: the index of the micro-batch in its share.
    """

    replica: int
    ahead: int
    number: int
