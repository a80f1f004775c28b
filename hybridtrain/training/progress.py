"""The progress of a run: steps and samples done, and the batch that comes next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybridtrain.checkpoint.state import check_progress
from hybridtrain.data.batch import Batch, BatchSource
from hybridtrain.errors import ConfigError
from hybridtrain.step import OptimizerStep
from hybridtrain.trainer_options import TrainerOptions


class Progress:
    """Counts what a run has done; its batches come from `train`, which may be replaced.

    Args:
        train: gives the length of a run that is counted in epochs.
        options: the length of the run, and the batches of a step.
        optimizer_step: counts the steps.

    Attributes:
        samples: samples trained on, over all replicas.
        epoch, batch: the next batch.
        total_steps: the length of the run.

    Raises:
        ConfigError: see `TrainerOptions.total_steps`.
    """

    def __init__(
        self, train: BatchSource, options: TrainerOptions, optimizer_step: OptimizerStep
    ) -> None:
        self.samples = self.epoch = self.batch = 0
        self._optimizer_step = optimizer_step
        self.total_steps = options.total_steps(train.batches_per_epoch)
        self._options = options

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._optimizer_step.number

    def advance(self, batches: Sequence[Batch]) -> int:
        """Counts the batches of a step; returns their samples, over all replicas."""
        samples = sum(batch.total for batch in batches)
        self.samples += samples
        self.batch += len(batches)
        if batches[-1].last:
            self.epoch, self.batch = self.epoch + 1, 0
        return samples

    def epochs(self, train: BatchSource) -> float:
        """Returns the passes over the data; whole ones where their length is not known."""
        return self.epoch + self.batch / (train.batches_per_epoch or math.inf)

    def ends_epoch(self, every: int | None) -> bool:
        """Returns whether the last step has ended every `every`th epoch."""
        return bool(every and self.step and self.batch == 0 and self.epoch % every == 0)

    def state_dict(self, train: BatchSource) -> dict[str, int]:
        """Returns the progress; the position in the epoch counts samples, not batches."""
        return {
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch,
            "row": self.batch * train.batch_size,  # the files' key; words: ok
            "rows_per_step": self._samples_per_step(train),
        }

    def load_state_dict(self, state: Mapping[str, Any], train: BatchSource) -> None:
        """Loads a `state_dict`; with another batch size, at the same sample or just before it.

        Raises:
            CheckpointError: a number is not of its type or out of bounds.
            ConfigError: a run counted in epochs has another number of samples per step.
        """
        check_progress(state, self.total_steps)
        per_step, before = self._samples_per_step(train), state["rows_per_step"]
        if self._options.epochs is not None and before != per_step:
            raise ConfigError(
                f"batch_size={train.batch_size} x accumulate={self._options.accumulate} is "
                f"{per_step}, and the checkpoint was made with {before}: a run that is counted in "
                f"epochs keeps it; set steps= in place of epochs=, or start a new run"
            )
        self.samples, self.epoch = state["samples"], state["epoch"]
        self.batch = state["row"] // train.batch_size  # words: ok
        # the rest is what drop_last leaves out
        if self.batch >= (train.batches_per_epoch or math.inf):
            self.epoch, self.batch = self.epoch + 1, 0

    def _samples_per_step(self, train: BatchSource) -> int:
        return train.batch_size * self._options.accumulate
