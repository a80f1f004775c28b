"""Choosing the devices of a process and the communication backend for them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridtrain.errors import WorldError, argument, setting

if TYPE_CHECKING:
    from hybridtrain.launch import Launch

DeviceSpec = None | str | Sequence[str | int]


def check_nb_part(nb_part: int) -> None:
    """Raises a WorldError if `nb_part` is not a number of devices."""
    if isinstance(nb_part, bool) or not isinstance(nb_part, int) or nb_part < 1:
        raise WorldError(f"{setting('nb_part', nb_part)} must be a positive number of devices")


def choose_devices(
    nb_part: int, devices: DeviceSpec, launch: Launch, gpus: int, share_gpus: bool = False
) -> tuple[torch.device, ...]:
    """Returns the devices of this process.

    Args:
        nb_part: the number of devices of this process.
        devices: `auto`, `cpu`, `cuda`, a device, or a list of devices; None for GPUs if available.
        launch: the launcher's facts about this process.
        gpus: the number of GPUs that this process sees.
        share_gpus: deal the GPUs out in turn if there are too few.

    Raises:
        WorldError: there are not enough devices; the message has both numbers.
    """
    needed_gpus, first = launch.local_size * nb_part, launch.local_rank * nb_part
    if gpus == nb_part and gpus < needed_gpus <= launch.node_gpus:
        # each task sees only its GPUs, as with Slurm's --gpus-per-task or --gpu-bind=single:1
        needed_gpus, first = nb_part, 0
    if isinstance(devices, str) and devices not in ("auto", "cpu", "cuda"):
        devices = [devices]
    if devices in (None, "auto", "cuda") and not gpus and launch.gpus_given:
        raise WorldError(_not_seen(launch.gpus_given))
    if devices == "auto":
        devices = "cuda" if gpus >= needed_gpus or (share_gpus and gpus) else "cpu"
    elif devices is None:
        devices = "cuda" if gpus else "cpu"
    if devices == "cpu":
        return (torch.device("cpu"),) * nb_part
    if devices == "cuda":
        if gpus < needed_gpus and not (share_gpus and gpus):
            raise WorldError(
                f"{launch.local_size} process{'es' * (launch.local_size != 1)} on this node x "
                f"{setting('nb_part', nb_part)} need {needed_gpus} GPUs, but there are {gpus}: "
                f"start fewer processes, lower {argument('nb_part')}, or set "
                f"{setting('devices', 'cpu')}"
            )
        # `% gpus` only matters with `share_gpus`: otherwise there are enough.
        return tuple(torch.device("cuda", (first + part) % gpus) for part in range(nb_part))
    chosen = [_device(item, gpus) for item in devices]
    if len(chosen) == needed_gpus:
        chosen = chosen[first : first + nb_part]
    if len(chosen) != nb_part:
        raise WorldError(
            f"{setting('devices', list(devices))} lists {len(chosen)} devices; list "
            f"{setting('nb_part', nb_part)}, or {needed_gpus} for the {launch.local_size} "
            "processes on this node"
        )
    if len({device.type for device in chosen}) > 1:
        raise WorldError(f"{setting('devices', list(devices))} mixes device types; use one type")
    return tuple(chosen)


def gpus_left_out(nb_part: int, launch: Launch, gpus: int) -> str:
    """Returns why `auto` has chosen the CPU on a machine with GPUs, and how to use them.

    Args:
        nb_part: the number of devices of this process.
        launch: the launcher's facts about this process.
        gpus: the number of GPUs that this process sees, fewer than it needs.
    """
    processes, single = launch.local_size, launch.local_size == 1
    there = f"{gpus} GPU{'s' * (gpus != 1)}"
    started = "" if single else f"{processes} processes on this node x "
    if per_process := gpus // processes:
        way = f"set {setting('nb_part', per_process)}"
        way += f" or {setting('devices', '[' + ','.join(['cuda:0'] * nb_part) + ']')}" * single
    else:
        way = f"start {gpus} process{'es' * (gpus != 1)} with {setting('nb_part', 1)}"
    return (
        f"training on the CPU: {started}{setting('nb_part', nb_part)} need{'s' * single} "
        f"{processes * nb_part} GPUs, but this machine has {there}; to train on "
        f"{'it' if gpus == 1 else 'GPUs'}, {way}"
    )


def _not_seen(variable: str) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "it is a CPU-only build: install a CUDA build"
    else:
        reason = f"check the output of nvidia-smi on {socket.gethostname()}"
    return (
        f"{variable} assigns GPUs to this process, but PyTorch {torch.__version__} sees none "
        f"({reason}); to train on the CPU, set {setting('devices', 'cpu')}"
    )


def _device(item: str | int, gpus: int) -> torch.device:
    try:
        device = torch.device("cuda", item) if isinstance(item, int) else torch.device(item)
    except RuntimeError:
        raise WorldError(
            f"{setting('devices', item, repr)} is not a device; valid examples are cpu and cuda:0"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise WorldError(
            f"{setting('devices', item, repr)} is not supported; use cpu or cuda devices"
        )
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= gpus:
            raise WorldError(
                f"{setting('devices', device)} does not exist: this machine has {gpus} GPUs"
            )
    return device


def choose_backend(backend: str | None, devices: Sequence[torch.device]) -> str:
    """Returns the communication backend for tensors on `devices`.

    Args:
        backend: `gloo` or `nccl`; None for the default of the devices.
        devices: the devices of this process.

    Raises:
        WorldError: the backend is not available, or does not support these devices.
    """
    on_gpu = devices[0].type == "cuda"
    chosen = backend or ("nccl" if on_gpu else "gloo")
    available = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    if chosen not in available:
        raise WorldError(
            f"{setting('backend', chosen)} is not available; this build of PyTorch has: "
            f"{', '.join(available)}"
        )
    if chosen == "nccl" and not on_gpu:
        raise WorldError(
            f"{setting('backend', 'nccl')} needs GPUs, but the stages are on the CPU: use gloo"
        )
    return chosen
