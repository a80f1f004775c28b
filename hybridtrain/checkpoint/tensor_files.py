"""Tensors as safetensors files, in shards with an index as on the Hugging Face Hub.

    model.safetensors                        all tensors, up to the shard size
    model-00001-of-00002.safetensors         more tensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json             {"weight_map": {"encoder.weight": "model-00001-..."}}

safetensors' `save_file` wants a path and `save` a second copy of everything in memory, so this
module writes the files itself, tensor by tensor
(https://github.com/huggingface/safetensors#format). The library reads them, memory-mapped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridtrain._base.files import atomic_file
from hybridtrain.checkpoint.manifest import FileWriter
from hybridtrain.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
"""Maximum tensor bytes per file, as the Hub recommends; a larger tensor gets its own file."""

_log = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}
# The metadata entry for tensors of any other dtype, which are stored as bytes.
_AS_BYTES = "hybridtrain.as_bytes"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's shape and dtype without its values, as exchanged between processes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Returns the description of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: str = "cpu") -> Tensor:
        """Returns a tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def tensor_writers(
    stem: str, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES
) -> dict[str, FileWriter]:
    """Returns the files that hold `tensors`, each with a function that writes it.

    A tensor with several names is stored once, under the first; the file's metadata lists the
    others, as in `safetensors.torch.save_model`. Tensors on a device are copied to the CPU one at a
    time while writing.

    Raises:
        CheckpointError: a tensor cannot be stored because it is sparse, quantized or on meta.
    """
    check_storable(tensors)
    unique, aliases = without_aliases(tensors)
    infos = {name: TensorInfo.of(tensor) for name, tensor in unique.items()}
    written_by = dict.fromkeys(unique, 0)
    return share_writers(stem, infos, written_by, 0, unique.__getitem__, aliases, shard_bytes)


def share_writers(
    stem: str,
    tensors: Mapping[str, TensorInfo],
    written_by: Mapping[str, int],
    rank: int,
    value: Callable[[str], Tensor],
    aliases: Mapping[str, str],
    shard_bytes: int,
) -> dict[str, FileWriter]:
    """Returns the files that one process writes; each tensor is in the files of one process.

        model-00001-of-00004.safetensors       rank 0 of 4
        model-00002-of-00004.safetensors       rank 1 ...
        model.safetensors.index.json           rank 0

    Args:
        stem: the prefix of the file names.
        tensors: the tensors of all processes, each once.
        written_by: the rank of the process that writes each tensor.
        rank: the rank of this process.
        value: returns a tensor by name, when it is written.
        aliases: further names of tensors, with the name that each is stored under.
        shard_bytes: the maximum size of a file's tensors.
    """
    shards = [
        (owner, shard)
        # All processes number the shards of all, so that names agree without a message.
        for owner in sorted(set(written_by.values())) or [0]
        for shard in _shards_of(
            {n: t for n, t in tensors.items() if written_by[n] == owner}, shard_bytes
        )
    ]
    count = len(shards)
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    named = list(zip(names if count > 1 else [f"{stem}.safetensors"], shards, strict=True))
    files: dict[str, FileWriter] = {
        file: partial(_write, shard, aliases, value)
        for file, (owner, shard) in named
        if owner == rank
    }
    if rank == 0 and count > 1:
        index = {
            "metadata": {"total_size": sum(info.nbytes for info in tensors.values())},
            "weight_map": {name: file for file, (_, shard) in named for name in shard},
        }
        rendered = (json.dumps(index, indent=2) + "\n").encode()
        files[f"{stem}.safetensors.index.json"] = lambda file: file.write(rendered)
    return files


def write_weights(path: Path, state: Mapping[str, Any], metadata: Mapping[str, str] = {}) -> None:
    """Writes the tensors of a state dict to one safetensors file, atomically.

    Non-tensor results of `get_extra_state` are skipped with a warning.

    Args:
        path: the path of the file.
        state: the tensors by name.
        metadata: strings for the file's metadata, under names that no tensor has.

    Raises:
        CheckpointError: a tensor cannot be stored, or the file cannot be written.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if left_out := ", ".join(name for name in state if name not in tensors):
        _log.warning("%s omits %s: a safetensors file stores only tensors", path, left_out)
    check_storable(tensors)
    unique, aliases = without_aliases(tensors)
    infos = {name: TensorInfo.of(tensor) for name, tensor in unique.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            _write(infos, aliases, unique.__getitem__, file, metadata)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def read_tensors(folder: Path, stem: str, files: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Returns the tensors of `tensor_writers`, or of a folder of the Hub, by name.

    They are memory-mapped: read on use, and changes do not reach the file.

    Args:
        folder: the folder of the files.
        stem: the prefix of their names, such as `model`.
        files: the only file names that may be read; None: any in the folder.

    Raises:
        CheckpointError: a file is missing or invalid.
    """
    allowed = None if files is None else set(files)
    index = f"{stem}.safetensors.index.json"
    if not ((folder / index).is_file() if allowed is None else index in allowed):
        names = [f"{stem}.safetensors"]
    else:
        try:
            weight_map = json.loads((folder / index).read_bytes())["weight_map"]
            names = list(dict.fromkeys(weight_map.values()))
            if not all(isinstance(name, str) for name in names):
                raise ValueError("the weight_map does not name files")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / index} cannot be read: {error!r}") from None
    tensors: dict[str, Tensor] = {}
    for name in names:
        # only a plain name in this folder: never read other folders
        if "/" in name or name.startswith(".") or (allowed is not None and name not in allowed):
            raise CheckpointError(f"{folder} has no tensor file {name!r} that may be read")
        tensors |= open_tensors(folder / name)
    return tensors


