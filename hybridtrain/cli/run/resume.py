"""The meaning of `resume=`: which checkpoint a command continues from, or reads."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from hybridtrain._base.files import json_lines
from hybridtrain.checkpoint import CheckpointStore, step_of
from hybridtrain.cli.run.context import RunContext
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# torchrun, and Slurm for a requeued job, set these to the number of restarts.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def checkpoint_to_resume(context: RunContext) -> Path | None:
    """Returns the checkpoint to resume training from, as rank 0 sees it; None: a new run.

    Raises:
        ConfigError: training would mix new checkpoints with later ones.
        CheckpointError: the checkpoint does not exist, or none is intact.
    """
    resume, store, world = context.config.resume, context.store, context.world
    of_run = context.settings.of_run
    restarts = max(int(os.environ.get(name) or 0) for name in _RESTARTS)
    # torchrun's agents count independently, and each host may have its own disk
    everyones = world.gather((restarts, max(store.steps(), default=-1), socket.gethostname()))
    restarts = max(each[0] for each in everyones)

    def find() -> Path | None:
        if restarts or resume in ("auto", "last"):
            _check_others_steps(everyones, store)
        if restarts and not store.steps():
            _log.warning(
                "the job was restarted, but there is no checkpoint in %s: starting over "
                "(checkpoint.every_steps=%s)",
                store.root,
                context.config.checkpoint.every_steps,
            )
        if store.steps() and restarts:
            return store.newest()  # a restarted job continues from its newest checkpoint
        is_path = resume not in (None, "auto", "last", "best")
        if store.steps() and of_run is not None and is_path and resume == of_run.resume:
            _log.info("the run started from resume=%s; resuming from its own checkpoint", resume)
            return store.newest()
        checkpoint = None if resume is None else named_checkpoint(resume, store)
        begin = -1 if checkpoint is None else step_of(checkpoint)
        later = [step for step in store.steps() if step > begin]
        if later and resume not in ("auto", "last"):
            raise ConfigError(
                f"resume={resume or 'null'} would mix new checkpoints with the existing ones in "
                f"{store.root}, up to step {later[-1]}: set resume=auto to continue that run, or "
                f"another run_name="
            )
        trained = context.directory.path / "metrics.jsonl"
        if checkpoint is None and not store.steps() and trained.exists():
            if _ended_before_first_checkpoint(context):
                _log.warning(
                    "this run stopped before its first checkpoint (checkpoint.every_steps=%s): it "
                    "starts from scratch",
                    "null" if (every := context.config.checkpoint.every_steps) is None else every,
                )
            else:
                _log.warning(
                    "this run has trained before (%s), but there are no checkpoints in %s: they "
                    "were removed, renamed or never saved. Starting from scratch",
                    trained,
                    store.root,
                )
        return checkpoint

    return world.from_main(find)


def _ended_before_first_checkpoint(context: RunContext) -> bool:
    """Returns whether the run, which has logged steps, was cut off before a checkpoint was due."""
    directory, checkpoint = context.directory.path, context.config.checkpoint
    others = checkpoint.every_minutes, checkpoint.every_epochs
    if (directory / "summary.json").exists() or any(every is not None for every in others):
        return False
    last = max((line["step"] for line in json_lines(directory / "metrics.jsonl")), default=0)
    return checkpoint.every_steps is None or last < checkpoint.every_steps


def _check_others_steps(everyones: Sequence[tuple[int, int, str]], store: CheckpointStore) -> None:
    """Raises a CheckpointError if another process sees a later checkpoint than rank 0.

    `everyones` has the restarts, newest checkpoint's step and host of each rank.
    """
    newest, host = everyones[0][1:]
    rank = max(range(len(everyones)), key=lambda rank: everyones[rank][1])
    _, step, other = everyones[rank]
    if step > newest:
        raise CheckpointError(
            f"rank {rank} on {other} has a checkpoint of step {step} in {store.root}, but rank 0 "
            f"on {host}, which reads and writes checkpoints, has "
            f"{f'step {newest}' if newest >= 0 else 'none'}: "
            f"set output_dir= to a folder that all nodes share, start rank 0 on {other}, or copy "
            f"that checkpoint to {host}"
        )


def checkpoint_to_read(resume: str | None, store: CheckpointStore, world: World) -> Path:
    """Returns the checkpoint that `resume` names, for a command that does not train.

    Args:
        resume: the config key.
        store: the checkpoints of the run.
        world: the processes; rank 0 reads the directory.

    Raises:
        ConfigError: `resume` is null.
        CheckpointError: the checkpoint does not exist.
    """
    if resume is None:
        raise ConfigError("resume=null: set resume=auto, or resume=<path of a checkpoint>")
    checkpoint = world.from_main(lambda: _best_or_named(resume, store))
    if checkpoint is None:
        raise _no_checkpoint(store)
    return checkpoint


def check_trained(resume: str | None, store: CheckpointStore, world: World) -> None:
    """Rejects a run without checkpoints, before its data is loaded.

    Raises:
        CheckpointError: `resume` is `auto`, and there is no checkpoint.
    """
    if resume == "auto" and not world.from_main(store.steps):
        raise _no_checkpoint(store)


def _no_checkpoint(store: CheckpointStore) -> CheckpointError:
    others = sorted(path.parent.name for path in store.root.parents[1].glob("*/checkpoints"))
    runs = f" ({store.root.parents[1]} has {', '.join(others[:8])})" if others else ""
    return CheckpointError(
        f"there is no checkpoint in {store.root}: train first, or set run_name={runs} or "
        f"resume=<path of a checkpoint>"
    )


def _best_or_named(resume: str, store: CheckpointStore) -> Path | None:
    """Returns the best checkpoint for `auto`, if one is marked; else see `named_checkpoint`."""
    mark = store.best_mark() if resume == "auto" else None
    best = None if mark is None else store.best()
    if best is None:
        return named_checkpoint(resume, store)
    _log.info("using the best checkpoint, %s (resume=last selects the newest)", best)
    return best


def named_checkpoint(resume: str, store: CheckpointStore, *, reads: bool = True) -> Path | None:
    """Returns the checkpoint that `resume` names; None: `auto` finds none.

    Args:
        resume: the config key: `auto`, `last`, `best`, a checkpoint or a run directory.
        store: the checkpoints of the run.
        reads: read the checkpoint, and skip damaged ones; False: only find it.

    Raises:
        CheckpointError: the checkpoint does not exist, or none is intact.
    """
    if resume == "best":
        mark = store.best_mark()
        if mark is None:
            raise CheckpointError(
                f"resume=best: no checkpoint in {store.root} is marked as the best; train with "
                f"checkpoint.best=loss to mark one, or use the newest with resume=last"
            )
        return store.best() if reads else store.newest_up_to(mark.step)
    if resume in ("auto", "last"):
        checkpoint = _newest(store, reads)
        if checkpoint is None and resume == "last":
            raise CheckpointError(f"resume={resume}: there is no checkpoint in {store.root}")
        return checkpoint
    if not (path := Path(resume)).is_dir():
        raise CheckpointError(f"resume={resume}: there is no such checkpoint directory")
    for folder in (path / "checkpoints", path):  # of a run directory
        if (other := CheckpointStore(folder)).steps():
            return _newest(other, reads)
    return path


def _newest(store: CheckpointStore, reads: bool) -> Path | None:
    if reads:
        return store.newest()
    steps = store.steps()
    return store.newest_up_to(steps[-1]) if steps else None
