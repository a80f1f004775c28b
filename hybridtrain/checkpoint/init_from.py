"""Initial weights from elsewhere: a file, a checkpoint, a run, or a folder of the Hub."""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain.checkpoint.manifest import MANIFEST, read_manifest, verify
from hybridtrain.checkpoint.read import CheckpointReader
from hybridtrain.checkpoint.state import EXTRA_STATE, load_weights, read_weights, split_state
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.checkpoint.tensor_files import open_tensors, read_tensors, without_aliases
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
# the beginnings that wrappers give to names, and where other libraries put the weights in a file
_PREFIXES = ("module.", "_orig_mod.", "model.")
_KEYS = ("state_dict", "model_state_dict", "model")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# of a model on the Hub: `name` or `owner/name`
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitReport:
    """The names of tensors that were loaded into a model, and of those that were not."""

    source: str
    """The file or directory."""
    loaded: tuple[str, ...]
    """Names of the model."""
    missing: tuple[str, ...]
    """Names of the model that the source lacks: they keep their initial values."""
    unexpected: tuple[str, ...]
    """Names of the source that the model lacks: they are left out."""
    reshaped: tuple[str, ...]
    """Names of both, whose shapes differ: left out; each with the two shapes."""
    prefix: str
    """The beginning of the names in the source, or in the model, that was left out to match."""

    def problems(self) -> list[str]:
        """Returns one phrase per tensor that was not loaded."""
        return [
            *(f"it lacks {name}" for name in self.missing),
            *(f"the model has no {name}" for name in self.unexpected),
            *self.reshaped,
        ]

    def __str__(self) -> str:
        lines = [f"initial weights from {self.source}: {len(self.loaded)} tensors loaded"]
        if self.prefix:
            lines[0] += f", by their names without {self.prefix!r}"
        for kind in ("missing", "unexpected", "reshaped"):
            if names := getattr(self, kind):
                shown = ", ".join(names[:5]) + (f", and {len(names) - 5} more" * (len(names) > 5))
                lines.append(f"  {kind}: {shown}")
        return "\n".join(lines)


def init_from(
    model: HybridModel, source: str | Path, *, strict: bool = True, best: bool = False
) -> InitReport:
    """Loads weights alone into `model`; a collective call. Call it before training begins.

    Args:
        model: whose parameters and buffers are overwritten.
        source: a file of safetensors, or of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`; loaded
            with `weights_only=True`); the directory of a checkpoint or of a run; a folder as on the
            Hugging Face Hub; or the name of a model there, whose safetensors are fetched into the
            Hub's cache. Each process reads the tensors of its stages; if not all of them
            see the same files as rank 0, it sends the tensors one by one.
        strict: a tensor that is missing, unexpected or of another shape is an error. Otherwise the
            others are loaded, and the report is logged.
        best: of a run, the best checkpoint in place of the newest.

    Returns:
        what was loaded, on every rank.

    Raises:
        CheckpointError: the source is missing, damaged or holds no weights; or, if `strict`, does
            not fit; or none of its names is one of the model.
    """

    world = model.world
    folder = world.from_main(lambda: _locate(find_weights(source), best))
    reader = CheckpointReader(world, _files_of(folder))

    def read() -> tuple[dict[str, Tensor], dict[str, Any], InitReport]:
        return _matched(model.net, folder, source, strict)

    chosen, extra, report = reader.read(read) or ({}, {}, None)
    report = world.broadcast(report)
    own, own_extra = split_state(model.net.state_dict())
    known_extra = {name: value for name, value in extra.items() if name in own_extra}
    load_weights(model, reader, {**own, **chosen}, {**own_extra, **known_extra})
    assert report is not None
    if world.is_main:
        _log.info("%s", report)  # with strict=false, the user has accepted what is left out
    return report


def locate_weights(source: str | Path, best: bool = False) -> Path | None:
    """Returns the file or folder whose tensors `init_from` would load; nothing is fetched.

    None: a model on the Hub, which is there.

    Raises:
        CheckpointError: as of `init_from`.
    """
    path = _local(source)
    if path is not None:
        return _locate(path, best)
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(str(source), timeout=10)
    except Exception as error:  # of the network, of the Hub, or it is not installed
        raise _not_on_hub(source, error) from error
    return None


