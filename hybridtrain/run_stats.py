"""What a run measures of itself: loss, and the stages' times and memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from hybridtrain.memory import optimizer_bytes
from hybridtrain.model import HybridModel
from hybridtrain.monitor.timeline import Lanes
from hybridtrain.pipeline.timeline import Timeline, stage_times
from hybridtrain.schedule import bubble_fraction, simulate


class RunStats:
    """Adds up between two logged steps; only the reading methods wait for a device.

    TraceGuards:
        loss: the mean training loss as last read.
        bubble: the mean bubble of the recorded batches.
    """

    def __init__(self, model: HybridModel) -> None:
        self.loss: float | None = None
        self.bubble: float | None = None
        self._model = model
        self._losses: list[torch.Tensor] = []
        self._rows: list[int] = []
        self._trace: Timeline | None = None
        self._bubbles: list[float] = []
        self._times: list[tuple[float, float]] = [(0.0, 0.0)] * len(model.stages)

    def add(self, loss: torch.Tensor, rows: int, trace: Timeline | None) -> None:
        """Takes in a batch: its mean loss, its rows and, if it was recorded, what ran when."""
        self._losses.append(loss)
        self._rows.append(rows)
        if len(self._losses) == 1000:
            self._fold()
        self._trace = trace

    def _fold(self) -> None:
        """Replaces what was added so far by its mean and number of rows."""
        rows = torch.tensor(self._rows, dtype=torch.float32, device=self._losses[0].device)
        total = sum(self._rows)  # 0 where the batches were smaller than the number of replicas
        self._losses = [torch.dot(torch.stack(self._losses).float(), rows) / max(total, 1)]
        self._rows = [total]

    def read_loss(self) -> float:
        """The mean over all rows of all replicas since the last reading."""
        self._fold()
        rows = float(self._rows[0])
        sums = torch.tensor([float(self._losses[0]) * rows, rows], dtype=torch.float64)
        total, rows = self._model.world.sum(sums).tolist()
        self.loss = total / rows
        self._losses, self._rows = [], []
        return self.loss

    def read_stages(self, optimizer: Optimizer) -> dict[str, float]:
        """Times, memory and bubble of the last batch that was recorded, by tag."""
        if self._trace is None:
            return {}
        spans = self._trace.spans()
        self._bubbles.append(bubble_fraction(spans))
        self.bubble = sum(self._bubbles) / len(self._bubbles)
        times = stage_times(spans, len(self._model.stages))
        self._times = [(time.forward_ms, time.backward_ms) for time in times]
        memory = self._memory(optimizer)
        values = {"pipeline/bubble_fraction": self._bubbles[-1]}
        for index, (forward, backward) in enumerate(self._times):
            values[f"stage{index}/forward_ms"] = forward
            values[f"stage{index}/backward_ms"] = backward
            values[f"stage{index}/memory_bytes"] = memory[index]
        return values

    def timelines(self) -> tuple[Lanes, Lanes]:
        """What the schedule predicts of the last traced step, from its mean costs, and it."""
        assert self._trace is not None
        spans = self._trace.spans()
        chunks = 1 + max(span.action.microbatch for span in spans[0])
        costs = [
            (time.forward_ms / chunks / 1e3, time.backward_ms / chunks / 1e3)
            for time in stage_times(spans, len(self._model.stages))
        ]
        forward, backward = zip(*costs, strict=True)
        return simulate(self._model.schedule(chunks), forward, backward), spans

    def stages(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """What the summary says of each stage."""
        return [
            {
                "layers": [layer.name for layer in stage.layers],
                "parameters": stage.count_parameters(),
                "peak_memory_bytes": memory,
                "forward_ms": forward,
                "backward_ms": backward,
            }
            for stage, memory, (forward, backward) in zip(
                self._model.stages, self._memory(optimizer), self._times, strict=True
            )
        ]

    def _memory(self, optimizer: Optimizer) -> list[int]:
        return [
            # on a GPU the allocator has counted the optimizer's state already
            memory + (stage.device.type != "cuda") * optimizer_bytes(stage.module, optimizer)
            for stage, memory in zip(self._model.stages, self._model.memory_bytes(), strict=True)
        ]
