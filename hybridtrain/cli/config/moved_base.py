"""The moved base of a run: any key that names it may give its new location.

A recipe such as `sft_chat` names one folder in `model.source`, `data.tokenizer` and `init_from`. If
a command line changes one of them, the others follow. For an adapter, `checkpoint.base` compares
the digest of the weights there with the digest in the checkpoint; for a run that trained all
weights, the digest of the tokenizer's vocabulary decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridtrain.cli.config import targets
from hybridtrain.cli.config.schema import LOADER_KEYS, Config
from hybridtrain.errors import CheckpointError, DataError, naming

_GROUPS = ("model", "data")


def follow_moved_base(
    config: Config, of_run: Config, checkpoints: Path, keys: Collection[str]
) -> set[str]:
    """Updates the keys of `config` that name a moved base.

    Args:
        config: the run's config with the command line applied; this may change it.
        of_run: the config of the run.
        checkpoints: the directory of the run's checkpoints.
        keys: the keys on the command line.

    Returns:
        the keys that name the base; none if the command line does not move it, or the base is still
            at its recorded location: these keys then change the run like any other.
    """
    initial = _other_source(config, of_run, keys)
    if not initial and not any(key.startswith(_GROUPS) for key in keys):
        return set()
    from hybridtrain.checkpoint import is_moved, parse_init_from, source_of_base  # imports torch

    if (newest := _newest(checkpoints)) is None:
        return set()
    base = source_of_base(newest)
    source = of_run.data.get("tokenizer") if base is None else base
    named = [
        (group, name)
        for group in _GROUPS
        for name, value in getattr(of_run, group).items()
        if value == source
    ]
    places = [initial, *(getattr(config, g).get(n) for g, n in named if f"{g}.{n}" in keys)]
    now = next((place for place in places if isinstance(place, str) and place != source), None)
    if now is None or not isinstance(source, str):
        return set()
    if not (
        _tokenizer_is_moved(newest, config, source, now) if base is None else is_moved(newest, now)
    ):
        return set()
    for group, name in named:
        if f"{group}.{name}" not in keys:
            setattr(config, group, {**getattr(config, group), name: now})
    started = parse_init_from(of_run.init_from) or {}
    if not initial and (base is not None or started.get("source") == source):
        flags = of_run.init_from if isinstance(of_run.init_from, dict) else None
        config.init_from = now if flags is None else {**flags, "path": now}
    return {"init_from", *(f"{group}.{name}" for group, name in named)}


def _other_source(config: Config, of_run: Config, keys: Collection[str]) -> str | None:
    """Returns the source in `init_from` if the run did not start from it."""
    from hybridtrain.checkpoint import parse_init_from  # imports torch

    if "init_from" not in {key.partition(".")[0] for key in keys}:
        return None
    arguments = parse_init_from(config.init_from)
    if arguments is None or arguments == parse_init_from(of_run.init_from):
        return None
    return str(arguments["source"])


def _newest(checkpoints: Path) -> Path | None:
    """Returns the newest checkpoint; None: there is none, or it is damaged."""
    from hybridtrain.checkpoint import CheckpointStore, source_of_base  # imports torch

    store = CheckpointStore(checkpoints)
    if not store.steps():
        return None
    try:
        newest = store.newest_up_to(store.steps()[-1])
        if newest is not None:
            source_of_base(newest)
    except CheckpointError:  # damaged; loading it reports that
        return None
    return newest


def _tokenizer_is_moved(checkpoint: Path, config: Config, source: str, now: str) -> bool:
    """Returns True if a run's tokenizer is not at `source`, and the same one is at `now`.

    Raises:
        CheckpointError: the tokenizer at `now` has another vocabulary.
    """
    from hybridtrain.checkpoint import read_manifest, read_tree

    state = read_tree(checkpoint, "state", read_manifest(checkpoint)["files"])
    record = state.get("dataset") or {}
    recorded, metadata = record.get("vocabulary"), record.get("metadata")
    if recorded is None or metadata is None:
        return False
    with suppress(DataError):
        _vocabulary(config, metadata, source)
        return False  # it is still there
    vocabulary = _vocabulary(config, metadata, now)
    if vocabulary is not None and vocabulary != recorded:
        raise CheckpointError(
            f"{checkpoint} was trained with the tokenizer of {source}, of {recorded}, but the "
            f"tokenizer of {now} has {vocabulary}: set data.tokenizer= to the place of the same "
            f"tokenizer"
        )
    return vocabulary is not None


def _vocabulary(config: Config, metadata: Mapping[str, Any], place: str) -> str | None:
    """Returns the digest of the vocabulary of the run's data with the tokenizer of `place`.

    Raises:
        DataError: there is no tokenizer.
    """
    from hybridtrain.data import DataSplits  # imports torch

    data = {**config.data, "tokenizer": place, "predict_path": None}
    target, arguments = targets.check(
        "data", data, DataSplits, config.allow_targets, ignore=LOADER_KEYS
    )
    load = getattr(target, "for_trained_models", None)
    if load is None:
        return None
    with naming({name: f"data.{name}" for name in arguments}):
        vocabulary: str | None = load(metadata, **arguments).vocabulary
    return vocabulary
