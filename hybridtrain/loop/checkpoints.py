"""The checkpoints of a run: the latest, and the one with the best evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrain.checkpoint import CheckpointStore, SavableStep, save_step
from hybridtrain.errors import CheckpointError, ConfigError, did_you_mean, setting
from hybridtrain.loss import direction, metric_of
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer

_log = logging.getLogger(__name__)


class BestCheckpoint:
    """Remembers the best evaluation so far.

    Args:
        name: the value to compare; None to mark no checkpoint as best.
        mode: `min`, `max`, or None to infer it; see `hybridtrain.loss.metrics.direction`.
        metrics: the metric of each value of an evaluation; None if the run has no evaluation.

    Attributes:
        step: the step of the best evaluation; None before the first.
        value: the best value.

    Raises:
        ConfigError: the evaluation has no value of this name.
    """

    def __init__(
        self, name: str | None, mode: str | None, metrics: Mapping[str, Any] | None
    ) -> None:
        self.step: int | None = None
        self.value: float | None = None
        self._name = name
        self._smallest = True
        self._criterion: str | None = None
        self._unsure: int | None = None  # the best step, until its save is known to have succeeded
        if name is None:
            return
        if metrics is None:
            raise ConfigError(f"{setting('best', name)} needs an evaluation, but this run has none")
        metric = metric_of(name, metrics)
        if metric is None:
            raise ConfigError(
                f"{setting('best', name)} is not a value of the evaluation: "
                f"{did_you_mean(name, metrics)}"
            )
        mode = direction("best_mode", name, metrics[metric], mode)
        self._smallest = mode == "min"
        self._criterion = f"{mode} {name}"

    def improves(self, step: int, result: Mapping[str, float]) -> bool:
        """Returns whether the evaluation at `step` is the best so far, and records it if so."""
        if self._name is None or not math.isfinite(value := result[self._name]):
            return False
        if self.value is not None and not (
            value < self.value if self._smallest else value > self.value
        ):
            return False
        self.step, self.value = step, value
        return True

    def mark(self, step: int, store: CheckpointStore, world: World, saved: bool = True) -> None:
        """Marks the saved checkpoint of `step` if it is the best; a collective call.

        If the best checkpoint could not be saved, the previous best is marked again. For a
        background save this is known at the next save.
        """
        if self.step is None or self.value is None:
            return
        if self.step == step and saved:
            value = self.value
            world.on_main(lambda: store.mark_best(step, value, self._criterion))
            self._unsure = step
        elif self.step in (step, self._unsure):
            self._fall_back_if_not_saved(store, world)
            self._unsure = None

    def _fall_back_if_not_saved(self, store: CheckpointStore, world: World) -> None:
        def marked() -> tuple[int | None, float | None]:
            try:
                mark = store.best_mark()
            except CheckpointError as error:
                _log.warning("%s", error)
                return self.step, self.value
            if mark is None or mark.criterion not in (None, self._criterion):
                return None, None
            return mark.step, mark.value

        self.step, self.value = world.from_main(marked)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best step, its value and the criterion, as JSON types."""
        return {
            "best_step": self.step,
            "best_value": self.value,
            "best_criterion": self._criterion,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, unless it was made with another criterion."""
        self.step, self.value = state["best_step"], state["best_value"]
        criterion = state["best_criterion"]
        if self._criterion is None or self.step is None or criterion in (None, self._criterion):
            return
        _log.warning(
            "the checkpoint's best step, %s, was chosen by %s: this run compares %s and starts "
            "over",
            self.step, criterion, self._criterion,
        )  # fmt: skip
        self.step = self.value = None


class RunCheckpoints:
    """Writes the checkpoints of one run; holds no reference to its trainer.

    Args:
        best: the best evaluation so far.

    Attributes:
        step: the step of the last checkpoint saved or resumed; -1 before the first.
        path: its directory.
        resumed_from: the checkpoint that the run was resumed from.
    """

    def __init__(self, best: BestCheckpoint) -> None:
        self.step = -1
        self.path: Path | None = None
        self.resumed_from: Path | None = None
        self._best = best

    def write(
        self, trainer: Trainer, step: SavableStep, *, required: bool, prune: bool
    ) -> Path | None:
        """Saves the state of `trainer`, which has a store; returns the checkpoint's path.

        Args:
            trainer: the trainer whose progress and states are saved.
            step: the trainer's step, with its model and optimizer.
            required: whether a full disk is an error.
            prune: whether older checkpoints may be removed.

        Returns:
            None if the disk is full.
        """
        assert trainer.store is not None
        path = save_step(
            step,
            trainer.store,
            trainer.states,
            trainer,
            record=trainer.record,
            required=required,
            prune=prune,
        )
        if path is not None:
            self.step, self.path = trainer.step, path
        return path

    def begin_at(self, trainer: Trainer, path: Path) -> None:
        """Records that the run continues from the restored checkpoint at `path`."""
        self.resumed_from = self.path = path
        self.step = trainer.step
        self.mark_best(trainer)  # the run may have ended between saving and marking

    def mark_best(self, trainer: Trainer, saved: bool = True) -> None:
        """Marks the checkpoint of this step, if it is the best one; a collective call."""
        if trainer.store is not None:
            self._best.mark(trainer.step, trainer.store, trainer.world, saved=saved)

    def on_disk(self, trainer: Trainer, step: int) -> Path | None:
        """Returns the last checkpoint up to `step`; rank 0 checks that it exists.

        A background save may have failed.
        """
        if not trainer.world.is_main or trainer.store is None:
            return self.path
        if self.path is not None and self.step <= step and self.path.exists():
            return self.path
        return trainer.store.newest_up_to(step)
