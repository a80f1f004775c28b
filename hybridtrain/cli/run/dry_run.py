"""The short run of `train --dry-run`, which leaves no directory behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.keys import NAMING
from hybridtrain.cli.config.overrides import with_later
from hybridtrain.cli.config.resolve import resolve_settings
from hybridtrain.cli.run.build import trainer_options
from hybridtrain.cli.run.components import warmup_steps
from hybridtrain.cli.run.sweep import RunCommand
from hybridtrain.errors import naming
from hybridtrain.launch import detect


def run_dry(overrides: Sequence[str], config_dir: str | None, run: RunCommand) -> int:
    """Trains two steps, evaluates two batches and saves, in a temporary folder.

    Args:
        overrides: the overrides of the command `train`.
        config_dir: a folder with more groups and options.
        run: runs one command with its settings.
    """
    config = compose_config(overrides, config_dir)
    with naming(NAMING):  # what the dry run replaces is checked as well
        warmup_steps(config.lr_schedule, trainer_options(config).steps or 1)
    folder = Path(config.output_dir) / dry_run_name(os.environ)
    short = ["trainer.epochs=null", "trainer.steps=2", "trainer.log_every=1"]
    short += ["++data.first_batches=2", "++lr_schedule.warmup_steps=0", f"output_dir={folder}"]
    is_main = detect(os.environ).rank == 0
    try:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed dry run
        settings = resolve_settings("train", with_later(overrides, short), config_dir)
        settings.dry_run = True
        evaluated = run("train", settings).keys() - {"step"}
    finally:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if is_main:
        tried = ["two steps"]
        tried += ["an evaluation"] if evaluated else []
        tried += ["a checkpoint"] if settings.config.checkpoint.every_steps != 0 else []
        parts = " and ".join([*([", ".join(tried[:-1])] if tried[1:] else []), tried[-1]])
        print(f"dry run: {parts} succeeded; nothing was kept", file=sys.stderr, flush=True)
    return 0


def dry_run_name(environ: Mapping[str, str]) -> str:
    """Returns the name of a dry run's folder, which only the processes of one launch share."""
    launch = detect(environ)
    words = [launch.run, environ.get("TORCHELASTIC_RUN_ID", "")]
    words += map(str, launch.master or [os.getpid()])
    if launch.local_size == launch.size:  # other machines may share the folder
        words.append(socket.gethostname())
    return re.sub(r"[^\w.]+", "_", "-".join([".dry_run", *filter(None, words)]))
