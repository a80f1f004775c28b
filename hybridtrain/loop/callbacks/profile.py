"""Runs PyTorch's profiler for some steps, with named stages, micro-batches and layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch.profiler import ProfilerActivity, profile

from hybridtrain._base.torch_private import (
    all_threads_profiled,
    record_cuda_memory,
    write_cuda_memory,
)
from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer

_log = logging.getLogger(__name__)


class Profile(Callback):
    """Writes a profiler trace of some steps, one file per process.

    A trace has the operations of all threads and GPUs, grouped by the actions of the schedule
    (`F3@1`: the forward of micro-batch 3 on stage 1) and by layer name. It opens in
    ui.perfetto.dev, chrome://tracing and, with torch-tb-profiler, in TensorBoard.

    Your own `torch.profiler` profiler sees the threads of the stages if you create it with
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.

    Args:
        directory: the folder for the traces, such as `rank_0_steps_20_to_25.pt.trace.json`.
        first: the first step to profile.
        steps: the number of steps to profile; or the first and last step, `[20, 25]`.
        memory: record each allocation as well; on GPUs also a snapshot for pytorch.org/memory_viz,
            `rank_0_steps_20_to_25.memory.pickle`.

    Raises:
        ConfigError: a number is not 1 or more, or the last step comes before the first.
    """

    @names_checked
    def __init__(
        self,
        directory: str | Path,
        first: int = 10,
        steps: int | Sequence[int] = 3,
        memory: bool = False,
    ) -> None:
        if not isinstance(steps, int | float | str):
            first, steps = _counted(steps)
        for name, value in {"first": first, "steps": steps}.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{setting(name, value)} must be a whole number of at least 1")
        self._directory = Path(directory)
        self._first, self._last = first, first + steps - 1
        self._memory = memory
        self._profiler: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Starts the profiler if the run's first step is to be profiled."""
        self._begin_before(trainer.step + 1)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Starts the profiler before the first step, and writes the trace after the last."""
        if self._profiler is not None and trainer.step >= self._last:
            self._end(trainer.world.rank, trainer.step)
        self._begin_before(trainer.step + 1)

    def on_end(self, trainer: Trainer) -> None:
        """Writes a partial trace if the run ends before the last step to profile."""
        if self._profiler is not None:
            self._end(trainer.world.rank, trainer.step)

    def _begin_before(self, step: int) -> None:
        if step == self._first:
            on_gpu = torch.cuda.is_available()
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
                profile_memory=self._memory,
                experimental_config=all_threads_profiled(),
            )
            if self._memory and on_gpu:
                record_cuda_memory()
            self._profiler.start()

    def _end(self, rank: int, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank}_steps_{self._first}_to_{step}"
        if self._memory and torch.cuda.is_available():
            snapshot = self._directory / f"{name}.memory.pickle"
            snapshot.unlink(missing_ok=True)  # not through a link
            write_cuda_memory(snapshot)
        path = self._directory / f"{name}.pt.trace.json"
        # The profiler would write through a link, and a run directory may be someone else's.
        temporary = path.with_name(f".{uuid4().hex}.{path.name}")
        try:
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if rank == 0:
            _log.info("wrote the profiler trace to %s", path)


def _counted(steps: Sequence[int]) -> tuple[int, int]:
    """Returns the first step of an inclusive range, and the number of steps."""
    if len(steps) != 2 or any(type(step) is not int for step in steps) or steps[1] < steps[0]:
        raise ConfigError(
            f"{setting('steps', steps)} must be a number of steps, or the first and last step, "
            "such as [20, 25]"
        )
    return steps[0], steps[1] - steps[0] + 1
