"""Checks that all ranks have the same data set, by digests of its contents.

Every rank shuffles the whole data set and takes its share. If one rank has a different data set,
such as a copy with a missing file, some samples are used twice or not at all, and the ranks end an
epoch at different steps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Subset

from hybridtrain._base.rank_differences import check_same_settings, differences, facts_here
from hybridtrain.data.fetch import name_of
from hybridtrain.data.splits import below_common_folder
from hybridtrain.errors import DataError
from hybridtrain.world import World

# The amount of an array that its digest covers.
_COMPARED_SAMPLES = 64
_ENTRIES_OF_A_SAMPLE = 4096

# Attributes in which data sets keep in-memory arrays and file paths.
_ARRAYS = ("tensors", "data", "inputs", "targets", "tokens")
_PATHS = ("files", "samples")


def check_same_data(dataset: Any, world: World, loader: str, **settings: Any) -> None:
    """Checks that all ranks pass the same data set and settings to a loader; a collective call.

    It compares lengths and `contents_digest`, without reading samples.

    Args:
        dataset: the whole map-style data set.
        world: the ranks.
        loader: the name of the loader's class, for messages.
        **settings: arguments of the loader that must be equal on all ranks.

    Raises:
        DataError: the data sets differ; the message lists the values with their ranks and hosts.
        ConfigError: a setting differs.
    """
    if world.size == 1:
        return
    check_same_settings(world.gather, loader, settings)
    facts = {"samples": f"{len(dataset):,} samples", "contents": contents_digest(dataset)}
    for fact, values in differences(world.gather(facts_here(facts))):
        what = "number of samples" if fact == "samples" else "samples"
        raise DataError(
            f"the {what} of {name_of(dataset)} in {loader} differ{'s' * (fact == 'samples')} "
            f"between the ranks: {values}. Give every rank the whole data set in the same order: "
            f"compare the copies on these hosts, seed random splits, and do not divide it by rank, "
            f"because {loader} divides it"
        )


def contents_digest(dataset: Any) -> str | None:
    """Returns a digest of a data set's contents, in order; None if the contents are unknown.

    It covers file names relative to their common folder, with labels if there are any, some entries
    of tensors and arrays in memory, and the indices of a `Subset`. It reads no samples.
    """
    parts = list(_parts(dataset))
    return f"digest {digest_of(parts):016x}" if parts else None


def _parts(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices)
        yield from _parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _parts(part)
    else:
        for name in _ARRAYS:
            for leaf in tree_leaves(_attribute(dataset, name, Tensor | np.ndarray | tuple | dict)):
                yield from _entries(leaf)
        for name in _PATHS:
            yield from _paths(_attribute(dataset, name, list | tuple))


def _attribute(dataset: Any, name: str, kind: Any) -> Any:
    """Returns the data set's instance attribute of this name if it has this type, else ()."""
    value = getattr(dataset, "__dict__", {}).get(name)
    return value if isinstance(value, kind) else ()


def _entries(leaf: Any) -> Iterator[Any]:
    """Yields shape, dtype and some entries of a tensor or array, without copying all of it."""
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
            return
        leaf = leaf.detach().resolve_conj().resolve_neg()
    elif not isinstance(leaf, np.ndarray):
        return
    yield f"{tuple(leaf.shape)} {leaf.dtype}"
    if leaf.ndim and 0 not in leaf.shape:
        # A view first, so that nothing but the compared entries is copied or read from a mapped
        # file.
        sampled = leaf[:: max(1, len(leaf) // _COMPARED_SAMPLES)]
        yield sampled.reshape(len(sampled), -1)[:, :_ENTRIES_OF_A_SAMPLE]


def _paths(entries: Sequence[Any]) -> Iterator[str]:
    """Yields strings that identify a list of paths, or of pairs of a path and a label.

    Yields nothing for other lists. The strings are few and long, because there may be millions of
    files.
    """
    pairs = all(isinstance(entry, tuple) and len(entry) == 2 for entry in entries)
    paths = [entry[0] for entry in entries] if pairs else entries
    if paths and all(isinstance(path, str | os.PathLike) for path in paths):
        # Paths contain no zero byte, so lists differ if their texts do.
        yield "\0".join(below_common_folder(paths))
        yield repr([entry[1] for entry in entries]) if pairs else ""


def digest_of(samples: Any) -> int:
    """Returns a 62-bit hash of samples."""
    hasher = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(samples):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):  # the bytes of an object array are addresses
            hasher.update(repr(leaf.tolist()).encode() if leaf.dtype.hasobject else leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | None):
            hasher.update(repr(leaf).encode())
    return int.from_bytes(hasher.digest()) >> 2
