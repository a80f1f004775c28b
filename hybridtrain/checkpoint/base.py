"""The base of a checkpoint: frozen weights that it leaves out, since they are elsewhere.

Only models with an adapter have one (`_base.adapter`), after `init_from`. The checkpoint names the
source in `state.json`, with a digest of its tensors:

    "base": {"source": "./llama", "digest": "8a1b...", "prefix": ""}
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
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel

# Of each tensor, the numbers at its beginning that the digest covers.
_FIRST = 256


class Source(NamedTuple):
    """The weights of a source.

    Attributes:
        tensors: by the source's names; a base's tensors come first.
        extra: other state.
        base: the source of the frozen weights: another one if this is a checkpoint of an adapter.
        base_tensors: what is there, by its names without a prefix.
        prefix: of these names.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any]
    base: str
    base_tensors: dict[str, Tensor]
    prefix: str = ""

    def below(self, prefix: str) -> Source:
        """Returns the tensors that begin with `prefix`, without it."""
        if not prefix:
            return self
        parts = [
            {n.removeprefix(prefix): value for n, value in part.items() if n.startswith(prefix)}
            for part in (self.tensors, self.base_tensors)
        ]
        return Source(parts[0], self.extra, self.base, parts[1], prefix)


def open_source(located: Path, source: str) -> Source:
    """Returns the weights at a place, and of its base if it is a checkpoint that has one.

    Args:
        located: of `locate`.
        source: as the user has named it.

    Raises:
        CheckpointError: it cannot be read, or the base is missing or has changed.
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
    """Returns what a checkpoint says of its base; None: it has none, or is another source."""
    if not (checkpoint / MANIFEST).exists():
        return None
    state = read_tree(checkpoint, "state", read_manifest(checkpoint)["files"])
    return state.get("base")  # type: ignore[no-any-return]


class Base(NamedTuple):
    """The base of a checkpoint, found.

    Attributes:
        source: as `init_from` takes it.
        place: the file or folder.
        tensors: by their names without a prefix.
    """

    source: str
    place: Path
    tensors: dict[str, Tensor]


def open_base(checkpoint: Path, record: Mapping[str, str], now: str | None = None) -> Base:
    """Returns the base of a checkpoint.

    Args:
        checkpoint: its directory.
        record: of `record_of_base`.
        now: where the base is, if it was moved; None or not the same weights: where it was.

    Raises:
        CheckpointError: it is at neither place, or its weights have changed.
    """
    problems = []
    for source in dict.fromkeys([now or record["source"], record["source"]]):
        try:
            place = locate(find_weights(source), False)
            found = open_source(place, source)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        tensors = (found if found.prefix else found.below(record["prefix"])).base_tensors
        if digest_of(tensors) == record["digest"]:
            return Base(found.base, place, tensors)
        problems.append(f"init_from={source} has other weights now")
    raise CheckpointError(
        f"{checkpoint} holds an adapter only, which was trained on the weights of "
        f"{record['source']}, and these are not there: {'; '.join(problems)}. If they were moved, "
        f"set init_from= to their place, or the key that the recipe takes it from, such as "
        f"model.source="
    )


def is_moved(checkpoint: Path, now: str) -> bool:
    """Returns whether a checkpoint has a base, it is not where it was, and `now` is another place.

    Args:
        checkpoint: its directory.
        now: a source, as `init_from` takes it.
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
    """Returns a digest of names, shapes, dtypes and the first numbers of each tensor."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        first = tensor.detach().reshape(-1)[:_FIRST].contiguous()
        hasher.update(first.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def without_base(
    model: HybridModel, state: Mapping[str, Any], updated: Collection[str]
) -> dict[str, Any]:
    """Returns the entries of a state dict that a checkpoint of `model` has to hold.

    Args:
        model: which may have a base.
        state: with the model's own tensors.
        updated: names of parameters that an optimizer has updated; they may be frozen by now.
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
    """Returns the weights in a checkpoint, without its base's, which are apart.

    Args:
        path: its directory, verified.
        files: of its manifest.
        now: where its base is, if it was moved; see `open_base`.

    Raises:
        CheckpointError: it cannot be read, or the base is missing or has changed.
    """
    tensors, extra = read_weights(path, files)
    record = record_of_base(path)
    if record is None:
        return Source(tensors, extra, "", {})
    base = open_base(path, record, now)
    return Source(tensors, extra, base.source, base.tensors, record["prefix"])
