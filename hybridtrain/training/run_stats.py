"""Statistics of a run: the times and memory of its stages."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hybridtrain.model import HybridModel
from hybridtrain.pipeline import Timeline, stage_times
from hybridtrain.schedule import Spans, bubble_fraction, predict


class RunStats:
    """Keeps the timeline of the last recorded step; only the reading methods wait for a device.

    Attributes:
        bubble: the mean bubble fraction of the recorded steps.
    """

    def __init__(self, model: HybridModel) -> None:
        self.bubble: float | None = None
        self._model = model
        self._reduced = model.world.replicas > 1  # the last backward waits for other replicas
        self._timeline: Timeline | None = None
        self._bubbles: list[float] = []
        self._times = [(0.0, 0.0)] * len(model.plan.stages)

    def record(self, timeline: Timeline | None) -> None:
        """Keeps the timeline of the last batch, if it was recorded."""
        self._timeline = timeline

    @property
    def recorded(self) -> bool:
        """True if the last batch was recorded: a user's own `training_step` need not do so."""
        return self._timeline is not None

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