def check_weights(net: nn.Module, located: Path, source: str, *, strict: bool = True) -> InitReport:
    """Returns what `init_from` would load into `net`, which may be on the meta device.

    Args:
        net: the model.
        located: by `locate_weights`.
        source: for messages.
        strict: as of `init_from`.

    Raises:
        CheckpointError: the tensors do not fit.
    """
    return _matched(net, located, source, strict)[2]


def _matched(
    net: nn.Module, folder: Path, source: str | Path, strict: bool
) -> tuple[dict[str, Tensor], dict[str, Any], InitReport]:
    """Returns the tensors in `folder` by the names of `net`, other state, and the report.

    Raises:
        CheckpointError: they do not fit.
    """
    weights, extra = _read(folder)
    # the parameters themselves: a tied one is known by being the same under all its names
    state = net.state_dict(keep_vars=True)
    base = getattr(net, "base_model_prefix", "")  # of transformers
    chosen, report = _match(state, weights, str(source), base)
    problems = report.problems()
    if not report.loaded:
        raise CheckpointError(
            f"init_from={source} has no tensor that the model has: it has "
            f"{', '.join(sorted(weights)[:3])}, ..., and the model has "
            f"{', '.join(list(net.state_dict())[:3])}, ..."
        )
    if strict and problems:
        shown = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" * (len(problems) > 3)
        raise CheckpointError(
            f"init_from={source} does not fit the model: {shown}{more}. With strict=false the "
            f"other {len(report.loaded)} tensors are loaded"
        )
    return chosen, extra, report


def _match(
    own: Mapping[str, Any], weights: Mapping[str, Tensor], source: str, base: str
) -> tuple[dict[str, Tensor], InitReport]:
    """Returns the weights under the model's names, and the report.

    Args:
        own: of the model.
        weights: of the source.
        source: for the report.
        base: the name of the part of the model that is there without a head, such as `bert`.
    """
    tensors = {name: value for name, value in split_state(own)[0].items() if _is_weight(name)}
    plain_own = {_plain(name): name for name in tensors}
    chosen: dict[str, Tensor] = {}
    reshaped: dict[str, str] = {}
    unexpected, prefixes = [], set()
    for name, value in weights.items():
        if not _is_weight(name):
            continue
        target = next((plain_own[n] for n in _names(name, base) if n in plain_own), None)
        target = name if name in tensors else target
        if target is None:
            unexpected.append(name)
        elif value.shape != tensors[target].shape:
            there, here = list(value.shape), list(tensors[target].shape)
            reshaped[target] = f"{target} is {there} there and {here} in the model"
        else:
            chosen[target] = value
        if target is not None and target != name:
            known = (*_PREFIXES, *([f"{base}."] if base else []))
            prefixes |= {prefix for prefix in known if prefix in name or prefix in target}
    # a tied tensor has its values if one of its names has
    _, others = without_aliases(tensors)
    given = {others.get(name, name) for name in chosen}
    missing = [n for n in tensors if others.get(n, n) not in given and n not in reshaped]
    return chosen, InitReport(
        source,
        tuple(chosen),
        tuple(missing),
        tuple(unexpected),
        tuple(reshaped.values()),
        "".join(sorted(prefixes)),
    )


def _is_weight(name: str) -> bool:
    return not name.endswith(EXTRA_STATE)


def _names(name: str, base: str) -> Iterator[str]:
    """Yields what the model may call a tensor of the source."""
    plain = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", _plain(name))  # of BERT's authors
    plain = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", plain)
    yield plain
    if base:
        yield f"{base}.{plain}"
        yield plain.removeprefix(f"{base}.")
    yield plain.removeprefix("model.")  # of Lightning


def _plain(name: str) -> str:
    """Returns a name without what DDP and torch.compile put into it."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def find_weights(source: str | Path) -> Path:
    """Returns the file or directory that `source` names; a model on the Hub is fetched.

    Raises:
        CheckpointError: there is none.
    """
    path = _local(source)
    if path is not None:
        return path
    try:
        from huggingface_hub import snapshot_download

        # weights of other formats may run code
        found = snapshot_download(str(source), allow_patterns=["*.safetensors*"])
    except Exception as error:  # of the network, of the Hub, or it is not installed
        raise _not_on_hub(source, error) from error
    return Path(found)


def _local(source: str | Path) -> Path | None:
    """Returns the file or directory that `source` names; None: the name of a model on the Hub.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(source)
    if path.is_file() or path.is_dir():
        return path
    if not _HUB_NAME.fullmatch(str(source)) or path.suffix in (".safetensors", *_TORCH_FILES):
        raise CheckpointError(f"init_from={source}: there is no such file or directory")
    return None


