"""The launcher's environment variables: torchrun's, Slurm's, or none."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hybridtrain.errors import WorldError

# Ports for rank 0's store. Linux assigns ports from 32768 on to outgoing connections, so a
# free port in that range could be taken before rank 0 listens on it.
_ALL_PORTS = range(1, 65536)
_PORTS = range(10000, 30000)


@dataclass(frozen=True)
class Launch:
    """The launcher's facts about this process.

    Attributes:
        launcher: `torchrun`, `slurm` or `single`.
        rank: the number of this process.
        size: the number of processes.
        local_rank: the number of this process on its node.
        local_size: the number of processes on its node.
        master: host and port of the processes' store; None for a single process.
        node_gpus: the number of GPUs that Slurm assigns to all processes on the node; 0 if unknown.
        gpus_given: the environment variable that assigns GPUs to this process, as `NAME=value`; ""
            if none does.
        run: identifies the run if another run could have the same `master`.
        nb_part: the default `nb_part` for a script that does not set it.
        problem: why the other processes will not join, if known.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: tuple[str, int] | None
    node_gpus: int = 0
    gpus_given: str = ""
    run: str = ""
    nb_part: int = 1
    problem: str | None = None


def detect(environ: Mapping[str, str]) -> Launch:
    """Reads the launcher's variables; torchrun precedes Slurm, since it may run in a Slurm job.

    Raises:
        WorldError: a variable is missing or is not a number.
    """
    launch = partial(
        Launch,
        gpus_given=_gpus_given(environ),
        nb_part=_number(environ, "HYBRIDTRAIN_NB_PART", "1"),
    )
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE")
        return launch(
            launcher="torchrun",
            rank=_number(environ, "RANK"),
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", "0"),
            local_size=_number(environ, "LOCAL_WORLD_SIZE", str(size)),
            master=_torchrun_master(environ) if size > 1 else None,
        )
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        size = _number(environ, "SLURM_NTASKS")
        job = _number(environ, "SLURM_JOB_ID", environ.get("SLURM_JOBID", "0"))
        step = _number(environ, "SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
        return launch(
            launcher="slurm",
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            local_size=_slurm_local_size(environ, size),
            master=_slurm_master(environ, job, step) if size > 1 else None,
            node_gpus=_number(environ, "SLURM_GPUS_ON_NODE", "0"),
            run=f"Slurm job {job}, step {step}, attempt {environ.get('SLURM_RESTART_COUNT', 0)}",
            problem=_not_started_by_srun(environ, size),
        )
    return launch("single", rank=0, size=1, local_rank=0, local_size=1, master=None)


def launcher_serves_store(environ: Mapping[str, str]) -> bool:
    """Returns whether torchrun's agent, and not rank 0, serves the processes' store."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _gpus_given(environ: Mapping[str, str]) -> str:
    """Returns the variable that assigns GPUs to this process; "" if none does or it hides them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # empty, -1 and Slurm's NoDevFiles: none
        named = re.match(r"\s*(\d|GPU-|MIG-)", visible)
        return f"CUDA_VISIBLE_DEVICES={visible}" if named else ""
    if environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        return f"SLURM_GPUS_ON_NODE={environ['SLURM_GPUS_ON_NODE']}"
    indices = environ.get("SLURM_JOB_GPUS")
    return f"SLURM_JOB_GPUS={indices}" if indices else ""


def _torchrun_master(environ: Mapping[str, str]) -> tuple[str, int]:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port or not port.isdecimal() or int(port) not in _ALL_PORTS:
        raise WorldError(
            f"RANK and WORLD_SIZE are set, but MASTER_ADDR={host} and MASTER_PORT={port} are not "
            "a valid address of rank 0: start the processes with torchrun"
        )
    return host, int(port)


def _slurm_master(environ: Mapping[str, str], job: int, step: int) -> tuple[str, int]:
    """Returns the first host of the step, and a port that other steps on it are unlikely to use.

    MASTER_ADDR and MASTER_PORT override them.
    """
    host = environ.get("MASTER_ADDR")
    if not host:
        lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[key] for key in lists if environ.get(key)), None)
        if nodes is None and _number(environ, "SLURM_NNODES", "1") > 1:
            raise WorldError("SLURM_JOB_NODELIST is not set: start the processes with srun")
        host = first_host(nodes) if nodes else "127.0.0.1"
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
        if port not in _ALL_PORTS:
            raise WorldError(f"MASTER_PORT={port} is no port: set one from 1 to {_ALL_PORTS[-1]}")
        return host, port
    # 4099 is prime: ports of a job's steps are far apart, and far from the next jobs' first steps
    # Computed, not searched: all tasks must find the same port before they can talk.
    return host, _PORTS[(job + 4099 * step) % len(_PORTS)]


def free_port() -> int:
    """Returns a free port of this host, on which processes can meet.

    Raises:
        WorldError: none of a hundred ports is free.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)  # not by `random`, which a script may have seeded
        # Closed again before rank 0 listens on it. Without SO_REUSEADDR a port whose last
        # connections are in TIME_WAIT fails too, as it would for rank 0.
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise WorldError(
        f"no free port among 100 tried from {_PORTS[0]} to {_PORTS[-1]} on this host for the "
        "processes' rendezvous: check that processes are allowed to listen on ports"
    )


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int:
    """Returns the number of tasks of this step on this node."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if counts:
        tasks = tasks_per_node(counts)
        node = _number(environ, "SLURM_NODEID", "0")
        if node < len(tasks):
            return tasks[node]
    nodes = _number(environ, "SLURM_NNODES", "1")
    return _number(environ, "SLURM_NTASKS_PER_NODE", str(-(-size // nodes)))


def tasks_per_node(counts: str) -> list[int]:
    """Parses Slurm's list of the number of tasks on each node of a step.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        WorldError: the list cannot be parsed.
    """
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise WorldError(f"cannot read SLURM_STEP_TASKS_PER_NODE={counts!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _not_started_by_srun(environ: Mapping[str, str], size: int) -> str | None:
    """Returns an error message if this is the shell of a job rather than a task of a step."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    # Slurm numbers the batch script and the shell of an interactive job from the top.
    if size == 1 or (step is not None and _number(environ, "SLURM_STEP_ID", step) < 0xFFFF0000):
        return None
    return (
        f"the Slurm job has {size} tasks (SLURM_NTASKS), but this process is not one of them: "
        "start the command with srun or torchrun; for a single process, use srun -n 1"
    )


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm host list.

    >>> first_host("node[012-014,020],other"), first_host("r1i0n[3,5]"), first_host("a,b")
    ('node012', 'r1i0n3', 'a')
    """
    # Slurm lists only hosts with a common prefix in one bracket, so the first number of each
    # bracket gives the first host.
    match = re.match(r"\s*([^\[,\s]+)((?:\[[^\]]*\][^\[,\s]*)*)", nodelist)
    if match is None:
        raise WorldError(f"cannot read the Slurm host list {nodelist!r}")
    # the first number of the first range of each bracket
    return match[1] + re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[2])


def _number(environ: Mapping[str, str], key: str, default: str | None = None) -> int:
    text = environ.get(key, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WorldError(f"the environment variable {key}={text!r} must be an integer") from None
