"""Finds the checkpoint that a command starts from."""

from __future__ import annotations

import os
from pathlib import Path

from hybridtrain.app.build import RunContext
from hybridtrain.checkpoint.store import CheckpointStore, step_of
from hybridtrain.errors import CheckpointError, ConfigError


def checkpoint_to_resume(context: RunContext) -> Path | None:
    """Returns the checkpoint that rank 0 finds for training to resume from; None: a new run.

    Raises:
        ConfigError: training would write among later checkpoints.
        CheckpointError: there is no such checkpoint, or none is intact.
    """
    resume, store = context.config.resume, context.store

    def find() -> Path | None:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and store.steps():
            return store.newest()  # torchrun has restarted this run: continue where it was
        checkpoint = None if resume is None else _named_or_newest(resume, store)
        begin = -1 if checkpoint is None else step_of(checkpoint)
        later = [step for step in store.steps() if step > begin]
        if later and resume != "auto":
            raise ConfigError(
                f"resume={resume or 'null'} would mix new checkpoints with the later ones in "
                f"{store.root}, up to step {later[-1]}: set resume=auto to continue that run, or "
                f"another run_name"
            )
        return checkpoint

    return context.world.broadcast(context.world.on_main(find))


def checkpoint_to_read(context: RunContext) -> Path:
    """Returns the checkpoint that `resume` names, for a command that does not train.

    Raises:
        ConfigError: `resume` names none.
        CheckpointError: it does not exist.
    """
    resume, store = context.config.resume, context.store
    if resume is None:
        raise ConfigError("resume=null: set it to auto, or to the path of a checkpoint")
    find = context.world.on_main(lambda: _named_or_newest(resume, store))
    checkpoint = context.world.broadcast(find)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {store.root}: train first, or set run_name or "
            f"resume=<path of a checkpoint>"
        )
    return checkpoint


def _named_or_newest(resume: str, store: CheckpointStore) -> Path | None:
    if resume == "auto":
        return store.newest()
    if not (path := Path(resume)).is_dir():
        raise CheckpointError(f"resume={resume}: there is no such checkpoint directory")
    return path
