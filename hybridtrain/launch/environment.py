"""The launcher's environment variables: torchrun's, Slurm's, or none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybridtrain.errors import WorldError


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
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: tuple[str, int] | None


def detect(environ: Mapping[str, str]) -> Launch:
    """Reads who launched this process; torchrun wins over Slurm, since it may run in a Slurm job.

    Raises:
        WorldError: a variable is missing or is not a number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE")
        return Launch(
            launcher="torchrun",
            rank=_number(environ, "RANK"),
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", "0"),
            local_size=_number(environ, "LOCAL_WORLD_SIZE", str(size)),
            master=_torchrun_master(environ) if size > 1 else None,
        )
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        size = _number(environ, "SLURM_NTASKS")
        nodes = _number(environ, "SLURM_NNODES", "1")
        return Launch(
            launcher="slurm",
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            local_size=_number(environ, "SLURM_NTASKS_PER_NODE", str(-(-size // nodes))),
            master=_slurm_master(environ) if size > 1 else None,
        )
    return Launch("single", rank=0, size=1, local_rank=0, local_size=1, master=None)


def _torchrun_master(environ: Mapping[str, str]) -> tuple[str, int]:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port or not port.isdecimal():
        raise WorldError(
            f"RANK and WORLD_SIZE are set, but MASTER_ADDR={host} and MASTER_PORT={port} do "
            f"not say where rank 0 is: start the processes with torchrun"
        )
    return host, int(port)


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the first host of the job, and a port that two jobs on it are unlikely to share."""
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[key] for key in lists if environ.get(key)), None)
    if nodes is None and _number(environ, "SLURM_NNODES", "1") > 1:
        raise WorldError("SLURM_JOB_NODELIST is not set: start the processes with srun")
    host = first_host(nodes) if nodes else "127.0.0.1"
    job = _number(environ, "SLURM_JOB_ID", environ.get("SLURM_JOBID", "0"))
    return host, 10000 + job % 20000


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm host list.

    >>> first_host("node[012-014,020],other"), first_host("r1i0n[3,5]"), first_host("a,b")
    ('node012', 'r1i0n3', 'a')
    """
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
