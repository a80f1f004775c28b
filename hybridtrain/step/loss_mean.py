"""The mean of the losses of many steps, over all replicas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.accelerator import put
from hybridtrain.model import HybridModel, TrainStepResult


class LossMean:
    """Accumulates losses with their counts; only the reading methods wait for a device.

    Attributes:
        value: the mean at the last reading.
    """

    def __init__(self, model: HybridModel) -> None:
        self.value: float | None = None
        self._model = model
        self._added: list[TrainStepResult] = []
        # Sums by logical replica, added in a fixed order, so that they do not depend on how
        # replicas are spread over processes. Not means: a sum of float32 losses times counts is
        # exact in float64 as long as they differ by less than about 2**20.
        self._sums: dict[int, Tensor | float] = {}
        self._counts: dict[int, float] = {}
        self._gathered = 0.0, 0.0  # the sums of all replicas up to the last `gather`

    def add(self, results: Sequence[TrainStepResult]) -> None:
        """Adds the mean losses of batches, weighted by their counts."""
        self._added += results

    def drop(self, results: Sequence[TrainStepResult]) -> None:
        """Removes the losses of a skipped step, unless they have been read."""
        dropped = set(map(id, results))
        self._added = [result for result in self._added if id(result) not in dropped]

    def fold(self, least: int = 1, but: Sequence[TrainStepResult] = ()) -> None:
        """Replaces at least `least` accumulated losses by their sums, except those in `but`."""
        # by batch, so that the sums do not depend on how replicas are spread
        if len(self._added) < least:
            return
        waiting, left = set(map(id, but)), []
        losses: dict[int, list[Tensor]] = defaultdict(list)
        counts: dict[int, list[float]] = defaultdict(list)
        for result in self._added:
            if id(result) in waiting:
                left.append(result)
            elif result.share_losses:
                for share in result.share_losses:
                    losses[share.replica].append(share.mean)
                    counts[share.replica].append(share.count)
            else:
                replica = self._model.world.owned_replicas.start
                losses[replica].append(result.loss)
                counts[replica].append(result.count)
        self._added = left
        for replica in sorted(losses):
            total = _dot(losses[replica], counts[replica])
            self._sums[replica] = total + self._sums[replica] if replica in self._sums else total
            self._counts[replica] = self._counts.get(replica, 0.0) + sum(counts[replica])

    def gather(self) -> None:
        """Sums the losses of all replicas, for `state_dict`; a collective call."""
        self.fold()
        rows = [[0.0, 0.0] for _ in range(self._model.world.logical_replicas)]
        for replica, total in self._sums.items():
            rows[replica] = [float(total), self._counts[replica]]
        sums = torch.tensor(rows, dtype=torch.float64)
        losses, counts = zip(*self._model.reduce_loss(sums).tolist(), strict=True)
        self._gathered = self._gathered[0] + sum(losses), self._gathered[1] + sum(counts)
        self._sums, self._counts = {}, {}

    def read(self) -> float:
        """Returns the mean over all samples of all replicas since the last reading.

        NaN without samples; a collective call.
        """
        self.gather()
        total, count = self._gathered
        self._gathered = 0.0, 0.0
        self.value = total / count if count else math.nan
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of all replicas up to the last `gather`, as JSON types."""
        return {"loss_sum": self._gathered[0], "loss_samples": self._gathered[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict` on every process."""
        self._added, self._sums, self._counts = [], {}, {}
        self._gathered = state["loss_sum"], state["loss_samples"]


def _dot(losses: Sequence[Tensor], counts: Sequence[float]) -> Tensor | float:
    """Returns the sum of losses times counts in float64: a number if the losses are on the host."""
    if losses[0].is_cpu:
        total: float = sum(map(mul, map(float, losses), counts))
        return total
    on_device = torch.stack(list(losses)).double()
    return torch.dot(on_device, put(torch.tensor(counts, dtype=torch.float64), on_device.device))
