"""The data of a run: loads it, compares it across ranks, and checks it when a run resumes.

load      `load_data`: on rank 0 first, then on the others
compare   across ranks: hosts may have their own copies of a data set and their own package
          versions; one exchange compares them before anything is built from the data
record    `record_of`, saved in `state.json` of each checkpoint under `dataset`; later commands
          compare with it, because class numbers mean nothing without their names, and a position
          in an epoch means nothing after samples were added
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridtrain import __version__
from hybridtrain._base.rank_differences import RankFacts, differences, facts_here
from hybridtrain.checkpoint import read_manifest, read_tree
from hybridtrain.cli.config import targets
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import LOADER_KEYS, Config
from hybridtrain.data import DataSplits, digest_of_texts, length_of
from hybridtrain.datasets import STANDARD_INPUT
from hybridtrain.errors import ConfigError, DataError, UserError, naming
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# Keys with the location of a data set, in the order of messages.
_PLACES = ("root", "path", "file", "files", "folder", "data_dir", "eval_path")

# Packages, in addition to Python and hybridtrain, whose versions affect results.
_PACKAGES = ("torch", "torchvision", "transformers", "datasets", "peft", "timm", "numpy")

# The maximum number of class names in a message.
_MOST_CLASSES = 8

_SAME = {
    "train": "the number of samples to train on",
    "eval": "the number of samples to evaluate on",
    "predict": "the number of samples to predict",
    "classes": "the classes of the data",
    "vocabulary": "the vocabulary of the tokenizer",
    "digest": "the names, sizes or contents of the data files",
}


def check_tokenizer(config: Config) -> None:
    """Rejects a tokenizer that is the path of a function that the config may not call."""
    tokenizer = str(config.data.get("tokenizer", ""))
    # not one of torchtext's names; a value with a slash is the location of a tokenizer
    if "/" not in tokenizer and ("." in tokenizer or ":" in tokenizer):
        targets.resolve("data.tokenizer", tokenizer.replace(":", "."), config.allow_targets)


def load_data(config: Config, world: World) -> DataSplits:
    """Loads the data set, first on rank 0, then on the others.

    With `data.download`, rank 0 downloads it first, then the first process of each other node if
    the node does not have it, because nodes may have their own disks.

    All processes compare their data and warn about different package versions.

    Raises:
        DataError: a process cannot load the data, or loaded different data; names ranks and hosts.
    """

    def load(download: bool) -> DataSplits:
        settings = dict(config.data)
        if "download" in settings:
            settings["download"] = download
        check_tokenizer(config)
        try:
            return targets.build(
                "data",
                settings,
                DataSplits,
                config.allow_targets,
                defaults=_of_model(config),
                ignore=LOADER_KEYS,
            )
        except FileNotFoundError as error:
            where = _place_of_data(config)
            raise DataError(
                f"the data set {config.data['_target_']} was not found: {error}"
                + (f" ({where})" if where else "")
            ) from error

    _check_standard_input(config, world)
    download = bool(config.data.get("download"))
    first_of_node = world.local_rank == 0
    data = world.on_main(lambda: load(download))

    def load_here() -> DataSplits:
        try:
            return load(download and first_of_node)
        except UserError as error:
            raise DataError(f"rank {world.rank} on {socket.gethostname()}: {error}") from error

    # with a download, the first process of each node loads before the node's other processes
    for loads in (first_of_node, not first_of_node) if download else (True,):
        if world.is_main or not loads:
            world.on_all(lambda: None)
        else:
            data = world.on_all(load_here)
    if world.size > 1:
        _check_facts(world.gather(_facts_of(config, data)), config)
    assert data is not None
    return data


def load_for_trained(settings: Settings, world: World, checkpoint: Path) -> DataSplits:
    """Returns the data that a command on a trained model uses, without others if possible.

    This is possible if the checkpoint contains the metadata of its data and the data function
    supports `for_trained_models`. Otherwise, it calls `load_data`.

    Args:
        settings: the settings of the command.
        world: the processes.
        checkpoint: the checkpoint that the command reads.
    """
    config, of_run = settings.config, settings.of_run
    same = of_run is not None and all(
        of_run.data.get(key) == config.data.get(key) for key in ("_target_", "task")
    )
    metadata, has_tokenizer = world.from_main(
        lambda: metadata_of(checkpoint) if same else (None, False)
    )
    if metadata is None:
        return load_data(config, world)
    predicts = settings.command == "predict" and config.data.get("predict_path") is not None
    evaluates = settings.uses("evaluation data") and not predicts
    check_tokenizer(config)
    target, arguments = targets.check(
        "data",
        config.data,
        DataSplits,
        config.allow_targets,
        defaults=_of_model(config),
        ignore=LOADER_KEYS,
    )
    load = getattr(target, "evaluated_alone" if evaluates else "for_trained_models", None)
    if load is None:
        if evaluates or predicts or has_tokenizer:
            return load_data(config, world)
        return DataSplits(train=(), eval=None, metadata=metadata)
    if predicts:
        _check_standard_input(config, world)
    elif "predict_path" in arguments:
        arguments["predict_path"] = None
    with naming({name: f"data.{name}" for name in arguments}):
        data: DataSplits | None = load(metadata, **arguments)
    return load_data(config, world) if data is None else data


def _of_model(config: Config) -> dict[str, Any]:
    """Returns arguments of data functions that describe the model; see `targets.build`."""
    return {"model_source": config.model.get("source")}


def _check_standard_input(config: Config, world: World) -> None:
    if config.data.get("predict_path") == STANDARD_INPUT and world.size > 1:
        raise ConfigError(
            f"data.predict_path=- (standard input) needs a single process, but there are "
            f"{world.size}: start one, or set data.predict_path= to a file that all can read"
        )


def _place_of_data(config: Config) -> str:
    """Returns the config keys with the location of the data; empty if there are none."""
    places = {key: value for key, value in config.data.items() if key in _PLACES}
    return ", ".join(f"data.{key}={value}" for key, value in places.items() if value is not None)


def _facts_of(config: Config, data: DataSplits | None) -> RankFacts:
    """Returns facts about this process's data, and its package versions."""
    loaded: dict[str, Any] = {}
    if isinstance(data, DataSplits):
        loaded = record_of(data) | {
            "predict": length_of(data.predict),
            "classes": _classes(data.metadata.get("classes")),
            "vocabulary": data.vocabulary,
            "digest": None if data.digest is None else f"digest {data.digest}",
        }
    return facts_here({key: loaded.get(key) for key in _SAME} | _versions(config))


