"""The checkpoints of a run: the last one, and the one of the best evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from hybridtrain.checkpoint import saving, state
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.model import HybridModel
from hybridtrain.training.best_checkpoint import BestCheckpoint

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class RunCheckpoints:
    """Writes and restores the checkpoints of one run.

    Args:
        store: where they go; None: none are saved.
        model: the model.
        optimizer: over its parameters.
        progress: of the run; its state goes into `state.json`.
        states: what else is saved, by name.
        best: the best evaluation so far.

    Attributes:
        step: of the last checkpoint that was saved or resumed; -1 before the first.
        path: where it is.
        resumed_from: the checkpoint that the run has begun from.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        model: HybridModel,
        optimizer: Optimizer,
        progress: Stateful,
        states: Mapping[str, Stateful],
        best: BestCheckpoint,
    ) -> None:
        self.step = -1
        self.path: Path | None = None
        self.resumed_from: Path | None = None
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._progress = {"trainer": progress}
        self._states = states
        self._best = best

    def write(self, step: int, *, required: bool, prune: bool) -> Path | None:
        """Saves the state after `step`; returns its place, None if the disk is full.

        Args:
            step: the optimizer steps done.
            required: a full disk is an error.
            prune: whether older checkpoints may be removed.
        """
        assert self._store is not None
        path = saving.save(
            self._store,
            step,
            self._model,
            self._optimizer,
            self._progress,
            self._states,
            required=required,
            prune=prune,
        )
        if path is not None:
            self.step, self.path = step, path
        return path

    def restore(self, path: Path) -> None:
        """Loads the checkpoint at `path`; `begun_from` must follow."""
        state.restore(path, self._model, self._optimizer, self._progress, self._states)

    def begun_from(self, path: Path, step: int) -> None:
        """Notes that the run goes on from the checkpoint at `path`, of `step`."""
        self.resumed_from = self.path = path
        self.step = step
        self.mark_best(step)  # in case the run ended between the two

    def mark_best(self, step: int, saved: bool = True) -> None:
        """Marks the checkpoint of `step`, if it is the best one; a collective call."""
        if self._store is not None:
            self._best.mark(step, self._store, self._model.world, saved=saved)

    def on_disk(self, step: int) -> Path | None:
        """Returns the last checkpoint up to `step`; on rank 0 one that is there.

        A save in the background may have failed since.
        """
        if not self._model.world.is_main or self._store is None:
            return self.path
        if self.path is not None and self.step <= step and self.path.exists():
            return self.path
        return self._store.newest_up_to(step)
