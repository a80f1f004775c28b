"""A run and its checkpoints: save it, find the newest checkpoint, restore it and go on.

    save_run      -> save_step     awaits the step, checks that its weights are finite, saves
    resume_run    find_checkpoint -> restore_run -> the learning-rate schedule is stepped on

`Trainer`, `Session`, `hybridtrain.smp` and loops written by hand use these. A step in progress is
known here by what a checkpoint needs of it (`SavableStep`).
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
from hybridtrain.model import HybridModel
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class SavableStep(Protocol):
    """The part of an `OptimizerStep` that a checkpoint needs."""

    model: HybridModel
    number: int
    lr_schedule: LRScheduler | None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, or several as one; None: none is saved."""

    def check_savable(self) -> None:
        """Raises if the weights are not finite, or differ between replicas; a collective call."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Gives the parameters the values to save, in the block."""

    def show_weights(self, training: bool) -> None:
        """Gives the parameters the values to train on, or those to evaluate and save."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the step, the loss scale, counts and losses."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict`."""


class FixedState:
    """A given state, which is saved unchanged; a restored one takes its place.

    Args:
        content: of JSON's types for `state.json`, tensors and plain values for other files.

    Attributes:
        content: what is saved, or was restored.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = dict(content)

    def state_dict(self) -> dict[str, Any]:
        """Returns the content."""
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what was saved."""
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
        step: of the run, which is between two steps.
        directory: of all checkpoints of the run.
        *loaders: whose positions are saved, in an order that `resume_run` is given too.
        states: what else is saved, by name.
        keep: how many of the newest to keep; None: all.
        progress: what is saved in place of the step's own `state_dict`, which it includes.

    Raises:
        CheckpointError: it cannot be written.
        DivergedError: weights or moments are not finite; nothing is written.
        UserError: the weights of the replicas differ; nothing is written.
    """
    store = CheckpointStore(directory, keep)
    path = save_step(step, store, _by_name(loaders, states), progress)
    assert path is not None  # a full disk is an error
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
        store: of the run's checkpoints.
        states: as in `save_run`.
        progress: as in `save_run`.
        record: what else `state.json` has, in JSON's types; no resume loads it.
        required: a full disk is an error; otherwise a warning.
        prune: whether older checkpoints may be removed.

    Returns:
        the folder; None if the disk is full.

    Raises:
        Exception: see `save_run`.
    """
    entries: dict[str, Stateful] = {"progress": progress or step}
    if record:
        entries["record"] = FixedState(record)
    with step.evaluation_weights():
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
    """Continues from the checkpoint at `path`, or from the newest in that directory.

    Weights and the optimizer's state are the checkpoint's; hyperparameters are this program's. The
    next loop over a loader continues in its epoch, and the schedule is stepped on to where it was.

    Args:
        step: of this program.
        path: a checkpoint, or the directory of all.
        *loaders: as in `save_run`.
        states: as in `save_run`.
        missing_ok: if there is none, do nothing.
        progress: as in `save_run`.

    Returns:
        what the checkpoint says of its progress; None if there is none.

    Raises:
        CheckpointError: it is missing or damaged, or is of another model.
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
    """Loads `checkpoint` into a step and what belongs to it, and steps its schedule on.

    Returns:
        what the checkpoint says of its progress.

    Raises:
        CheckpointError: it is damaged, or is of another model.
    """
    step.show_weights(training=False)  # as they were saved
    saved = restore_checkpoint(
        checkpoint, step.model, step.optimizer, {"progress": progress or step}, states
    )
    if step.lr_schedule is not None:
        replay(step.lr_schedule, step.number)
    return saved


def find_checkpoint(
    path: str | Path,
    world: World,
    missing_ok: bool = False,
    choose: Callable[[CheckpointStore], Path | None] = CheckpointStore.newest,
) -> Path | None:
    """Returns the checkpoint at `path`, or the newest in that directory; a collective call.

    Args:
        path: a checkpoint, or the directory of all.
        world: the processes; rank 0 looks.
        missing_ok: return None if no checkpoint is found.
        choose: the one of a directory to take, in place of the newest.

    Raises:
        CheckpointError: no checkpoint is found, unless `missing_ok`.
    """
    path = Path(path)
    checkpoint = world.from_main(
        lambda: path if (path / MANIFEST).exists() else choose(CheckpointStore(path))
    )
    if checkpoint is None and not missing_ok:
        raise CheckpointError(f"{path} has no checkpoint")
    return checkpoint


def replay(lr_schedule: LRScheduler, steps: int) -> None:
    """Steps a learning-rate schedule from 0 again, for a run that is resumed.

    It is not loaded, since its parameters and length are this run's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
        for _ in range(steps):
            lr_schedule.step()


def _by_name(
    loaders: Sequence[Stateful], states: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    return {f"loader{number}": loader for number, loader in enumerate(loaders)} | dict(states or {})
