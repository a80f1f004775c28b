"""The parts of a check that concern processes, nodes and the cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridtrain._base.text_table import counted
from hybridtrain.cli.check.report import NotCheckedError
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import AUTO, Config, SubmitConfig
from hybridtrain.cli.run.errors import versions
from hybridtrain.cli.run.job import PORT, JobLayout, layout_of
from hybridtrain.errors import ConfigError, WorldError
from hybridtrain.launch import Launch, check_interface, detect, free_port
from hybridtrain.world import World

ScriptOf = Callable[[Settings, JobLayout], str]
"""Returns the script of a job, which sbatch checks."""


def layout_here(config: Config) -> JobLayout:
    """Returns one pipeline on this machine, unless `submit` describes another machine."""
    sizes, defaults = ("nodes", "processes_per_node", "gpus_per_node"), SubmitConfig()
    submit, nb_part = config.submit, config.pipeline.nb_part
    if nb_part != AUTO and all(getattr(submit, n) == getattr(defaults, n) for n in sizes):
        gpus = 0 if config.world.devices == "cpu" else torch.cuda.device_count()
        processes = nb_part if config.world.engine == "distributed" else 1
        submit = replace(submit, processes_per_node=processes, gpus_per_node=gpus or None)
    return layout_of(replace(config, submit=replace(submit, to="torchrun", container=None)))


def processes(
    layout_of_job: Callable[[Config], JobLayout], settings: Settings
) -> tuple[str, JobLayout]:
    """Counts the processes of the job."""
    layout = layout_of_job(settings.config)
    return str(layout), layout


def devices(config: Config, layout: JobLayout) -> tuple[str, list[World]]:
    """Returns the World of every rank, as the job will create it."""
    backend = config.world.backend
    if layout.gpus_per_node and not dist.is_nccl_available():
        backend = "gloo"  # the nodes may have a PyTorch with NCCL even if this one has none
    per_node = layout.processes_per_node
    worlds = [
        World.of_launch(
            Launch("slurm", rank, layout.processes, rank % per_node, per_node, None),
            layout.gpus_per_node,
            layout.nb_part,
            config.world.devices,
            backend,
            config.world.engine,
            config.world.inner,
            config.world.replicas,
            config.world.replica_shares,
            config.world.share_gpus,
        )
        for rank in range(layout.processes)
    ]
    first = worlds[0]
    names = ", ".join(map(str, first.devices))
    logical = f", {first.logical_replicas} logical replicas" * (first.fixed_replicas is not None)
    return f"{counted(len(worlds), 'rank')}; rank 0 has {names}{logical}", worlds


def ports(config: Config, layout: JobLayout, is_here: bool) -> tuple[str, bool]:
    """Checks the rendezvous, as far as the environment here determines it."""
    if layout.processes == 1:
        return "not needed by one process", True
    text = os.environ.get("MASTER_PORT")
    if text and not (text.isdecimal() and 0 < int(text) < 2**16):
        raise WorldError(f"MASTER_PORT={text} is not a port: unset it, or set 1 to 65535")
    if is_here and layout.nodes == 1:
        check_interface(os.environ)
        free_port()
        return "the processes on this machine can connect", True
    if config.submit.to == "slurm" and not is_here:
        variables = {"PROCID": 0, "NTASKS": layout.processes, "JOB_ID": 1, "STEP_ID": 0}
        slurm = {f"SLURM_{name}": str(value) for name, value in variables.items()}
        launch = detect({**os.environ, **slurm, "SLURM_JOB_NODELIST": "node"})
        if launch.launcher == "slurm":
            chosen = f"MASTER_PORT={text}" if text else "a port derived from the job id"
            return f"{chosen}, on the first node", True
    raise NotCheckedError(f"cannot see from here whether port {text or PORT} is free")


def software(config: Config) -> tuple[str, bool]:
    """Lists the versions on this machine, which the nodes need too."""
    here = ", ".join(f"{name} {number}" for name, number in versions().items())
    if config.submit.container is not None:
        raise NotCheckedError(f"the versions in the container; here: {here}")
    return f"{here} here; the nodes need the same versions", True


def sbatch(script_of: ScriptOf, settings: Settings, layout: JobLayout) -> tuple[str, bool]:
    """Lets Slurm check account, partition, QOS and limits, without submitting a job.

    sbatch also fails where it is installed but cannot reach a cluster. That is no problem of the
    job, so the part then is not checked.
    """
    script = script_of(settings, layout)
    if settings.config.submit.to != "slurm":
        raise NotCheckedError(f"submit.to={settings.config.submit.to}")
    if (sbatch := shutil.which("sbatch")) is None:
        raise NotCheckedError("account, partition and limits: sbatch is not on this machine's PATH")
    try:
        tested = subprocess.run(
            [sbatch, "--test-only"], input=script, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCheckedError(f"sbatch does not respond: {error}") from error
    if tested.returncode:
        reason = " ".join(tested.stderr.split()) or f"exit code {tested.returncode}"
        if not _slurm_responds():
            raise NotCheckedError(
                f"account, partition and limits: sbatch cannot reach Slurm from this machine: "
                f"{reason}"
            )
        raise ConfigError(f"sbatch --test-only rejects the job: {reason}; see the keys of submit")
    return "sbatch --test-only accepts the job", True


def _slurm_responds() -> bool:
    """Returns False if `scontrol show config`, which asks Slurm's controller, fails."""
    if (scontrol := shutil.which("scontrol")) is None:
        return True  # cannot tell
    try:
        shown = subprocess.run([scontrol, "show", "config"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.returncode == 0
