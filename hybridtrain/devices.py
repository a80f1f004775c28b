"""The devices of a process, the backend that fits them, and the memory that models take there.

Where a device cannot tell how much memory is taken, the tensors of a stage are counted.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtrain._torch_private import allowing_torch_func
from hybridtrain.errors import WorldError
from hybridtrain.launch import Launch

DeviceSpec = None | str | Sequence[str | int]


def check_nb_part(nb_part: int) -> None:
    """Raises a WorldError if `nb_part` is not a number of devices."""
    if isinstance(nb_part, bool) or not isinstance(nb_part, int) or nb_part < 1:
        raise WorldError(f"nb_part={nb_part} must be a positive number of devices")


def choose_devices(
    nb_part: int, devices: DeviceSpec, launch: Launch, gpus: int
) -> tuple[torch.device, ...]:
    """Returns the devices of this process; see `World.from_env`.

    Raises:
        WorldError: they are not there; the message counts what there is and what was asked for.
    """
    needed, first = launch.local_size * nb_part, launch.local_rank * nb_part
    if gpus == nb_part and gpus < needed <= launch.node_gpus:
        # Slurm shows each task its GPUs alone, as with --gpus-per-task or --gpu-bind=single:1
        needed, first = nb_part, 0
    if isinstance(devices, str) and devices not in ("auto", "cpu", "cuda"):
        devices = [devices]
    if devices in (None, "auto", "cuda") and not gpus and launch.gpus_given:
        raise WorldError(_not_seen(launch.gpus_given))
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
                f"nb_part={nb_part} need {needed} GPUs, and there are {gpus}: start fewer "
                f"processes, lower nb_part=, or set devices=cpu"
            )
        return tuple(torch.device("cuda", first + part) for part in range(nb_part))
    own = [_device(item, gpus) for item in devices]
    if len(own) == needed:
        own = own[first : first + nb_part]
    if len(own) != nb_part:
        raise WorldError(
            f"devices={list(devices)} names {len(own)} devices; give nb_part={nb_part}, or "
            f"{needed} for the {launch.local_size} processes on this node"
        )
    if len({device.type for device in own}) > 1:
        raise WorldError(f"devices={list(devices)} mixes kinds of devices; use one kind")
    return tuple(own)


def _not_seen(given: str) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        why = "it is a build for the CPU alone: install one for CUDA"
    else:
        why = f"see what nvidia-smi says on {socket.gethostname()}"
    return (
        f"{given} gives this process GPUs, and PyTorch {torch.__version__} sees none ({why}); to "
        f"train on the CPU, set devices=cpu"
    )


def _device(item: str | int, gpus: int) -> torch.device:
    try:
        device = torch.device("cuda", item) if isinstance(item, int) else torch.device(item)
    except RuntimeError:
        raise WorldError(f"devices={item!r} is not a device; examples: cpu, cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise WorldError(f"devices={item!r} is not supported; use cpu or cuda devices")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= gpus:
            raise WorldError(f"devices={device} is not there: this machine has {gpus} GPUs")
    return device


def physical_gpus(devices: Sequence[torch.device]) -> list[str]:
    """Returns the identity of each GPU in `devices`, alike in all processes of a machine.

    Their numbers are not, where each process sees other GPUs.
    """
    return [
        f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        for device in devices
        if device.type == "cuda"
    ]


def check_not_shared(gpus: Sequence[Sequence[str]]) -> None:
    """Refuses two processes on one GPU, which NCCL cannot connect.

    Args:
        gpus: `physical_gpus` of each rank.

    Raises:
        WorldError: names the ranks.
    """
    rank_of: dict[str, int] = {}
    for rank, own in enumerate(gpus):
        for gpu in own:
            if rank_of.setdefault(gpu, rank) != rank:
                raise WorldError(
                    f"ranks {rank_of[gpu]} and {rank} have the same GPU ({gpu}), and NCCL cannot "
                    f"connect them: give each process its own GPU (devices=, start fewer "
                    f"processes), or set backend=gloo"
                )


def choose_backend(backend: str | None, devices: Sequence[torch.device]) -> str:
    """Returns the backend for gradients and values on `devices`; see `World.from_env`.

    Raises:
        WorldError: it is not there, or is for other devices.
    """
    on_gpu = devices[0].type == "cuda"
    chosen = backend or ("nccl" if on_gpu else "gloo")
    there = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    if chosen not in there:
        raise WorldError(
            f"backend={chosen} is not available; this build of PyTorch has: {', '.join(there)}"
        )
    if chosen == "nccl" and not on_gpu:
        raise WorldError("backend=nccl needs GPUs, and the stages are on the CPU: use gloo")
    return chosen


@dataclass
class Saved:
    """The storages that autograd keeps for the backward.

    Attributes:
        storages: the bytes of each storage that it keeps, by `storage_id`.
    """

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.storages.values())


@contextmanager
def count_saved(module: nn.Module, given: Sequence[Tensor] = ()) -> Iterator[Saved]:
    """Counts what the forwards inside keep for their backward.

    Parameters and buffers are left out, and so are the tensors `given`, which the caller counts.
    What is kept inside `torch.func.grad` and its kin is not counted.
    """
    saved = Saved()
    others = [*module.parameters(), *module.buffers(), *given]
    apart = {number for tensor in others for number in storages(tensor)}

    def pack(tensor: Tensor) -> Tensor:
        for number, nbytes in storages(tensor).items():
            if number not in apart:
                saved.storages[number] = nbytes
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, allowing_torch_func():
        yield saved


def storages(tensor: Tensor) -> dict[int, int]:
    """Returns the bytes of each storage that holds values of `tensor`, by a number of the storage.

    A sparse tensor has several, and the wrappers of torch.func have none that can be asked for.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        parts = components(tensor)
        return {number: nbytes for part in parts for number, nbytes in storages(part).items()}
    return {int(storage._cdata): storage.nbytes()}


