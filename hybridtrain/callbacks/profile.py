"""PyTorch's profiler over some steps of a run, with stages, micro-batches and layers by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from hybridtrain._torch_private import all_threads_profiled
from hybridtrain.callbacks.base import Callback
from hybridtrain.errors import ConfigError
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer

_log = logging.getLogger(__name__)


class Profile(Callback):
    """Writes a trace of some steps, one file for each process; at other steps it does nothing.

    A trace has the operations of all threads, those of the GPUs where there are some, and around
    them the actions of the schedule (`F3@1`: the forward of micro-batch 3 on stage 1) and the
    layers by their names. It opens in ui.perfetto.dev and chrome://tracing.

    Another profiler of `torch.profiler` sees the threads of the stages if it is made with
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.

    Args:
        directory: of the traces, `rank_0_steps_20_to_25.json` and so on.
        first: the first step in them.
        steps: how many.
        memory: record each allocation as well.

    Raises:
        ConfigError: a number is not 1 or more.
    """

    @names_checked
    def __init__(
        self, directory: str | Path, first: int = 10, steps: int = 3, memory: bool = False
    ) -> None:
        for name, value in {"first": first, "steps": steps}.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value} must be a whole number of at least 1")
        self._directory = Path(directory)
        self._first, self._last = first, first + steps - 1
        self._memory = memory
        self._profiler: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Begins with the run, if its first step is to be in the trace."""
        self._begin_before(trainer.step + 1)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Begins before the first step, and writes after the last one."""
        if self._profiler is not None and trainer.step >= self._last:
            self._end(trainer.world.rank, trainer.step)
        self._begin_before(trainer.step + 1)

    def on_end(self, trainer: Trainer) -> None:
        """Writes what there is, if the run ends before the last step of the trace."""
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
            self._profiler.start()

    def _end(self, rank: int, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank_{rank}_steps_{self._first}_to_{step}.json"
        profiler.export_chrome_trace(str(path))
        if rank == 0:
            _log.info("trace of the profiler: %s", path)
