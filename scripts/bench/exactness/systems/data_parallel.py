"""What the systems without stages share: the whole model, and the micro-batches of a replica."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scripts.bench.exactness.cases import Case, share


class Recomputed(nn.Module):
    """Recomputes a module's activations in the backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        """Calls the module under `torch.utils.checkpoint`."""
        return checkpoint(self.module, x, use_reentrant=False)


def whole_model(case: Case, layers: list[nn.Module]) -> nn.Module:
    """Returns the module of all layers."""
    net = nn.Sequential(*layers)
    return Recomputed(net) if case.recompute else net


def microbatches_of(case: Case, replica: int) -> list[tuple[Tensor, Tensor]]:
    """Returns all micro-batches of a replica, in the order of the steps."""
    parts = [share(batch, replica, case.replicas) for step in case.steps() for batch in step]
    count = case.microbatches_per_replica
    return [share(part, number, count) for part in parts for number in range(count)]
