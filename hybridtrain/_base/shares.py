"""A batch in shares, one for each logical replica that a process runs.

With `world.replicas=4` on two processes, each process runs two logical replicas. Its batch is not
one batch of twice the size: each share is cut into micro-batches, weighted and seeded as if it had
a process to itself, and the micro-batches of all shares go through one schedule:

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
        replica: the number of the logical replica.
        samples: how many of its samples count; 0 for a share that only fills a place.
        ahead: the number of its batch in the optimizer step, minus the number of the batch that
            it is run with; see `data.in_order_of_replicas`.
    """

    replica: int
    samples: int
    ahead: int = 0


class Shares:
    """The inputs, or the targets, of several shares; a pytree node.

    Attributes:
        parts: for each share, a pytree of tensors with its samples in dim 0.
        shares: where each part comes from.
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
    """The place of a micro-batch: its logical replica and its number there.

    Attributes:
        replica: the number of the logical replica.
        ahead: as of its `Share`.
        number: of the micro-batch in its share.
    """

    replica: int
    ahead: int
    number: int
