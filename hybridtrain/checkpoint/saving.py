"""Saving by all processes of a run: what fails in one of them ends the run everywhere.

Who writes is the store's choice, `CheckpointStore(writers=...)`, and an assignment in the table of
the state (`state_table`): `alone`, `gathered` or `joint`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from hybridtrain.checkpoint import state
from hybridtrain.checkpoint.joint_save import JointSave
from hybridtrain.checkpoint.state_table import Form, StateTable
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError
from hybridtrain.errors import Interrupted
from hybridtrain.model import HybridModel
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_log = logging.getLogger(__name__)


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    model: HybridModel,
    optimizer: Optimizer | None,
    progress: Mapping[str, Stateful],
    states: Mapping[str, Stateful] = {},
    *,
    required: bool = True,
    prune: bool = True,
) -> Path | None:
    """Saves a checkpoint; a collective call.

    If the store saves in the background, this returns when the state is copied to host memory:
    where rank 0 has all of it, by rank 0; where all processes write, each its share. Where rank 0
    gathers the state, it is always written before this returns.

    Args:
        store: where it goes; every process has one. Its `writers` are the processes
            that write.
        step: the optimizer steps done.
        model: see `checkpoint_files`.
        optimizer: see `checkpoint_files`.
        progress: see `checkpoint_files`.
        states: what else is saved, by name; see `checkpoint_files`. Every process asks them
            for their `state_dict`, which may communicate; rank 0's is saved.
        required: a full disk is an error; otherwise it is a warning, and a later save may succeed.
        prune: False to remove no older checkpoint this time.

    Returns:
        the directory of the checkpoint, on every process; None if the disk is full.

    Raises:
        CheckpointError: this save, or the one before in the background, has failed; or not all
            processes see the directory that they should write to.
    """
    world = model.world
    # in every process, in the same order: a `state_dict` may communicate
    dicts = {name: entry.state_dict() for name, entry in states.items()}
    form = _form(store, model)

    def save_files(table: StateTable, joint: JointSave | None = None) -> Path | None:
        # copies of what other processes have would be the whole model in this one
        background = store.background and form != "gathered"
        copies = store.host_copies if background else None
        files = state.checkpoint_files(
            model, optimizer, progress, dicts, table=table, copies=copies
        )
        try:
            save = store.save if joint is None else partial(joint.save, store)
            return save(step, files, prune=prune, background=background)
        except NoSpaceError as error:
            if required:
                raise
            _log.warning("no checkpoint of step %d; training goes on: %s", step, error)
            return None

    if form == "joint":
        _wait_for_last(store)
        joint = JointSave(world.saving_group(store.wait))
        path = save_files(StateTable(model, optimizer, form), joint)
        # of a save in the background it is the name that it will have
        return world.broadcast(path)
    table = None
    if form == "gathered":
        table = StateTable(model, optimizer, form, world.saving_group(store.wait))

    def by_rank_0() -> Path | None:
        try:
            _wait_for_last(store)  # its copies are used again
            return save_files(table or StateTable(model, optimizer))
        finally:
            if table is not None:
                table.end()

    if table is not None:
        table.serve()  # nothing on rank 0, which asks in `by_rank_0` and then ends it
    # the others wait in a group where a long wait is allowed
    return world.from_main(by_rank_0)


def check_directory(store: CheckpointStore | None, world: World) -> None:
    """Checks before a run that all processes see the directory, if all are to write into it.

    A collective call.

    Raises:
        CheckpointError: some do not; names them, and both ways out.
    """
    if store is not None and store.writers == "all" and world.size > 1:
        store.is_seen_by_all(world, again=True)


@contextmanager
def finishing_saves(store: CheckpointStore | None, world: World) -> Iterator[None]:
    """Waits at the end of the block for a save in the background; a collective call.

    Raises:
        CheckpointError: the save has failed. After an exception in the block this is logged
            instead, unless that is `Interrupted`, which promises a checkpoint.
    """
    if store is None:
        yield
        return
    try:
        yield
    except Interrupted:
        world.on_all(store.wait)
        raise
    except BaseException:
        # the other processes may be gone: nothing is sent to them
        with suppress(Exception):  # which its thread has logged
            store.wait()
        raise
    world.on_all(store.wait)


def _wait_for_last(store: CheckpointStore) -> None:
    try:
        store.wait()
    except NoSpaceError as error:
        # the next save is newer than the one that has failed
        _log.warning("the last checkpoint was not saved: %s", error)


def _form(store: CheckpointStore, model: HybridModel) -> Form:
    """Returns who writes, the same on every process; the first call may try the directory."""
    world = model.world
    whole = world.pipeline_group is None and model.options.shard == "none"
    may_be_joint = store.writers == "all" or (store.writers == "auto" and not whole)
    if world.size > 1 and may_be_joint and store.is_seen_by_all(world):
        return "joint"
    return "alone" if world.size == 1 or whole else "gathered"