def storage_id(tensor: Tensor) -> int:
    """Returns a number that tensors with the same storage share; fake tensors have one too.

    For a tensor that has no storage it is the number of its first component's, or its own `id`.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return next(iter(storages(tensor)), id(tensor))


def components(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that a sparse tensor consists of; none for a tensor of another layout."""
    names = _COMPONENTS[tensor.layout]
    with torch.no_grad():
        return [getattr(tensor.detach(), name)() for name in names]


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_COMPONENTS = defaultdict(
    tuple,
    {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: _COMPRESSED_ROWS,
        torch.sparse_bsr: _COMPRESSED_ROWS,
        torch.sparse_csc: _COMPRESSED_COLUMNS,
        torch.sparse_bsc: _COMPRESSED_COLUMNS,
    },
)


def byte_size(tensor: Tensor) -> int:
    """Returns the bytes of the values of a tensor of any kind; of a sparse one, of its parts."""
    if parts := components(tensor):
        return sum(part.nbytes for part in parts)
    return tensor.nbytes


def have_same_layout(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one shape have their values in the same order in memory."""
    if one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    return one.layout != torch.strided or one.is_nested or one.stride() == other.stride()


def have_same_values(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of any kind are equal; NaN is NaN. Meta tensors are."""
    if one.is_meta or other.is_meta:  # another process has it
        return one.is_meta and other.is_meta
    if one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if one.is_nested:
        mine, theirs = one.unbind(), other.unbind()
        return len(mine) == len(theirs) and all(map(have_same_values, mine, theirs))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if parts := components(one):
        return all(map(have_same_values, parts, components(other)))
    if one.layout != torch.strided:  # of mkldnn
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    if one.is_quantized:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())


def resident_bytes(module: nn.Module) -> int:
    """Returns the bytes of the parameters of `module`, their gradients and the buffers."""
    total = sum(map(byte_size, [*module.parameters(), *module.buffers()]))
    return total + sum(byte_size(p) for p in module.parameters() if p.requires_grad)


def optimizer_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of what `optimizer` keeps for the parameters of `module`."""
    return sum(
        byte_size(value)
        for parameter in module.parameters()
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    )