def _check_facts(facts_by_rank: Sequence[RankFacts], config: Config) -> None:
    """Rejects different data on the processes; warns about different versions.

    Raises:
        DataError: names both values with their ranks and hosts.
    """
    versions = []
    for fact, values in differences(facts_by_rank):
        if fact in _SAME:
            where = f" for {place}" if (place := _place_of_data(config)) else ""
            raise DataError(
                f"{_SAME[fact]} differ{'s' * (fact not in ('classes', 'digest'))} across ranks: "
                f"{values}. Copy the same files to all of these hosts, or use a folder that they "
                f"share{where}"
            )
        versions.append(f"{fact} {values}")
    if versions:
        _log.warning(
            "the ranks run different versions: %s. This may change results; install the same "
            "versions on all hosts",
            "; ".join(versions),
        )


def _classes(names: Any) -> str | None:
    """Returns a short description of class names that almost surely differs for other names."""
    if names is None:
        return None
    names = [str(name) for name in names]
    if len(names) <= _MOST_CLASSES:
        return str(names)
    shown = ", ".join(names[:_MOST_CLASSES])
    return f"{len(names)} classes ({shown}, ...) with digest {digest_of_texts(names)}"


def _versions(config: Config) -> dict[str, str | None]:
    """Returns the versions of packages that are imported, or named by the model's target."""
    model = str(config.model.get("_target_"))
    versions: dict[str, str | None] = {
        "Python": platform.python_version(),
        "hybridtrain": __version__,
    }
    for name in _PACKAGES:
        module = sys.modules.get(name)
        if module is None and name not in model:
            continue
        versions[name] = getattr(module, "__version__", None)
        if versions[name] is None:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = None
    return versions


