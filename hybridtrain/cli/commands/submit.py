"""The command `submit`: checks a run here and submits it to a cluster."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import Parameter

from hybridtrain._base.files import open_to_append, write_atomically
from hybridtrain.cli.commands.check import check_job, refuse_launcher
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.keys import NAMING
from hybridtrain.cli.config.leftovers import leave_out_leftovers
from hybridtrain.cli.config.overrides import given_keys, hydra_quoted
from hybridtrain.cli.config.places import check_places, is_within
from hybridtrain.cli.config.resolve import Settings, resolve_settings
from hybridtrain.cli.config.schema import LOADER_KEYS, SubmitConfig
from hybridtrain.cli.run.build import build_options
from hybridtrain.cli.run.components import build_lr_schedule, build_optimizer
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.job import (
    JobLayout,
    JobRun,
    batch_script,
    cpus_of_a_process,
    kubernetes_manifest,
    layout_of,
    torchrun_lines,
)
from hybridtrain.cli.run.run_data import check_tokenizer
from hybridtrain.cli.run.run_table import SWEEP_FILE, read_sweep
from hybridtrain.cli.run.sweep import sweep_of
from hybridtrain.data import DataSplits
from hybridtrain.errors import ConfigError, UserError, naming

_SCRIPT = Path("slurm") / "job.sh"


def submit(
    overrides: Sequence[str],
    config_dir: str | None = None,
    *,
    multirun: bool = False,
    dry_run: bool = False,
    check: bool = False,
) -> int:
    """Submits a run, or an array of runs, to Slurm, or prints a torchrun command or manifest.

    Args:
        overrides: the overrides of the command line.
        config_dir: a folder with more groups and options.
        multirun: submit an array with one job per combination of `overrides`.
        dry_run: print the script without writing or submitting anything.
        check: check all parts of the job without writing or submitting anything; see `check_job`.

    Raises:
        ConfigError: a value is wrong, as `train` would report, or does not fit the nodes.
        UserError: there is no Slurm on this machine, or it rejects the job.
    """
    refuse_launcher("submit")
    if check:
        if multirun:
            raise ConfigError("--check works with a single run: remove --multirun")
        return check_job(overrides, config_dir, layout_of, _script_of)
    if multirun:
        run, config, layout, lines = _array(overrides, config_dir)
    else:
        settings = resolve_settings("train", overrides, config_dir)
        check_run(settings)
        layout, config, lines = layout_of(settings.config), settings.config.submit, []
        run = _run_of(settings)
    if config.to != "slurm":
        if multirun:
            raise ConfigError(f"submit.to={config.to} works with a single run: remove --multirun")
        make = torchrun_lines if config.to == "torchrun" else kubernetes_manifest
        print(make(run, config, layout), end="", flush=True)
        return 0
    script = batch_script(run, config, layout)
    gpus = layout.gpus_of_a_process
    shares_node = "--exclusive" not in config.sbatch_args
    if cpus_of_a_process(config, layout) is None and gpus > 1 and shares_node:
        print(
            f"warning: a task has {gpus} GPUs with one thread each, but most clusters assign it "
            f"only one CPU by default: set submit.cpus_per_task={2 * gpus} or more",
            file=sys.stderr,
        )
    if dry_run:
        print(script, end="")
        if lines:
            print(f"\n# {run.sweep_file}, one line per job of the array:")
            print("\n".join(f"# {line}" for line in lines))
        sys.stdout.flush()
        return 0
    _send(run, script, lines, layout)
    return 0


def _run_of(settings: Settings) -> JobRun:
    config, overrides = settings.config, settings.overrides
    wanted = [*overrides, *_on_gpus(settings, overrides)]
    return JobRun(str(config.run_name), RunDirectory(config).path, wanted, settings.config_dir)


def _script_of(settings: Settings, layout: JobLayout) -> str:
    check_places("submit", settings.config, settings.overrides, settings.files)
    return batch_script(_run_of(settings), settings.config.submit, layout)


def _on_gpus(settings: Settings, overrides: Sequence[str]) -> list[str]:
    """Returns a device override for a job with GPUs unless the command line sets the devices.

    With it, a job that sees no GPU ends with an error, even if its recipe has `auto`.
    """
    config, is_set = settings.config, "world.devices" in given_keys(overrides)
    is_open = config.submit.gpus_per_node and config.world.devices in (None, "auto") and not is_set
    return ["world.devices=cuda"] if is_open else []


def check_run(settings: Settings) -> None:
    """Raises the errors of training that need neither other processes nor the data set.

    Raises:
        UserError: a value of the config is wrong, or the run directory is not writable.
    """
    config = settings.config
    check_places("submit", config, settings.overrides, settings.files)
    leave_out_leftovers(settings)
    with naming(NAMING):
        options = build_options(config)
        allow = config.allow_targets
        instantiate.check("model", config.model, nn.Module, allow)
        instantiate.check("data", config.data, DataSplits, allow, ignore=LOADER_KEYS)
        check_tokenizer(config)
        optimizer = build_optimizer(config.optim, [Parameter(torch.zeros(1))], allow)
        # The length of the run is unknown without the data.
        steps = options.trainer.steps or 10**9
        build_lr_schedule(config.lr_schedule, optimizer, steps, allow)
        RunDirectory(config).check_writable()
    resume = config.resume
    if resume not in (None, "auto", "last", "best") and not Path(str(resume)).is_dir():
        raise ConfigError(f"resume={resume}: there is no such checkpoint directory")


def _array(
    overrides: Sequence[str], config_dir: str | None
) -> tuple[JobRun, SubmitConfig, JobLayout, list[str]]:
    """Returns an array's runs, their common settings and the lines of the sweep's file."""
    sweep = sweep_of(overrides, config_dir)
    for point in sweep.points:
        if of_job := [o for o in point.swept if o.lstrip("+").startswith("submit")]:
            raise ConfigError(
                f"{of_job[0]}: all jobs of an array share one layout, so submit.* cannot be swept: "
                f"submit these runs one by one"
            )
    wanted: list[str] = []
    layouts: list[tuple[SubmitConfig, JobLayout]] = []
    for point in sweep.points:
        keys = given_keys(point.overrides)
        run_overrides = [
            o for o, key in zip(point.overrides, keys, strict=True) if key != "run_name"
        ]
        run_overrides.append(f"run_name={hydra_quoted(point.run_name)}")
        settings = resolve_settings("train", run_overrides, config_dir)
        check_run(settings)
        layouts.append((settings.config.submit, layout_of(settings.config)))
        if layouts[-1] != layouts[0]:
            raise ConfigError(
                f"{' '.join(point.swept)}: all jobs of an array share one layout, but this one has "
                f"{layouts[-1][1]}, not {layouts[0][1]}: submit them one by one"
            )
        run_overrides += _on_gpus(settings, run_overrides)
        wanted.append(" ".join(map(shlex.quote, run_overrides)))
        if "\n" in wanted[-1]:
            raise ConfigError(f"{' '.join(point.swept)}: swept values cannot have line breaks")
    file = sweep.path / SWEEP_FILE
    lines = _sweep_lines(file)
    # Lines keep their numbers, because a waiting array reads the file when it starts.
    lines += [line for line in wanted if line not in lines]
    numbers = sorted({lines.index(line) + 1 for line in wanted})
    group = f"monitor.group={hydra_quoted(sweep.path.name)}"
    run = JobRun(sweep.path.name, sweep.path, [group], config_dir, numbers, file)
    return run, *layouts[0], lines


def _sweep_lines(file: Path) -> list[str]:
    return [" ".join(map(shlex.quote, line)) for line in read_sweep(file)]


def _write_sweep(file: Path, lines: Sequence[str]) -> None:
    """Writes the lines of a sweep, which start with the lines read from the file earlier.

    Raises:
        UserError: another submit has added lines since, so our line numbers would be wrong.
    """
    with open_to_append(file.with_suffix(".lock")) as lock:
        with suppress(OSError):  # some file systems, such as Lustre, may not support locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        written_lines = _sweep_lines(file)
        if written_lines != list(lines[: len(written_lines)]):
            raise UserError(
                f"another submit changed {file} in the meantime, so nothing was submitted: rerun "
                f"the same command"
            )
        write_atomically(file, "\n".join(lines) + "\n")


def _send(run: JobRun, script: str, lines: Sequence[str], layout: JobLayout) -> None:
    """Writes and submits the script; prints the job's id to stdout, all else to stderr."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError(
            "there is no sbatch on this machine, so nothing was submitted: --dry-run prints the "
            "script, and submit.to=torchrun prints the command for each node"
        )
    path = run.folder / _SCRIPT
    if not is_within(path.parent, run.folder):
        raise ConfigError(f"{path.parent} is a link to another place: remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, script)
        if run.sweep_file is not None:
            _write_sweep(run.sweep_file, lines)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; set output_dir="
        ) from error
    sent = subprocess.run([sbatch, "--parsable", str(path)], capture_output=True, text=True)
    if sent.returncode:
        reason = " ".join(sent.stderr.split()) or f"exit code {sent.returncode}"
        raise UserError(f"sbatch rejected {path}: {reason}")
    job = sent.stdout.strip().partition(";")[0]  # a cluster name may follow
    log = f"{job}_*.out" if run.array else f"{job}.out"
    said = [
        f"submitted {'array' if run.array else 'job'} {job}: {layout}",
        f"script   {path}",
        f"output   {path.with_name(log)}",
        f"cancel   scancel {job}",
    ]
    if run.array:
        said[0] += f", {len(run.array)} runs"
        said.append(f"results  hybridtrain results {shlex.quote(str(run.folder))}")
    print("\n".join(said), file=sys.stderr, flush=True)
    print(job, flush=True)
