"""Statistics of a run: the loss, and the times and memory of the stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hybridtrain.model import HybridModel
from hybridtrain.pipeline.timeline import Timeline, stage_times
from hybridtrain.schedule import Spans, bubble_fraction, predict


class RunStats:
    """Accumulates statistics between two logged steps; only the reading methods wait for a device.

    Attributes:
        loss: the mean training loss when it was last read.
        bubble: the mean bubble fraction of the recorded steps.
    """

    def __init__(self, model: HybridModel) -> None:
        self.loss: float | None = None
        self.bubble: float | None = None
        self._model = model
        self._reduced = model.world.replicas > 1  # the last backward waits for other replicas
        self._losses: list[torch.Tensor] = []
        self._samples: list[float] = []
        # Sums, not means: a sum of float32 losses times counts is exact in float64 as long as they
        # do not differ by 2**20 or so, and so is the same however it was put together.
        self._sum: torch.Tensor | float = 0.0
        self._count = 0.0
        self._gathered = 0.0, 0.0  # the sums of all replicas up to the last `gather`
        self._timeline: Timeline | None = None
        self._bubbles: list[float] = []
        self._times = [(0.0, 0.0)] * len(model.plan.stages)

    def add(self, loss: torch.Tensor, samples: float) -> None:
        """Adds a batch: its mean loss, over how many samples (or what counts)."""
        self._losses.append(loss)
        self._samples.append(samples)
        if len(self._losses) == 1000:  # so that they do not pile up where nothing is logged
            self._fold()

    def record(self, timeline: Timeline | None) -> None:
        """Keeps the timeline of the last batch, if it was recorded."""
        self._timeline = timeline

    @property
    def recorded(self) -> bool:
        """True if the last batch was recorded: a user's own `training_step` need not do so."""
        return self._timeline is not None

    def _fold(self) -> None:
        """Replaces what was added by its sums."""
        if not self._losses:
            return
        losses = torch.stack(self._losses).double()
        weights = torch.tensor(self._samples, dtype=torch.float64, device=losses.device)
        self._sum = torch.dot(losses, weights) + self._sum
        self._count += sum(self._samples)
        self._losses, self._samples = [], []

    def gather(self) -> None:
        """Adds up what all replicas have, for `state_dict`; a collective call."""
        self._fold()
        sums = torch.tensor([float(self._sum), self._count], dtype=torch.float64)
        total, count = self._model.reduce_loss(sums).tolist()
        self._gathered = self._gathered[0] + total, self._gathered[1] + count
        self._sum, self._count = 0.0, 0

    def read_loss(self) -> float:
        """Returns the mean loss over all samples of all replicas since the last reading.

        NaN if there were none; a collective call.
        """
        self.gather()
        total, count = self._gathered
        self._gathered = 0.0, 0.0
        self.loss = total / count if count else math.nan
        return self.loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of all replicas up to the last `gather`, in JSON's types."""
        return {"loss_sum": self._gathered[0], "loss_samples": self._gathered[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict` on every process; checkpoints of earlier versions have none."""
        self._gathered = state.get("loss_sum", 0.0), state.get("loss_samples", 0.0)

    def read_stages(self, optimizer: Optimizer) -> dict[str, float]:
        """Returns times, memory and bubble of the last batch, if it was recorded, by tag."""
        if self._timeline is None:
            return {}
        spans = self._timeline.spans()
        self._bubbles.append(bubble_fraction(spans))
        self.bubble = sum(self._bubbles) / len(self._bubbles)
        times = stage_times(spans, len(self._times), self._reduced)
        self._times = [(time.forward_ms, time.backward_ms) for time in times]
        values = {"pipeline/bubble_fraction": self._bubbles[-1]}
        for index, stage in enumerate(self.stages(optimizer)):
            values[f"stage{index}/forward_ms"] = stage["forward_ms"]
            values[f"stage{index}/backward_ms"] = stage["backward_ms"]
            values[f"stage{index}/memory_bytes"] = stage["peak_memory_bytes"]
        return values

    def timelines(self) -> tuple[Spans, Spans]:
        """Returns the predicted and the measured spans of the last recorded step, in seconds.

        The prediction is the schedule's, for the mean measured costs of each stage.
        """
        assert self._timeline is not None
        spans = self._timeline.spans()
        return predict(self._timeline.schedule, spans, self._reduced), spans

    def stages(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Returns the summary of each stage, with the times that were last read."""
        return [
            {**stage, "forward_ms": forward, "backward_ms": backward}
            for stage, (forward, backward) in zip(
                self._model.stage_summaries(optimizer), self._times, strict=True
            )
        ]
