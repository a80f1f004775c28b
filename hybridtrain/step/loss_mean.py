"""The mean of the losses of many steps, over all replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.accelerator import put
from hybridtrain.model import HybridModel, TrainStepResult


class LossMean:
    """Adds up losses with what they count; only the reading methods wait for a device.

    Attributes:
        value: the mean when it was last read.
    """

    def __init__(self, model: HybridModel) -> None:
        self.value: float | None = None
        self._model = model
        self._added: list[tuple[Tensor, float]] = []
        # Sums, not means: a sum of float32 losses times counts is exact in float64 as long as they
        # do not differ by 2**20 or so, and so is the same however it was put together.
        self._sum: Tensor | float = 0.0
        self._count = 0.0
        self._gathered = 0.0, 0.0  # the sums of all replicas up to the last `gather`

    def add(self, results: Sequence[TrainStepResult]) -> None:
        """Adds the mean losses of batches, over how many samples (or what counts)."""
        self._added += [(result.loss, result.count) for result in results]

    def drop(self, results: Sequence[TrainStepResult]) -> None:
        """Takes back what was added of a step that is skipped, unless it was read since."""
        losses = {id(result.loss) for result in results}
        self._added = [entry for entry in self._added if id(entry[0]) not in losses]

    def fold(self, least: int = 1, but: Sequence[TrainStepResult] = ()) -> None:
        """Replaces `least` losses that were added, or more, by their sums; those of `but` stay."""
        if len(self._added) < least:
            return
        waiting = {id(result.loss) for result in but}
        folded = [entry for entry in self._added if id(entry[0]) not in waiting]
        self._added = [entry for entry in self._added if id(entry[0]) in waiting]
        if not folded:
            return
        losses = torch.stack([loss for loss, _ in folded]).double()
        counts = [count for _, count in folded]
        weights = put(torch.tensor(counts, dtype=torch.float64), losses.device)
        self._sum = torch.dot(losses, weights) + self._sum
        self._count += sum(counts)

    def gather(self) -> None:
        """Adds up what all replicas have, for `state_dict`; a collective call."""
        self.fold()
        sums = torch.tensor([float(self._sum), self._count], dtype=torch.float64)
        total, count = self._model.reduce_loss(sums).tolist()
        self._gathered = self._gathered[0] + total, self._gathered[1] + count
        self._sum, self._count = 0.0, 0

    def read(self) -> float:
        """Returns the mean over all samples of all replicas since the last reading.

        NaN if there were none; a collective call.
        """
        self.gather()
        total, count = self._gathered
        self._gathered = 0.0, 0.0
        self.value = total / count if count else math.nan
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of all replicas up to the last `gather`, in JSON's types."""
        return {"loss_sum": self._gathered[0], "loss_samples": self._gathered[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict` on every process."""
        self._added, self._sum, self._count = [], 0.0, 0.0
        self._gathered = state["loss_sum"], state["loss_samples"]
