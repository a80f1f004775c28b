"""Saving by all processes of a run: what fails in one of them ends the run everywhere.

There are three forms of a save. Who writes is the store's choice, `CheckpointStore(writers=...)`:

    alone       rank 0 has the whole state, and writes it
    gathered    rank 0 writes, and asks the others for what it does not have (`gathered_save`)
    joint       each process writes its share (`own_share`, `joint_save`)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from hybridtrain.checkpoint.gathered_save import GatheredState
from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.joint_save import JointSave
from hybridtrain.checkpoint.own_share import share_of_state
from hybridtrain.checkpoint.published import TEMPORARY
from hybridtrain.checkpoint.shared_files import hosts_without
from hybridtrain.checkpoint.state import writers
from hybridtrain.checkpoint.state_table import StateTable
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError
from hybridtrain.errors import CheckpointError, Interrupted
from hybridtrain.model import HybridModel
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_log = logging.getLogger(__name__)


def save(
    store: CheckpointStore,
    step: int,
    model: HybridModel,
    optimizer: Optimizer,
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
        store: where it goes; every process has one. See its `writers`.
        step: the optimizer steps done.
        model: see `writers`.
        optimizer: see `writers`.
        progress: see `writers`.
        states: what else is saved, by name; see `writers`. Every process asks them for their
            `state_dict`, which may communicate; rank 0's is saved.
        required: a full disk is an error; otherwise it is a warning, and a later save may succeed.
        prune: False to remove no older checkpoint this time.

    Returns:
        the directory of the checkpoint, on every process; None if the disk is full.

    Raises:
        CheckpointError: this save, or the one before in the background, has failed; or not all
            processes see the directory that they should write to.
    """
    world = model.world
    dicts = {name: entry.state_dict() for name, entry in states.items()}
    whole = _rank_0_has_all(model)
    store.is_joint = _is_joint(store, world, whole)
    if store.is_joint:
        _wait_for_last(store)
        table = StateTable(model, optimizer)
        copies = _host_copies(store) if store.background else None
        files = share_of_state(model, table, progress, dicts, copies=copies)
        path = _save(
            store, step, files, prune, required, joint=JointSave(world.saving_group(store.wait))
        )
        # of a save in the background it is the name that it will have
        return world.broadcast(path)
    others = None
    if not whole:
        others = GatheredState(StateTable(model, optimizer), world.saving_group(store.wait))

    def save_on_main() -> Path | None:
        try:
            _wait_for_last(store)  # its copies are used again
            # copies of what other processes have would be the whole model in this one
            background = store.background and others is None
            copies = _host_copies(store) if background else None
            files = writers(model, optimizer, progress, dicts, copies=copies, others=others)
            return _save(store, step, files, prune, required, background=background)
        finally:
            if others is not None:
                others.end()

    if others is not None:
        others.serve()
    # the others wait in a group where a long wait is allowed
    return world.broadcast(world.on_main(save_on_main))


def check_directory(store: CheckpointStore | None, world: World) -> None:
    """Checks before a run that all processes see the directory, if all are to write into it.

    A collective call.

    Raises:
        CheckpointError: some do not; names them, and both ways out.
    """
    if store is None or store.writers != "all" or world.size == 1:
        return
    if without := hosts_without(store.root, world, TEMPORARY):
        raise CheckpointError(
            f"writers=all needs a directory that all processes see, and {store.root} of rank 0 is "
            f"not seen by {', '.join(without)}: put it on a file system that all nodes share "
            f"(output_dir=), or set writers=rank0, with which rank 0 gathers and writes everything"
        )
    store.seen_by_all = True


@contextmanager
def finishing(store: CheckpointStore | None, world: World) -> Iterator[None]:
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
        _wait(store, world)
        raise
    except BaseException:
        # the other processes may be gone: nothing is sent to them
        with suppress(Exception):  # which its thread has logged
            store.wait()
        raise
    _wait(store, world)


def _wait(store: CheckpointStore, world: World) -> None:
    if store.is_joint:
        store.wait()  # of which all processes know the same outcome
    else:
        world.on_main(store.wait)


def _wait_for_last(store: CheckpointStore) -> None:
    try:
        store.wait()
    except NoSpaceError as error:
        # the next save is newer than the one that has failed
        _log.warning("the last checkpoint was not saved: %s", error)


def _save(
    store: CheckpointStore, step: int, files: Any, prune: bool, required: bool, **options: Any
) -> Path | None:
    try:
        return store.save(step, files, prune=prune, **options)
    except NoSpaceError as error:
        if required:
            raise
        _log.warning("no checkpoint of step %d; training goes on: %s", step, error)
        return None


def _host_copies(store: CheckpointStore) -> HostCopies:
    if store.host_copies is None:
        store.host_copies = HostCopies()
    return store.host_copies


def _rank_0_has_all(model: HybridModel) -> bool:
    """Returns whether rank 0 has the whole state, the same on every process."""
    if model.world.size == 1:
        return True
    return model.world.pipeline_group is None and model.options.shard == "none"


def _is_joint(store: CheckpointStore, world: World, whole: bool) -> bool:
    """Returns whether all processes write; the first call may try the directory."""
    if world.size == 1 or store.writers == "rank0" or (store.writers == "auto" and whole):
        return False
    if store.writers == "all":
        if store.seen_by_all is None:
            check_directory(store, world)
    elif store.seen_by_all is None:
        without = hosts_without(store.root, world, TEMPORARY)
        store.seen_by_all = not without
        if without and world.is_main:
            _log.info(
                "rank 0 gathers and writes the checkpoints: %s is not seen by %s",
                store.root, ", ".join(without),
            )  # fmt: skip
    return bool(store.seen_by_all)
