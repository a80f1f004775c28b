"""Saving by all processes of a run: a failure in one of them ends the run everywhere.

`CheckpointStore(writers=...)` says who may write. A save then has one of three forms, by which the
table of the state (`state_table`) assigns tensors to processes:

    writers   form
    "auto"    alone if rank 0 has the whole state, else joint if all processes see the directory,
              else gathered
    "all"     joint, or alone in a single process
    "rank0"   alone if rank 0 has the whole state, else gathered: rank 0 requests the rest
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

    If the store saves in the background, this returns once the state is copied to host memory: by
    rank 0 if it has the whole state, or by each process if all write. If rank 0 gathers the state,
    this always returns after the write.

    Args:
        store: the store to save to, one per process. Its `writers` selects the processes that
            write.
        step: the number of completed optimizer steps.
        model: see `checkpoint_files`.
        optimizer: see `checkpoint_files`.
        progress: see `checkpoint_files`.
        states: further states to save, by name; see `checkpoint_files`. Every process calls their
            `state_dict`, which may communicate; rank 0's is saved.
        required: True if a full disk is an error; otherwise it is a warning, and a later save may
            succeed.
        prune: False to keep all older checkpoints this time.

    Returns:
        the checkpoint's directory, on every process; None if the disk is full.

    Raises:
        CheckpointError: this save, or the previous one in the background, failed; or some
            processes do not see the directory that they should write to.
    """
    world = model.world
    # in every process, in the same order, because a `state_dict` may communicate
    dicts = {name: entry.state_dict() for name, entry in states.items()}
    form = _form(store, model)

    def save_files(table: StateTable, joint: JointSave | None = None) -> Path | None:
        # copying the other processes' tensors would put the whole model into this one
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
            _log.warning("no checkpoint of step %d; training continues: %s", step, error)
            return None

    if form == "joint":
        # Before the table: the copies of the last save are about to be overwritten, and its
        # messages use the same group.
        _wait_for_last(store)
        joint = JointSave(world.saving_group(store.wait))
        path = save_files(StateTable(model, optimizer, form), joint)
        # for a background save, the name that the directory will have
        return world.broadcast(path)
    table = None
    if form == "gathered":
        table = StateTable(model, optimizer, form, world.saving_group(store.wait))

    def by_rank_0() -> Path | None:
        try:
            _wait_for_last(store)  # its copies are about to be overwritten
            return save_files(table or StateTable(model, optimizer))
        finally:
            if table is not None:
                # Also after a failure: the others are in `serve`, and wait for it.
                table.end()

    if table is not None:
        table.serve()  # returns at once on rank 0, which asks in `by_rank_0` and then ends it
    # the others wait in a group with a long timeout
    return world.from_main(by_rank_0)


def check_directory(store: CheckpointStore | None, world: World) -> None:
    """Checks before a run that all processes see the directory, if all are to write to it.

    A collective call.

    Raises:
        CheckpointError: some processes do not see it; the message lists them and both fixes.
    """
    if store is not None and store.writers == "all" and world.size > 1:
        store.is_seen_by_all(world, again=True)


@contextmanager
def finishing_saves(store: CheckpointStore | None, world: World) -> Iterator[None]:
    """Waits for a background save at the end of the block; a collective call.

    Raises:
        CheckpointError: the save failed. If the block raised an exception, the failure is logged
            instead, except for `Interrupted`, which promises a checkpoint.
    """
    if store is None:
        yield
        return
    try:
        yield
    except Interrupted:
        # An interrupt reaches all processes, which come here together.
        world.on_all(store.wait)
        raise
    except BaseException:
        # the other processes may be gone, so send them nothing
        with suppress(Exception):  # already logged by the saving thread
            store.wait()
        raise
    world.on_all(store.wait)


def _wait_for_last(store: CheckpointStore) -> None:
    try:
        store.wait()
    except NoSpaceError as error:
        # the next save replaces the failed one
        _log.warning("the previous checkpoint was not saved: %s", error)


def _form(store: CheckpointStore, model: HybridModel) -> Form:
    """Returns who writes, the same on every process; the first call may test the directory."""
    world = model.world
    # From the world and the options alone, so that it is the same on every process.
    whole = world.pipeline_group is None and model.options.shard == "none"
    may_be_joint = store.writers == "all" or (store.writers == "auto" and not whole)
    # `is_seen_by_all` is a collective call, and the conditions before it are the same everywhere.
    if world.size > 1 and may_be_joint and store.is_seen_by_all(world):
        return "joint"
    return "alone" if world.size == 1 or whole else "gathered"