def _not_on_hub(source: str | Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {_first_line(error)}"
    return CheckpointError(
        f"init_from={source}: there is no such file or directory, nor can such a model be had from "
        f"the Hub ({reason})"
    )


def _locate(source: Path, best: bool) -> Path:
    """Returns the file, the checkpoint or the folder of the Hub that `source` means.

    A checkpoint is verified.
    """
    if source.is_file():
        if source.suffix == ".safetensors" or source.suffix in _TORCH_FILES:
            return source
        raise CheckpointError(
            f"init_from={source} is not a file of weights: it must end with .safetensors or one of "
            f"{', '.join(_TORCH_FILES)}"
        )
    if (source / MANIFEST).exists():
        verify(source)
        return source
    for root in (source / "checkpoints", source):
        store = CheckpointStore(root)
        if store.steps():
            path = store.best() if best else store.newest()
            if path is None:
                raise CheckpointError(f"init_from={source}: no checkpoint is marked as the best")
            return path  # the store has verified it
    if _hub_stem(source) is not None:
        return source
    files = sorted(
        file
        for file in source.iterdir()
        if file.is_file() and file.suffix in (".safetensors", *_TORCH_FILES)
    )
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise CheckpointError(
        f"init_from={source} is not a checkpoint, a run or a folder of the Hub; name one file of "
        f"weights (found there: {names})"
    )


def _hub_stem(folder: Path) -> str | None:
    """Returns the beginning of the files' names in a folder as on the Hub; None if it is none."""
    stems = ("model", "diffusion_pytorch_model", "adapter_model")
    return next((stem for stem in stems if any(folder.glob(f"{stem}.safetensors*"))), None)


def _files_of(located: Path) -> list[Path]:
    """Returns the files that tell whether two nodes have the same weights."""
    if not located.is_dir():
        return [located]
    if (located / MANIFEST).exists():
        return [located / MANIFEST]
    return sorted(located.glob(f"{_hub_stem(located)}*.safetensors*"))


def _read(located: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors that `_locate` found, memory-mapped where possible, and other state."""
    if located.is_dir():
        if (located / MANIFEST).exists():
            return read_weights(located, read_manifest(located)["files"])
        stem = _hub_stem(located)
        assert stem is not None
        return read_tensors(located, stem), {}
    if located.suffix == ".safetensors":
        return open_tensors(located), {}
    return _read_torch_file(located), {}


def _read_torch_file(path: Path) -> dict[str, Tensor]:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            content = torch.load(path, mmap=True, **options)
        except RuntimeError:  # of before PyTorch 1.6, or not a file of torch.save
            content = torch.load(path, **options)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path) and not _is_pickle(path):
            raise CheckpointError(f"init_from={path} is not a file of torch.save") from None
        raise CheckpointError(
            f"init_from={path} holds more than tensors, which is not loaded because it could run "
            f"code: save its state_dict() alone ({_first_line(error)})"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"init_from={path} is not a file of torch.save: {_first_line(error)}"
        ) from None
    for key in _KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"init_from={path} holds no tensors by name")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _is_pickle(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == pickle.PROTO


def _first_line(error: Exception) -> str:
    text = _ESCAPES.sub("", str(error))  # PyTorch's messages have colours
    return next(iter(text.splitlines()), type(error).__name__)


def parse_init_from(setting: Any) -> dict[str, Any] | None:
    """Returns the arguments of `init_from` in a config's value, or None if it is null.

    Args:
        setting: a path, or a mapping of `path`, `strict` and `best`.

    Raises:
        CheckpointError: it is neither.
    """
    if setting is None:
        return None
    given = setting if isinstance(setting, Mapping) else {"path": setting}
    path = given.get("path")
    flags = {key: value for key, value in given.items() if key != "path"}
    if path is None and "path" in given:
        raise CheckpointError(
            "init_from.path is not set: set it, or the key that the recipe takes it from, such as "
            "model.source="
        )
    if (
        not isinstance(path, str)
        or not path
        or flags.keys() - {"strict", "best"}
        or not all(isinstance(value, bool) for value in flags.values())
    ):
        raise CheckpointError(
            f"init_from={setting} must be a path, or a mapping such as "
            f"{{path: weights.safetensors, strict: false, best: false}}"
        )
    return {"source": path, **flags}
