"""Finds the checkpoint that a command starts from."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from hybridtrain.app.build import RunContext
from hybridtrain.checkpoint import CheckpointStore, step_of
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# Set to the number of restarts by torchrun, and by Slurm for a job that was requeued.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def checkpoint_to_resume(context: RunContext) -> Path | None:
    """Returns the checkpoint that rank 0 finds for training to resume from; None: a new run.

    Raises:
        ConfigError: training would write among later checkpoints.
        CheckpointError: there is no such checkpoint, or none is intact.
    """
    resume, store, world = context.config.resume, context.store, context.world
    of_run = context.settings.of_run
    restarts = max(int(os.environ.get(name) or 0) for name in _RESTARTS)
    # torchrun's agents count by themselves, and each host may have another disk
    everyones = world.gather((restarts, max(store.steps(), default=-1), socket.gethostname()))
    restarts = max(each[0] for each in everyones)

    def find() -> Path | None:
        if restarts or resume in ("auto", "last"):
            _check_others_steps(everyones, store)
        if restarts and not store.steps():
            _log.warning(
                "the job has been started again, and there is no checkpoint in %s: it begins anew "
                "(checkpoint.every_steps=%s)",
                store.root,
                context.config.checkpoint.every_steps,
            )
        if store.steps() and restarts:
            return store.newest()  # the job has been started again: continue where it was
        is_path = resume not in (None, "auto", "last", "best")
        if store.steps() and of_run is not None and is_path and resume == of_run.resume:
            _log.info("the run has begun at resume=%s, and goes on from its own checkpoint", resume)
            return store.newest()
        checkpoint = None if resume is None else _named_or_newest(resume, store)
        begin = -1 if checkpoint is None else step_of(checkpoint)
        later = [step for step in store.steps() if step > begin]
        if later and resume not in ("auto", "last"):
            raise ConfigError(
                f"resume={resume or 'null'} would mix new checkpoints with the later ones in "
                f"{store.root}, up to step {later[-1]}: set resume=auto to continue that run, or "
                f"another run_name"
            )
        trained = context.directory.path / "metrics.jsonl"
        if checkpoint is None and not store.steps() and trained.exists():
            _log.warning(
                "this run has trained before (%s), but there are no checkpoints in %s: they were "
                "removed, renamed or never saved. It starts from scratch",
                trained,
                store.root,
            )
        return checkpoint

    return world.broadcast(world.on_main(find))


def _check_others_steps(everyones: Sequence[tuple[int, int, str]], store: CheckpointStore) -> None:
    """Raises a CheckpointError if another process sees a later checkpoint than rank 0.

    `everyones`: of each rank, the restarts, the step of its newest checkpoint and its host.
    """
    own, host = everyones[0][1:]
    rank = max(range(len(everyones)), key=lambda rank: everyones[rank][1])
    _, step, other = everyones[rank]
    if step > own:
        raise CheckpointError(
            f"rank {rank} on {other} has a checkpoint of step {step} in {store.root}, and rank 0 "
            f"on {host}, which reads and writes them, has {f'step {own}' if own >= 0 else 'none'}: "
            f"set output_dir= to a folder that all nodes share, start rank 0 on {other}, or copy "
            f"that checkpoint to {host}"
        )


def checkpoint_to_read(resume: str | None, store: CheckpointStore, world: World) -> Path:
    """Returns the checkpoint that `resume` names, for a command that does not train.

    Args:
        resume: of the config.
        store: the checkpoints of the run.
        world: the processes; rank 0 looks.

    Raises:
        ConfigError: `resume` names none.
        CheckpointError: it does not exist.
    """
    if resume is None:
        raise ConfigError("resume=null: set it to auto, or to the path of a checkpoint")
    checkpoint = world.broadcast(world.on_main(lambda: _named_or_newest(resume, store)))
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {store.root}: train first, or set run_name or "
            f"resume=<path of a checkpoint>"
        )
    return checkpoint


def _named_or_newest(resume: str, store: CheckpointStore) -> Path | None:
    """Returns the checkpoint that `resume` names; None: `auto` finds none."""
    if resume == "auto":
        return store.newest()
    if resume in ("last", "best"):
        found = store.newest() if resume == "last" else store.best()
        if found is None and resume == "best":
            raise CheckpointError(
                f"resume=best: no checkpoint in {store.root} is marked as the best; "
                f"checkpoint.best=loss marks it while a run trains. resume=last is the newest"
            )
        if found is None:
            raise CheckpointError(f"resume={resume}: there is no such checkpoint in {store.root}")
        return found
    if not (path := Path(resume)).is_dir():
        raise CheckpointError(f"resume={resume}: there is no such checkpoint directory")
    for folder in (path / "checkpoints", path):  # of a run directory
        if (other := CheckpointStore(folder)).steps():
            return other.newest()
    return path
