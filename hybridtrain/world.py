"""Who am I: ranks, devices and process groups, from torchrun, from Slurm, or on one's own.

Every process owns `nb_part` devices and one replica of the model. 3 nodes of 4 GPUs with nb_part=2
are 6 processes, 2 on each node:

    node 0                  node 1                  node 2
    rank 0: cuda:0 cuda:1   rank 2: cuda:0 cuda:1   rank 4: cuda:0 cuda:1
    rank 1: cuda:2 cuda:3   rank 3: cuda:2 cuda:3   rank 5: cuda:2 cuda:3
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtrain.errors import UserError, WorldError

T = TypeVar("T")

DeviceSpec = None | str | Sequence[str | int]

# Rank 0 may spend long on a download, while the others wait; a dead rank 0 is noticed at once.
_SETUP_TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. `init_method` is None for a process on its own."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    init_method: str | None


@dataclass(frozen=True)
class World:
    """This process among the others.

    TraceGuards:
        launcher: `torchrun`, `slurm` or `single`.
        rank: the number of this process; the replica of the model that it holds.
        size: the number of processes, and so of replicas.
        local_rank: the number of this process on its node.
        devices: the `nb_part` devices of its stages, in order.
        backend: `gloo` or `nccl`; what the gradients travel through.
        timeout_s: how long a collective may take before it is an error.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    devices: tuple[torch.device, ...]
    backend: str
    timeout_s: float
    setup_group: dist.ProcessGroup | None
    engine: str = "local"

    @classmethod
    def from_env(
        cls,
        nb_part: int = 1,
        devices: DeviceSpec = None,
        backend: str | None = None,
        timeout_s: float = 600.0,
    ) -> World:
        """Reads the environment and, with several processes, joins the process group.

        The environment is only read, never written.

        Args:
            nb_part: stages, and so devices, of this process.
            devices: None for the GPUs `local_rank * nb_part ...`, or the CPU on a machine without;
                `"auto"` for the GPUs if there are enough of them, else the CPU; `"cpu"`; `"cuda"`;
                or a list: `nb_part` devices that every process uses, or those of all local
                processes one after the other.
            backend: None for `nccl` on GPUs and `gloo` on CPUs.
            timeout_s: how long a collective may take, in seconds.

        Raises:
            WorldError: the devices, the backend or the launcher's variables do not fit.
        """
        launch = detect(os.environ)
        places = choose_devices(nb_part, devices, launch, torch.cuda.device_count())
        chosen = _choose_backend(backend, places)
        setup_group = _join(launch, chosen, places, timeout_s) if launch.size > 1 else None
        return cls(
            launcher=launch.launcher,
            rank=launch.rank,
            size=launch.size,
            local_rank=launch.local_rank,
            devices=places,
            backend=chosen,
            timeout_s=timeout_s,
            setup_group=setup_group,
        )

    @property
    def nb_part(self) -> int:
        """The number of stages of this process."""
        return len(self.devices)

    @property
    def replica(self) -> int:
        """The index of this process's replica of the model."""
        return self.rank

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return self.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes to disk and to the terminal."""
        return self.rank == 0

    def new_group(self) -> dist.ProcessGroup | None:
        """A process group of all ranks; a collective call. None where there is one process."""
        if self.size == 1:
            return None
        return _new_group(self.backend, timedelta(seconds=self.timeout_s))

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Rank 0 runs `action` while the others wait; they get None.

        An error of rank 0 is raised on all of them, so that none waits for ever.
        """
        if self.size == 1:
            return action()
        result, error = None, None
        if self.is_main:
            try:
                result = action()
            except Exception as caught:
                error = caught
        told = self.broadcast(None if error is None else (isinstance(error, UserError), str(error)))
        if error is not None:
            raise error
        if told is not None:
            expected, message = told
            raise UserError(message) if expected else RuntimeError(f"rank 0 failed: {message}")
        return result

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank; any picklable object."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.setup_group, group_src=0)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.setup_group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, in place; on the CPU or one of the devices."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with rank 0's."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leaves the process groups, at the end of a run that went well; the world is done with.

        Returns when the threads of `broadcast`, `gather` and `on_main` have ended. One that still
        lets go of the tensors of the last message while the interpreter ends would abort the
        process (pytorch/pytorch#190489), and torchrun would count a run that is done as a failed
        one. The threads that average gradients end with their model.
        """
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            object.__setattr__(self, "setup_group", None)  # the last reference to it


def detect(environ: Mapping[str, str]) -> Launch:
    """Who launched this process. torchrun wins over Slurm, because it may run inside a Slurm job.

    Raises:
        WorldError: a variable is missing or no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE")
        return Launch(
            launcher="torchrun",
            rank=_number(environ, "RANK"),
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", "0"),
            local_size=_number(environ, "LOCAL_WORLD_SIZE", str(size)),
            init_method="env://" if size > 1 else None,
        )
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        size = _number(environ, "SLURM_NTASKS")
        nodes = _number(environ, "SLURM_NNODES", "1")
        per_node = environ.get("SLURM_NTASKS_PER_NODE") or str(-(-size // nodes))
        return Launch(
            launcher="slurm",
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            local_size=_number({"SLURM_NTASKS_PER_NODE": per_node}, "SLURM_NTASKS_PER_NODE"),
            init_method=f"tcp://{_slurm_address(environ)}" if size > 1 else None,
        )
    return Launch("single", rank=0, size=1, local_rank=0, local_size=1, init_method=None)


def _slurm_address(environ: Mapping[str, str]) -> str:
    """The first host of the job as master, and a port that two jobs on it hardly share."""
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[key] for key in lists if environ.get(key)), None)
    if nodes is None and _number(environ, "SLURM_NNODES", "1") > 1:
        raise WorldError("SLURM_JOB_NODELIST is not set: start the processes with srun")
    host = first_host(nodes) if nodes else "127.0.0.1"
    job = _number(environ, "SLURM_JOB_ID", environ.get("SLURM_JOBID", "0"))
    return f"{host}:{10000 + job % 20000}"


def first_host(nodelist: str) -> str:
    """The first host of a Slurm host list.

    >>> first_host("node[012-014,020],other"), first_host("r1i0n[3,5]"), first_host("a,b")
    ('node012', 'r1i0n3', 'a')
    """
    match = re.match(r"\s*([^\[,\s]+)((?:\[[^\]]*\][^\[,\s]*)*)", nodelist)
    if match is None:
        raise WorldError(f"cannot read the Slurm host list {nodelist!r}")
    # of each bracket, the first number of the first range
    return match[1] + re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[2])


