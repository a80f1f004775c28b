"""Saving by all processes of a run: rank 0 writes, and what fails ends the run everywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.other_stages import OtherStages
from hybridtrain.checkpoint.state import writers
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError
from hybridtrain.errors import Interrupted
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
    """Saves a checkpoint on rank 0; a collective call.

    If the store saves in the background, this returns when the state is copied to host memory; but
    where stages are in several processes, it is always written before this returns.

    Args:
        store: where it goes; used on rank 0 only.
        step: the optimizer steps done.
        model: see `writers`.
        optimizer: see `writers`.
        progress: see `writers`.
        states: what else is saved, by name; see `writers`. Every process asks them for their
            `state_dict`, which may communicate; rank 0's is saved.
        required: a full disk is an error; otherwise it is a warning, and a later save may succeed.
        prune: False to remove no older checkpoint this time.

    Returns:
        the directory of the checkpoint, on every rank; None if the disk is full.

    Raises:
        CheckpointError: this save, or the one before in the background, has failed.
    """
    dicts = {name: entry.state_dict() for name, entry in states.items()}
    others = OtherStages(model, optimizer) if model.world.pipeline_group is not None else None

    def save_on_main() -> Path | None:
        try:
            return write()
        finally:
            if others is not None:
                others.end()

    def write() -> Path | None:
        try:
            # the earlier save's copies are used again
            store.wait()
        except NoSpaceError as error:
            # this save is newer than the one that has failed
            _log.warning("the last checkpoint was not saved: %s", error)
        # copies of other processes' stages would be the whole model in this one
        background = store.background and others is None
        if background and store.host_copies is None:
            store.host_copies = HostCopies()
        copies = store.host_copies if background else None
        files = writers(model, optimizer, progress, dicts, copies=copies, others=others)
        try:
            return store.save(step, files, prune=prune, background=background)
        except NoSpaceError as error:
            if required:
                raise
            _log.warning("no checkpoint of step %d; training goes on: %s", step, error)
            return None

    if others is not None:
        others.serve()
    # the others wait in a group where a long wait is allowed
    return model.world.broadcast(model.world.on_main(save_on_main))


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
        world.on_main(store.wait)
        raise
    except BaseException:
        # the other processes may be gone: nothing is sent to them
        with suppress(Exception):  # which its thread has logged
            store.wait()
        raise
    world.on_main(store.wait)