def open_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one safetensors file by name, memory-mapped.

    Raises:
        CheckpointError: the file is missing, or is not a safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            as_bytes = json.loads(metadata.pop(_AS_BYTES, "{}"))
            for name in file.keys():  # noqa: SIM118, it is not a mapping
                # Memory-mapped: nothing is read before it is used.
                tensor = file.get_tensor(name)
                if name in as_bytes:
                    dtype, shape = as_bytes[name]
                    tensor = tensor.view(getattr(torch, dtype)).reshape(shape)
                tensors[name] = tensor
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
    for other, name in metadata.items():
        if other not in tensors and name in tensors:
            tensors[other] = tensors[name]
    return tensors


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns each tensor once, under its first name, and the first name for every alias.

    Tensors that overlap in memory only in part are not aliases.
    """
    first: dict[Any, str] = {}
    unique, aliases = {}, {}
    for name, tensor in tensors.items():
        key: Any = id(tensor)
        # Empty tensors all have the address 0.
        if tensor.numel() > 0 and not tensor.is_meta:
            # Lazy bits too: the same memory holds other numbers then.
            layout = tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
            key = tensor.device, tensor.data_ptr(), tensor.dtype, layout
        if (same := first.setdefault(key, name)) == name:
            unique[name] = tensor
        else:
            aliases[name] = same
    return unique, aliases


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Checks that each tensor has its values in plain memory.

    Raises:
        CheckpointError: names the first tensor that does not.
    """
    for name, tensor in tensors.items():
        problem = None
        if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
            problem = "has no values yet (device meta, or a lazy module): initialize it first"
        elif tensor.layout != torch.strided:
            problem = f"has the layout {tensor.layout}: store to_dense() of it"
        elif tensor.is_quantized:
            problem = "is quantized: store int_repr(), the scale and the zero point"
        elif is_traceable_wrapper_subclass(tensor):
            problem = f"is a {type(tensor).__name__}, which wraps other tensors: store those"
        if problem:
            raise CheckpointError(
                f"cannot save {name}: a checkpoint stores plain tensors, but this one {problem}"
            )


def _shards_of(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """Returns `tensors` divided into shards, one per file, in the order of the names."""
    shards: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        # A tensor larger than a shard gets one of its own, and no file stays empty.
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _write(
    tensors: Mapping[str, TensorInfo],
    aliases: Mapping[str, str],
    value: Callable[[str], Tensor],
    file: BinaryIO,
    texts: Mapping[str, str] = {},
) -> None:
    """Writes one safetensors file: the length of the header, the header as JSON, the values."""
    # widest dtype first, so that every tensor is aligned, as the library does it
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    entries: dict[str, Any] = {}
    as_bytes = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        dtype, shape = _DTYPES.get(tensor.dtype), list(tensor.shape)
        begin, end = end, end + tensor.nbytes
        if dtype is None:
            as_bytes[name] = str(tensor.dtype).removeprefix("torch."), shape
            dtype, shape = "U8", [tensor.nbytes]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    metadata = {
        **texts,
        "format": "pt",
        **{o: name for o, name in aliases.items() if name in tensors},
    }
    if as_bytes:
        metadata[_AS_BYTES] = json.dumps(as_bytes)
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    # safetensors aligns the values to 8 bytes after the length and the header.
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name in order:
        # an empty tensor has no memory to view
        if tensors[name].nbytes > 0:
            # One tensor at a time: a gathered save holds no more than one of another process.
            file.write(_memory(value(name)))


def _memory(tensor: Tensor) -> memoryview:
    """Returns the values in C order, as bytes; copies only if order or device differ."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # another thread may read while autograd runs in this one: only access memory
    return plain.reshape(-1).view(torch.uint8).numpy().data