def _number(environ: Mapping[str, str], key: str, default: str | None = None) -> int:
    text = environ.get(key, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WorldError(f"the environment variable {key}={text!r} must be an integer") from None


def choose_devices(
    nb_part: int, devices: DeviceSpec, launch: Launch, gpus: int
) -> tuple[torch.device, ...]:
    """The devices of this process's stages; see `World.from_env`.

    Raises:
        WorldError: counts what there is and what was asked for.
    """
    if isinstance(nb_part, bool) or not isinstance(nb_part, int) or nb_part < 1:
        raise WorldError(f"pipeline.nb_part={nb_part} must be a positive number of stages")
    needed = launch.local_size * nb_part
    if isinstance(devices, str) and devices not in ("auto", "cpu", "cuda"):
        devices = [devices]
    if devices == "auto":
        devices = "cuda" if gpus >= needed else "cpu"
    elif devices is None:
        devices = "cuda" if gpus else "cpu"
    if devices == "cpu":
        return (torch.device("cpu"),) * nb_part
    if devices == "cuda":
        if gpus < needed:
            raise WorldError(
                f"{launch.local_size} process{'es' * (launch.local_size != 1)} on this node x "
                f"pipeline.nb_part={nb_part} need {needed} GPUs, and there are {gpus}: start fewer "
                f"processes, lower pipeline.nb_part, or set world.devices=cpu"
            )
        first = launch.local_rank * nb_part
        return tuple(torch.device("cuda", first + part) for part in range(nb_part))
    places = [_device(item, gpus) for item in devices]
    if len(places) == needed:
        first = launch.local_rank * nb_part
        places = places[first : first + nb_part]
    if len(places) != nb_part:
        raise WorldError(
            f"world.devices names {len(places)} devices; give pipeline.nb_part={nb_part}, or "
            f"{needed} for the {launch.local_size} processes on this node"
        )
    if len({place.type for place in places}) > 1:
        raise WorldError(f"world.devices={list(devices)} mixes kinds of devices; use one kind")
    return tuple(places)


def _device(item: str | int, gpus: int) -> torch.device:
    try:
        device = torch.device("cuda", item) if isinstance(item, int) else torch.device(item)
    except RuntimeError:
        raise WorldError(f"world.devices: {item!r} is no device; examples: cpu, cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise WorldError(f"world.devices: {item!r} is not supported; use cpu or cuda devices")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= gpus:
            raise WorldError(f"world.devices asks for {device}, and there are {gpus} GPUs")
    return device


def _choose_backend(backend: str | None, devices: Sequence[torch.device]) -> str:
    on_gpu = devices[0].type == "cuda"
    chosen = backend or ("nccl" if on_gpu else "gloo")
    there = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    if chosen not in there:
        raise WorldError(
            f"world.backend={chosen} is not there; this build of PyTorch has: {', '.join(there)}"
        )
    if chosen == "nccl" and not on_gpu:
        raise WorldError("world.backend=nccl needs GPUs, and the stages are on the CPU: use gloo")
    return chosen


def _join(
    launch: Launch, backend: str, devices: Sequence[torch.device], timeout_s: float
) -> dist.ProcessGroup:
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    if not dist.is_initialized():
        try:
            dist.init_process_group(
                # objects and CPU tensors always travel through gloo
                backend="gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
                init_method=launch.init_method,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {launch.rank} could not join the {launch.size} processes that "
                f"{launch.launcher} announced ({launch.init_method}) within world.timeout_s="
                f"{timeout_s:g} s (under Slurm, start them with srun): {error}"
            ) from error
    return _new_group("gloo", _SETUP_TIMEOUT)


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group
