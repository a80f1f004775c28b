"""The base of a checkpoint: frozen weights that it omits, because their source still has them.

Only models with an adapter have a base (`_base.adapter`), after `init_from`. The checkpoint names
the source in `state.json`, with a digest of its tensors:

    "base": {"source": "./llama", "digest": "8a1b...", "prefix": ""}

and for a quantized base also `"quantization": "nf4, 28 layers"`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrain._base.adapter import BaseWeights
from hybridtrain.checkpoint.manifest import MANIFEST, read_manifest
from hybridtrain.checkpoint.weight_sources import find_weights, locate, read_source
from hybridtrain.checkpoint.weights import read_tree, read_weights
from hybridtrain.errors import CheckpointError, setting
from hybridtrain.model import HybridModel

# The number of leading elements of each tensor that the digest covers.
_FIRST = 256


class Source(NamedTuple):
    """The weights of a source.

    Attributes:
        tensors: the tensors by the source's names, a base's tensors first.
        extra: other state.
        base: the source of the frozen weights; a different one for a checkpoint of an adapter.
        base_tensors: the tensors of `base`, by its names without `prefix`.
        prefix: the prefix of those names.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any]
    base: str
    base_tensors: dict[str, Tensor]
    prefix: str = ""

    def below(self, prefix: str) -> Source:
        """Returns the tensors with names that begin with `prefix`, with the prefix removed."""
        if not prefix:
            return self
        parts = [
            {n.removeprefix(prefix): value for n, value in part.items() if n.startswith(prefix)}
            for part in (self.tensors, self.base_tensors)
        ]
        return Source(parts[0], self.extra, self.base, parts[1], prefix)


def open_source(located: Path, source: str) -> Source:
    """Returns the weights at a location, including its base if it is a checkpoint with one.

    Args:
        located: the result of `locate`.
        source: the source as the user named it.

    Raises:
        CheckpointError: it cannot be read, or its base is missing or has changed.
    """
    tensors, extra = read_source(located)
    record = record_of_base(located)
    if record is None:
        return Source(tensors, extra, source, tensors)
    base = open_base(located, record)
    merged = {**base.tensors, **tensors}
    return Source(merged, extra, base.source, base.tensors, record["prefix"])


def source_of_base(checkpoint: Path) -> str | None:
    """Returns where the base of a checkpoint was when it was saved; None: it has no base."""
    record = record_of_base(checkpoint)
    return None if record is None else record["source"]


def record_of_base(checkpoint: Path) -> dict[str, str] | None:
    """Returns a checkpoint's record of its base; None without a base or for another source."""
    if not (checkpoint / MANIFEST).exists():
        return None
    state = read_tree(checkpoint, "state", read_manifest(checkpoint)["files"])
    return state.get("base")  # type: ignore[no-any-return]


class Base(NamedTuple):
    """The base weights of a checkpoint.

    Attributes:
        source: the location in the form that `init_from` takes.
        place: the file or folder.
        tensors: the tensors by their names without a prefix.
    """

    source: str
    place: Path
    tensors: dict[str, Tensor]


def open_base(checkpoint: Path, record: Mapping[str, str], now: str | None = None) -> Base:
    """Returns the base of a checkpoint.

    Args:
        checkpoint: the directory of the checkpoint.
        record: the result of `record_of_base`.
        now: the new location of a base that was moved; None, or a location with other weights: the
            recorded one.

    Raises:
        CheckpointError: the base is at neither location, or its weights have changed.
    """
    problems = []
    # Its new place first; both may be the same.
    for source in dict.fromkeys([now or record["source"], record["source"]]):
        try:
            place = locate(find_weights(source), False)
            opened = open_source(place, source)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        # A checkpoint with a base has taken the prefix off already.
        tensors = (opened if opened.prefix else opened.below(record["prefix"])).base_tensors
        # The adapter was trained on these weights: others of the same shapes would give nonsense
        # without an error.
        if digest_of(tensors) == record["digest"]:
            return Base(opened.base, place, tensors)
        problems.append(f"init_from={source} contains other weights now")
    raise CheckpointError(
        f"{checkpoint} contains only an adapter, and its base weights {record['source']} are "
        f"missing: {'; '.join(problems)}. If they were moved, set init_from= to their location, "
        f"or the key that the recipe takes it from, such as model.source="
    )


def check_quantization(checkpoint: Path, base: BaseWeights | None) -> None:
    """Checks that a model has quantized its base as the model that saved a checkpoint.

    Args:
        checkpoint: the directory of the checkpoint.
        base: the base of the model that loads it.

    Raises:
        CheckpointError: another quantization, on which the adapter was not trained.
    """
    saved = (record_of_base(checkpoint) or {}).get("quantization", "")
    here = "" if base is None else base.quantization
    if saved != here:
        kind = saved.partition(",")[0] or None
        raise CheckpointError(
            f"the adapter in {checkpoint} was trained on a base with "
            f"{_quantized_layers(saved)}, and the model has {_quantized_layers(here)}: quantize "
            f"the same layers, {setting('quantize', kind)}, or start a new run from its weights "
            f"with {setting('init_from', checkpoint)}"
        )


def _quantized_layers(description: str) -> str:
    return f"quantized weights ({description})" if description else "plain weights"


def is_moved(checkpoint: Path, now: str) -> bool:
    """Returns True if a checkpoint's base is not at its recorded location, and `now` is another.

    Args:
        checkpoint: the directory of the checkpoint.
        now: a location in the form that `init_from` takes.
    """
    record = record_of_base(checkpoint)
    if record is None or record["source"] == now:
        return False
    try:
        open_base(checkpoint, record)
    except CheckpointError:
        return True
    return False


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns a digest of the names, shapes, dtypes and first elements of the tensors."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        # The beginning of each tensor: a base may have hundreds of gigabytes, and this is read at
        # each start.
        first = tensor.detach().reshape(-1)[:_FIRST].contiguous()
        hasher.update(first.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def without_base(
    model: HybridModel, state: Mapping[str, Any], updated: Collection[str]
) -> dict[str, Any]:
    """Returns the entries of a state dict that a checkpoint of `model` has to store.

    Args:
        model: the model, which may have a base.
        state: a state dict that includes the model's tensors.
        updated: names of parameters that an optimizer has updated, even if they are frozen now.
    """
    base: BaseWeights | None = model.base
    if base is None:
        return dict(state)
    return {
        name: value
        for name, value in state.items()
        if name not in base.names or name in updated or _is_trained(value)
    }


def _is_trained(value: Any) -> bool:
    return not isinstance(value, torch.nn.Parameter) or value.requires_grad


def checkpoint_weights(path: Path, files: Mapping[str, Any], now: str | None = None) -> Source:
    """Returns the weights in a checkpoint, with its base as `base_tensors`.

    Args:
        path: the directory of the checkpoint, already verified.
        files: the files listed in its manifest.
        now: the new location of a base that was moved; see `open_base`.

    Raises:
        CheckpointError: the checkpoint cannot be read, or its base is missing or has changed.
    """
    tensors, extra = read_weights(path, files)
    record = record_of_base(path)
    if record is None:
        return Source(tensors, extra, "", {})
    base = open_base(path, record, now)
    return Source(tensors, extra, base.source, base.tensors, record["prefix"])
