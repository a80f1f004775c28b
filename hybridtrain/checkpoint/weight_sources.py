"""Sources of weights: files, checkpoints, runs, Hub folders and Hub model names."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.files import reading
from hybridtrain.checkpoint.manifest import MANIFEST, read_manifest, verify
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.checkpoint.tensor_files import open_tensors, read_tensors
from hybridtrain.checkpoint.weights import read_weights
from hybridtrain.errors import CheckpointError, setting

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
# in a folder of Accelerate or torchtune, or an index that lists the shards
_TORCH_WEIGHTS = "pytorch_model.bin"
_TORCH_INDEX = f"{_TORCH_WEIGHTS}.index.json"
# numbered folders in a run of torchtune, Accelerate and the Trainer of transformers
_NUMBERED = re.compile(r"(epoch|checkpoint)[_-](\d+)")
# the keys under which other libraries store the weights in a file
_KEYS = ("state_dict", "model_state_dict", "model")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# a model on the Hub: `name` or `owner/name`
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def find_weights(source: str | Path) -> Path:
    """Returns the file or directory that `source` names; downloads a model from the Hub.

    Raises:
        CheckpointError: nothing has that name.
    """
    path = _local(source)
    if path is not None:
        return path
    try:
        from huggingface_hub import snapshot_download

        # other formats may run code
        folder = snapshot_download(str(source), allow_patterns=["*.safetensors*"])
    except Exception as error:  # from the network or the Hub, or it is not installed
        raise _not_on_hub(source, error) from error
    return Path(folder)


def locate_weights(source: str | Path, best: bool = False) -> Path | None:
    """Returns the file or folder that `init_from` would load, without downloading.

    Returns None for a model that exists on the Hub.

    Raises:
        CheckpointError: as in `init_from`.
    """
    path = _local(source)
    if path is not None:
        return locate(path, best)
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(str(source), timeout=10)
    except Exception as error:  # from the network or the Hub, or it is not installed
        raise _not_on_hub(source, error) from error
    return None


def _local(source: str | Path) -> Path | None:
    """Returns the file or directory that `source` names; None for the name of a Hub model.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(source)
    if path.is_file() or path.is_dir():
        return path
    if not _HUB_NAME.fullmatch(str(source)) or path.suffix in (".safetensors", *_TORCH_FILES):
        raise CheckpointError(f"{_named(source)}: no such file or directory")
    return None


def _named(source: object) -> str:
    return setting("init_from", source)


def _not_on_hub(source: str | Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {_first_line(error)}"
    return CheckpointError(
        f"{_named(source)}: no such file or directory, and no such model could be loaded from "
        f"the Hub ({reason})"
    )


def locate(source: Path, best: bool) -> Path:
    """Returns the file, checkpoint or Hub folder that `source` refers to.

    Verifies a checkpoint.
    """
    if source.is_file():
        if source.suffix == ".safetensors" or source.suffix in _TORCH_FILES:
            return source
        raise CheckpointError(
            f"{_named(source)} is not a weights file: its name must end with .safetensors or one "
            f"of {', '.join(_TORCH_FILES)}"
        )
    if (source / MANIFEST).exists():
        verify(source)
        return source
    for root in (source / "checkpoints", source):
        store = CheckpointStore(root)
        if store.steps():
            path = store.best() if best else store.newest()
            if path is None:
                raise CheckpointError(f"{_named(source)}: no checkpoint is marked as the best")
            return path  # verified by the store
    if _hub_stem(source) is not None or _has_torch_weights(source):
        return source
    if (newest := _newest_numbered(source)) is not None:
        return locate(newest, best)
    files = sorted(
        file
        for file in source.iterdir()
        if file.is_file() and file.suffix in (".safetensors", *_TORCH_FILES)
    )
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise CheckpointError(
        f"{_named(source)} is not a checkpoint, a run or a folder of the Hub: pass one weights "
        f"file (it contains: {names})"
    )


def _has_torch_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_TORCH_INDEX, _TORCH_WEIGHTS))


def _newest_numbered(folder: Path) -> Path | None:
    """Returns the highest-numbered folder in a run of another library, or None."""
    numbered = {
        int(match[2]): entry
        for root in (folder / "checkpoints", folder)
        if root.is_dir()
        for entry in root.iterdir()
        if entry.is_dir() and (match := _NUMBERED.fullmatch(entry.name))
    }
    return numbered[max(numbered)] if numbered else None


def _hub_stem(folder: Path) -> str | None:
    """Returns the stem of the file names in a Hub folder; None for another folder."""
    stems = ("model", "diffusion_pytorch_model", "adapter_model")
    return next((stem for stem in stems if any(folder.glob(f"{stem}.safetensors*"))), None)


def files_of(located: Path) -> list[Path]:
    """Returns the files that show whether two nodes have the same weights."""
    if not located.is_dir():
        return [located]
    if (located / MANIFEST).exists():
        return [located / MANIFEST]
    if (stem := _hub_stem(located)) is not None:
        return sorted(located.glob(f"{stem}*.safetensors*"))
    return sorted(located.glob("pytorch_model*.bin*"))


def read_source(located: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors found by `locate`, memory-mapped if possible, and other state."""
    if located.is_dir():
        if (located / MANIFEST).exists():
            return read_weights(located, read_manifest(located)["files"])
        if (stem := _hub_stem(located)) is not None:
            return read_tensors(located, stem), {}
        return _read_torch_folder(located), {}
    if located.suffix == ".safetensors":
        return open_tensors(located), {}
    return _read_torch_file(located), {}


def _read_torch_folder(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of `pytorch_model.bin`, or of the shards listed in its index."""
    index = folder / _TORCH_INDEX
    if not index.is_file():
        return _read_torch_file(folder / _TORCH_WEIGHTS)
    with reading(index):
        names = dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:  # never read other folders
            raise CheckpointError(f"{index} lists {name!r}, which is not a file in its folder")
        tensors |= _read_torch_file(folder / name)
    return tensors


def _read_torch_file(path: Path) -> dict[str, Tensor]:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            # Memory-mapped, so that each process reads only its stages' tensors.
            content = torch.load(path, mmap=True, **options)
        except RuntimeError:  # from before PyTorch 1.6, or not a torch.save file
            content = torch.load(path, **options)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path) and not _is_pickle(path):
            raise CheckpointError(f"init_from={path} is not a torch.save file") from None
        raise CheckpointError(
            f"init_from={path} contains objects other than tensors, and loading them could run "
            f"code: save only the state_dict() ({_first_line(error)})"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"init_from={path} is not a torch.save file: {_first_line(error)}"
        ) from None
    for key in _KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"init_from={path} has no tensors by name")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _is_pickle(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == pickle.PROTO


def _first_line(error: Exception) -> str:
    text = _ESCAPES.sub("", str(error))  # PyTorch colors its messages
    return next(iter(text.splitlines()), type(error).__name__)
