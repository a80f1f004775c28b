"""The record of the data in a checkpoint: the classes, the number of samples, the files.

It is saved in `state.json` of each checkpoint of a run, under `dataset`. Class numbers mean nothing
without the names, and a position in an epoch means nothing when samples were added.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtrain.checkpoint import read_manifest, read_tree
from hybridtrain.data import DataSplits, length_of
from hybridtrain.errors import DataError

_log = logging.getLogger(__name__)


def record_of(data: DataSplits) -> dict[str, Any]:
    """Returns the record of a data set, in JSON's types."""
    return {
        "classes": data.metadata.get("classes"),
        "train": length_of(data.train),
        "eval": length_of(data.eval),
        "digest": data.digest,
        "metadata": _in_json(data.metadata),
        "vocabulary": data.vocabulary,
    }


def _in_json(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns metadata in JSON's types; None: they cannot be saved, as those of own data sets."""
    try:
        saved: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError):
        return None
    return saved


def trained_on(checkpoint: Path) -> tuple[dict[str, Any] | None, bool]:
    """Returns the metadata of the data that a checkpoint was trained on, and if it has a tokenizer.

    The metadata is None if the checkpoint does not have it.
    """
    saved = _saved(checkpoint)
    metadata = saved.get("metadata")
    return (
        dict(metadata) if isinstance(metadata, Mapping) else None,
        saved.get("vocabulary") is not None,
    )


def classes_of(checkpoint: Path) -> list[str] | None:
    """Returns the names of the classes that a checkpoint was trained on; None: numbers alone."""
    names = _saved(checkpoint).get("classes")
    return None if names is None else [*map(str, names)]


def check_same_classes(checkpoint: Path, data: DataSplits) -> None:
    """Checks that numbers of classes stand for the same names in a checkpoint and in the data.

    Raises:
        DataError: they do not; it has both lists.
    """
    before, now = _saved(checkpoint).get("classes"), data.metadata.get("classes")
    if before is not None and now is not None and list(before) != list(now):
        raise DataError(
            f"the classes of {checkpoint} are {', '.join(before)}, and those of the data are "
            f"{', '.join(now)}: use data with the same classes"
        )


def say_other_data(checkpoint: Path, data: DataSplits) -> None:
    """Logs how the data differs from the data that the checkpoint was trained on."""
    if difference := _difference(_saved(checkpoint), record_of(data)):
        _log.info("the data has changed since %s was saved: %s", checkpoint.name, difference)


def refuse_other_data(checkpoint: Path, data: DataSplits, allow_changes: bool) -> None:
    """Checks that a run goes on with the samples that it began with.

    Raises:
        DataError: samples or files differ, and `allow_changes` is False; it has both numbers.
    """
    check_same_classes(checkpoint, data)
    difference = _difference(_saved(checkpoint), record_of(data))
    if difference and not allow_changes:
        raise DataError(
            f"the data has changed since {checkpoint} was saved: {difference}. Their order and the "
            f"samples that are held out would be others: restore the data; or begin a run with "
            f"init_from={checkpoint} and another run_name=; or set allow_changes=true"
        )
    if difference:
        _log.warning("the data has changed since %s was saved: %s", checkpoint.name, difference)


def _saved(checkpoint: Path) -> Mapping[str, Any]:
    """Returns the record in a checkpoint; empty if it was not saved by the command `train`."""
    state = read_tree(checkpoint, "state", read_manifest(checkpoint)["files"])
    return state.get("dataset") or {}


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns what differs between two records; empty if nothing does."""
    numbers = [
        f"{before.get(key):,} then and {now[key]:,} now, to {purpose}"
        for key, purpose in (("train", "train on"), ("eval", "evaluate on"))
        if None not in (before.get(key), now[key]) and before[key] != now[key]
    ]
    if numbers:
        return "samples: " + "; ".join(numbers)
    if None not in (before.get("digest"), now["digest"]) and before["digest"] != now["digest"]:
        return f"its files have other names or sizes, with {now['train']:,} samples as before"
    return ""
