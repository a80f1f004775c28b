"""The command `check`, and `submit --check`: check a whole job on one CPU before it queues.

`check_job` reads top to bottom. Each part prints one line, and a problem skips only the parts that
depend on it, so that one call finds all problems:

    ok           checked; the line has the findings
    problem      the job would end with this error, or not fit
    not checked  not visible from here, or dependent on a part with a problem

The check joins no process group, allocates no weights unless the model needs them, and writes
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from hybridtrain.cli.check import cluster, settings, start, step
from hybridtrain.cli.check.report import Report
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.job import JobLayout
from hybridtrain.cli.run.prediction import without_errors_of_fake_tensors
from hybridtrain.errors import ConfigError
from hybridtrain.launch import detect


def check(overrides: Sequence[str], config_dir: str | None = None) -> int:
    """Checks a run on this machine, or on the machine that the group `submit` describes.

    Returns 2 if there is a problem, else 0.
    """
    refuse_launcher("check")
    return check_job(overrides, config_dir, cluster.layout_here)


def refuse_launcher(command: str) -> None:
    """Raises a ConfigError in one of several processes, but not in a job's shell."""
    launch = detect(os.environ)
    if launch.size > 1 and launch.problem is None:
        raise ConfigError(f"{command} runs in one process: start it without torchrun or srun")


def check_job(
    overrides: Sequence[str],
    config_dir: str | None,
    layout: Callable[[Config], JobLayout],
    script_of: cluster.ScriptOf | None = None,
) -> int:
    """Checks all parts of a job and prints a line for each; returns the exit code.

    Args:
        overrides: the overrides of the command line.
        config_dir: a folder with more groups and options.
        layout: returns the processes of the job.
        script_of: returns the script for `sbatch`; None: the job is not for Slurm.
    """
    report = Report()
    say, is_here = report.part, script_of is None

    resolved = settings.composed(report, overrides, config_dir)
    config = say("auto keys", settings.without_auto_keys, resolved)
    options = settings.options(report, config)
    loss, pipeline = options["loss_fn"], options["pipeline"]
    trainer, loader = options["trainer"], options["loader"]
    say("optimizer", settings.optimizer, config)
    say("run directory", settings.run_directory, config)

    processes = say("processes", partial(cluster.processes, layout), resolved)
    worlds = say("devices", cluster.devices, config, processes)
    say("ports", partial(cluster.ports, is_here=is_here), config, processes)
    say("versions", cluster.software, config)
    if script_of is not None:
        say("sbatch", partial(cluster.sbatch, script_of), resolved, processes)

    data = say("data", start.data_set, config)
    batches = say("batches", start.batches, resolved, data, worlds, pipeline, loader)
    say("learning rate", start.learning_rate, config, batches, trainer)
    model = say("model", start.model, config, data)
    initial = say("init_from", start.init_from, config)
    checkpoint = say("checkpoint", start.checkpoint, config)
    say("weights", start.weights, config, data, model, initial, checkpoint)

    table = say("schedule", step.schedule, worlds, pipeline)
    say("order", step.order, worlds, batches, table)
    with without_errors_of_fake_tensors():
        cut = say("plan", step.plan, config, data, worlds, pipeline, model, table)
        say("messages", step.messages, data, loss, pipeline, batches, cut)
        memory = partial(step.memory, is_here=is_here)
        say("memory", memory, config, data, worlds, pipeline, loss, batches, cut)
    return report.end()