def record_of(data: DataSplits) -> dict[str, Any]:
    """Returns the record of a data set, in JSON types."""
    return {
        "classes": data.metadata.get("classes"),
        "train": length_of(data.train),
        "eval": length_of(data.eval),
        "digest": data.digest,
        "metadata": _in_json(data.metadata),
        "vocabulary": data.vocabulary,
    }


def _in_json(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns metadata in JSON types; None if a value has no JSON type."""
    try:
        saved: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError):
        return None
    return saved


def metadata_of(checkpoint: Path) -> tuple[dict[str, Any] | None, bool]:
    """Returns the metadata of a checkpoint's training data, and whether it has a tokenizer.

    The metadata is None if the checkpoint does not contain it.
    """
    saved = _saved(checkpoint)
    metadata = saved.get("metadata")
    return (
        dict(metadata) if isinstance(metadata, Mapping) else None,
        saved.get("vocabulary") is not None,
    )


def classes_of(checkpoint: Path) -> list[str] | None:
    """Returns the class names that a checkpoint was trained on; None: it has only numbers."""
    names = _saved(checkpoint).get("classes")
    return None if names is None else [*map(str, names)]


def check_same_classes(checkpoint: Path, data: DataSplits) -> None:
    """Checks that class numbers mean the same names in a checkpoint and in the data.

    Raises:
        DataError: they do not; the message has both lists.
    """
    before, now = _saved(checkpoint).get("classes"), data.metadata.get("classes")
    if before is not None and now is not None and list(before) != list(now):
        raise DataError(
            f"{checkpoint} was trained on the classes {', '.join(before)}, but the data has the "
            f"classes {', '.join(now)}: use data with the same classes"
        )


def say_other_data(checkpoint: Path, data: DataSplits) -> None:
    """Logs differences between the data and the checkpoint's training data."""
    if difference := _difference(_saved(checkpoint), record_of(data)):
        _log.info("the data has changed since %s was saved: %s", checkpoint.name, difference)


def refuse_other_data(checkpoint: Path, data: DataSplits, allow_changes: bool) -> None:
    """Checks that a run resumes with the samples that it began with.

    Raises:
        DataError: samples or files differ, and `allow_changes` is False; has both numbers.
    """
    check_same_classes(checkpoint, data)
    difference = _difference(_saved(checkpoint), record_of(data))
    if difference and not allow_changes:
        raise DataError(
            f"the data has changed since {checkpoint} was saved: {difference}. This changes the "
            f"order of the samples and the held-out split: restore the data, start a new run with "
            f"init_from={checkpoint} and another run_name=, or set allow_changes=true"
        )
    if difference:
        _log.warning("the data has changed since %s was saved: %s", checkpoint.name, difference)


def _saved(checkpoint: Path) -> Mapping[str, Any]:
    """Returns the record in a checkpoint; empty if the command `train` did not save it."""
    state = read_tree(checkpoint, "state", read_manifest(checkpoint)["files"])
    return state.get("dataset") or {}


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the difference between two records; empty if there is none."""
    numbers = [
        f"{before.get(key):,} {purpose} samples then, {now[key]:,} now"
        for key, purpose in (("train", "training"), ("eval", "evaluation"))
        if None not in (before.get(key), now[key]) and before[key] != now[key]
    ]
    if numbers:
        return "; ".join(numbers)
    if None not in (before.get("digest"), now["digest"]) and before["digest"] != now["digest"]:
        return (
            f"its files have different names, sizes or contents, with the same number of samples "
            f"({now['train']:,})"
        )
    return ""
