"""The checkpoints of a run: the last one, and the one of the best evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybridtrain.checkpoint import restore_checkpoint, save_checkpoint
from hybridtrain.training.best_checkpoint import BestCheckpoint

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer


class RunCheckpoints:
    """Writes and restores the checkpoints of one run; keeps no reference to its trainer.

    Args:
        best: the best evaluation so far.

    Attributes:
        step: of the last checkpoint that was saved or resumed; -1 before the first.
        path: where it is.
        resumed_from: the checkpoint that the run has begun from.
    """

    def __init__(self, best: BestCheckpoint) -> None:
        self.step = -1
        self.path: Path | None = None
        self.resumed_from: Path | None = None
        self._best = best

    def write(self, trainer: Trainer, *, required: bool, prune: bool) -> Path | None:
        """Saves the state of `trainer`, which has a store; returns its place.

        Args:
            trainer: its model, optimizer, progress and states are saved.
            required: a full disk is an error.
            prune: whether older checkpoints may be removed.

        Returns:
            None if the disk is full.
        """
        assert trainer.store is not None
        path = save_checkpoint(
            trainer.store,
            trainer.step,
            trainer.model,
            trainer.optimizer,
            {"trainer": trainer},
            trainer.states,
            required=required,
            prune=prune,
        )
        if path is not None:
            self.step, self.path = trainer.step, path
        return path

    def restore(self, trainer: Trainer, path: Path) -> None:
        """Loads the checkpoint at `path`, from which the run goes on."""
        restore_checkpoint(
            path, trainer.model, trainer.optimizer, {"trainer": trainer}, trainer.states
        )
        self.resumed_from = self.path = path
        self.step = trainer.step
        self.mark_best(trainer)  # in case the run ended between the two

    def mark_best(self, trainer: Trainer, saved: bool = True) -> None:
        """Marks the checkpoint of this step, if it is the best one; a collective call."""
        if trainer.store is not None:
            self._best.mark(trainer.step, trainer.store, trainer.world, saved=saved)

    def on_disk(self, trainer: Trainer, step: int) -> Path | None:
        """Returns the last checkpoint up to `step`; on rank 0 one that is there.

        A save in the background may have failed since.
        """
        if not trainer.world.is_main or trainer.store is None:
            return self.path
        if self.path is not None and self.step <= step and self.path.exists():
            return self.path
        return trainer.store.newest_up_to(step)
