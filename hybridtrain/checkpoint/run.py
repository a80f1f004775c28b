"""A run and its checkpoints: saving, finding the newest checkpoint, restoring it.

    save_run      -> save_step     waits for the step, checks that weights are finite, saves
    resume_run    find_checkpoint -> restore_run -> fast-forwards the learning-rate schedule

`Trainer`, `Session`, `hybridtrain.smp` and custom loops use these functions. They know a step in
progress only through the protocol `SavableStep`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.checkpoint.manifest import MANIFEST
from hybridtrain.checkpoint.saving import save_checkpoint
from hybridtrain.checkpoint.state import restore_checkpoint
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.errors import CheckpointError
from hybridtrain.launch import Phase, activity
from hybridtrain.model import HybridModel
from hybridtrain.step import steps_taken
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class SavableStep(Protocol):
    """The interface of `OptimizerStep` that a checkpoint needs."""

    model: HybridModel
    number: int
    lr_schedule: LRScheduler | None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, or several combined into one; None: no optimizer state is saved."""

    def check_savable(self) -> None:
        """Raises if weights are not finite or differ between replicas; a collective call."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Sets the parameters to the values to save, inside the block."""

    def show_weights(self, training: bool) -> None:
        """Sets the parameters to the values for training, or to the ones to evaluate and save."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the step number, the loss scale, counts and losses."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict`."""


class FixedState:
    """A fixed state that is saved unchanged; a restored state replaces it.

    Args:
        content: JSON types for `state.json`; tensors and plain values for other files.

    Attributes:
        content: the state that is saved, or was restored.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = dict(content)

    def state_dict(self) -> dict[str, Any]:
        """Returns the content."""
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the content with the saved one."""
        self.content = state_dict


def save_run(
    step: SavableStep,
    directory: str | Path,
    *loaders: Stateful,
    states: Mapping[str, Stateful] | None = None,
    keep: int | None = None,
    progress: Stateful | None = None,
) -> Path:
    """Saves a checkpoint in a folder of `directory`; returns the folder. A collective call.

    Args:
        step: the optimizer step of the run; call this between two steps.
        directory: the directory of all checkpoints of the run.
        *loaders: the loaders to save positions of; pass them to `resume_run` in the same order.
        states: further states to save, by name.
        keep: the number of newest checkpoints to keep; None: all.
        progress: saved instead of the step's own `state_dict`, which it must include.

    Raises:
        CheckpointError: the checkpoint cannot be written.
        DivergedError: weights or optimizer state are not finite; nothing is written.
        UserError: the weights of the replicas differ; nothing is written.
    """
    store = CheckpointStore(directory, keep)
    path = save_step(step, store, _by_name(loaders, states), progress)
    assert path is not None  # a full disk raises an error
    return path


def save_step(
    step: SavableStep,
    store: CheckpointStore,
    states: Mapping[str, Stateful],
    progress: Stateful | None = None,
    *,
    record: Mapping[str, Any] | None = None,
    required: bool = True,
    prune: bool = True,
) -> Path | None:
    """Saves a checkpoint in `store`; a collective call.

    Args:
        step: as in `save_run`.
        store: the store of the run's checkpoints.
        states: as in `save_run`.
        progress: as in `save_run`.
        record: further JSON values for `state.json`, ignored when resuming.
        required: True if a full disk is an error; otherwise it is a warning.
        prune: whether older checkpoints may be removed.

    Returns:
        the folder; None if the disk is full.

    Raises:
        Exception: see `save_run`.
    """
    entries: dict[str, Stateful] = {"progress": progress or step}
    if record:
        entries["record"] = FixedState(record)
    with activity.during(Phase.SAVE, step.number), step.evaluation_weights():
        # Before any file exists: weights that are not finite must not replace good ones.
        step.check_savable()
        return save_checkpoint(
            store,
            step.number,
            step.model,
            step.optimizer,
            entries,
            states,
            required=required,
            prune=prune,
        )


def resume_run(
    step: SavableStep,
    path: str | Path,
    *loaders: Stateful,
    states: Mapping[str, Stateful] | None = None,
    missing_ok: bool = False,
    progress: Stateful | None = None,
) -> dict[str, Any] | None:
    """Resumes from the checkpoint at `path`, or from the newest one in that directory.

    Weights and optimizer state come from the checkpoint; hyperparameters stay as set in this
    program. The next loop over a loader continues in the saved epoch, and the learning-rate
    schedule is fast-forwarded.

    Args:
        step: the optimizer step of this program.
        path: a checkpoint, or the directory of all checkpoints.
        *loaders: as in `save_run`.
        states: as in `save_run`.
        missing_ok: do nothing if there is no checkpoint.
        progress: as in `save_run`.

    Returns:
        the saved progress; None if there is no checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model.
    """
    newest = find_checkpoint(path, step.model.world, missing_ok)
    if newest is None:
        return None
    return restore_run(step, newest, _by_name(loaders, states), progress)


def restore_run(
    step: SavableStep,
    checkpoint: Path,
    states: Mapping[str, Stateful],
    progress: Stateful | None = None,
) -> dict[str, Any]:
    """Loads `checkpoint` into a step and its states, and fast-forwards its schedule.

    Returns:
        the saved progress.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    step.show_weights(training=False)  # the form in which they were saved
    saved = restore_checkpoint(
        checkpoint, step.model, step.optimizer, {"progress": progress or step}, states
    )
    # After the optimizer's state: a schedule changes its learning rates.
    if step.lr_schedule is not None:
        replay(step.lr_schedule, step.number - steps_taken(step.lr_schedule))
    return saved


def find_checkpoint(
    path: str | Path,
    world: World,
    missing_ok: bool = False,
    choose: Callable[[CheckpointStore], Path | None] = CheckpointStore.newest,
) -> Path | None:
    """Returns the checkpoint at `path`, or the newest in that directory; a collective call.

    Args:
        path: a checkpoint, or the directory of all checkpoints.
        world: the processes; rank 0 searches.
        missing_ok: return None if there is no checkpoint.
        choose: selects a checkpoint of a directory, instead of the newest.

    Raises:
        CheckpointError: there is no checkpoint, and `missing_ok` is False.
    """
    path = Path(path)
    checkpoint = world.from_main(
        lambda: path if (path / MANIFEST).exists() else choose(CheckpointStore(path))
    )
    if checkpoint is None and not missing_ok:
        raise CheckpointError(f"{path} contains no checkpoint")
    return checkpoint


def replay(lr_schedule: LRScheduler, steps: int) -> None:
    """Takes `steps` steps of a learning-rate schedule, for a resumed run.

    Its state is not loaded, because its parameters and length are the new run's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about scheduler steps without optimizer steps
        for _ in range(steps):
            # From 0, one by one: a schedule may be recursive in its rates.
            lr_schedule.step()


def _by_name(
    loaders: Sequence[Stateful], states: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    return {f"loader{number}": loader for number, loader in enumerate(loaders)} | dict(states or {})
