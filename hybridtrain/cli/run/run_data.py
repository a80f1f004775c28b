"""The data of a run: loaded, equal on all ranks, and the same again when the run is resumed.

load      `load_data`: on rank 0 first, then on the others
compare   between the ranks: hosts may have their own copies of a data set, and their own package
          versions; the facts travel in one exchange before anything is built of the data
record    `record_of`, saved in `state.json` of each checkpoint under `dataset`, with which later
          commands compare: class numbers mean nothing without the names, and a position in an
          epoch means nothing when samples were added
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

# Keys of a data set that say where it is, in the order in which they are shown.
_PLACES = ("root", "path", "file", "files", "folder", "data_dir", "eval_path")

# Packages whose versions decide results, beside Python and hybridtrain.
_PACKAGES = ("torch", "torchvision", "transformers", "datasets", "peft", "timm", "numpy")

# Names of that many classes are in a message.
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
    """Refuses a tokenizer that is the path of a function which may not be called."""
    tokenizer = str(config.data.get("tokenizer", ""))
    # not one of torchtext's names, and with a slash the place of a tokenizer, which is data
    if "/" not in tokenizer and ("." in tokenizer or ":" in tokenizer):
        targets.resolve("data.tokenizer", tokenizer.replace(":", "."), config.allow_targets)


def load_data(config: Config, world: World) -> DataSplits:
    """Loads the data set, first on rank 0, then on the others.

    With `data.download`, rank 0 fetches it first, then the first process of each other node if it
    is not there, since nodes may have their own disks.

    All processes compare what they have loaded, and warn of other versions of packages.

    Raises:
        DataError: a process cannot load it, or has loaded other data; names ranks and hosts.
    """

    def load(download: bool) -> DataSplits:
        settings = dict(config.data)
        if "download" in settings:
            settings["download"] = download
        check_tokenizer(config)
        try:
            return targets.build(
                "data", settings, DataSplits, config.allow_targets, ignore=LOADER_KEYS
            )
        except FileNotFoundError as error:
            where = _place_of_data(config)
            raise DataError(
                f"the data set {config.data['_target_']} is not there: {error}"
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

    # with a download, the first process of each node loads before the others of it
    for loads in (first_of_node, not first_of_node) if download else (True,):
        if world.is_main or not loads:
            world.on_all(lambda: None)
        else:
            data = world.on_all(load_here)
    if world.size > 1:
        _check_facts(world.gather(_facts_of(config, data)), config)
    assert data is not None
    return data


def load_for_trained(
    settings: Settings, world: World, checkpoint: Path, *, samples: bool
) -> DataSplits:
    """Returns what a trained model needs of its data, without the training data if possible.

    That needs a checkpoint that has the metadata of its data, and a data function
    `for_trained_models`. Otherwise, this is `load_data`.

    Args:
        settings: of the command.
        world: the processes.
        checkpoint: the one that is read.
        samples: the command reads the samples in `data.predict_path`.
    """
    config, of_run = settings.config, settings.of_run
    same = of_run is not None and all(
        of_run.data.get(key) == config.data.get(key) for key in ("_target_", "task")
    )
    metadata, has_tokenizer = world.from_main(
        lambda: metadata_of(checkpoint) if same else (None, False)
    )
    if metadata is None or (samples and config.data.get("predict_path") is None):
        return load_data(config, world)
    check_tokenizer(config)
    target, arguments = targets.check(
        "data", config.data, DataSplits, config.allow_targets, ignore=LOADER_KEYS
    )
    load = getattr(target, "for_trained_models", None)
    if load is None:
        if samples or has_tokenizer:
            return load_data(config, world)
        return DataSplits(train=(), eval=None, metadata=metadata)
    _check_standard_input(config, world)
    with naming({name: f"data.{name}" for name in arguments}):
        data: DataSplits = load(metadata, **arguments)
    return data


def _check_standard_input(config: Config, world: World) -> None:
    if config.data.get("predict_path") == STANDARD_INPUT and world.size > 1:
        raise ConfigError(
            f"data.predict_path=- is read by one process, and there are {world.size}: start one, "
            f"or set data.predict_path= to a file that all of them read"
        )


def _place_of_data(config: Config) -> str:
    """Returns the config keys with the location of the data; empty if there are none."""
    places = {key: value for key, value in config.data.items() if key in _PLACES}
    return ", ".join(f"data.{key}={value}" for key, value in places.items() if value is not None)


def _facts_of(config: Config, data: DataSplits | None) -> RankFacts:
    """Returns what this process has loaded, and the versions that it runs."""
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
    """Refuses processes that have loaded different data; warns of different versions.

    Raises:
        DataError: names both values with their ranks and hosts.
    """
    versions = []
    for fact, values in differences(facts_by_rank):
        if fact in _SAME:
            where = f" for {place}" if (place := _place_of_data(config)) else ""
            raise DataError(
                f"{_SAME[fact]} differ{'s' * (fact not in ('classes', 'digest'))} between the "
                f"ranks: {values}. Copy the same files to all of these hosts, or use a folder that "
                f"they share{where}"
            )
        versions.append(f"{fact} {values}")
    if versions:
        _log.warning(
            "the ranks run different versions: %s. This may change results: install the same "
            "versions on all hosts",
            "; ".join(versions),
        )


def _classes(names: Any) -> str | None:
    """Returns a short text that differs, most probably, for different names of classes."""
    if names is None:
        return None
    names = [str(name) for name in names]
    if len(names) <= _MOST_CLASSES:
        return str(names)
    shown = ", ".join(names[:_MOST_CLASSES])
    return f"{len(names)} classes ({shown}, ...) with digest {digest_of_texts(names)}"


def _versions(config: Config) -> dict[str, str | None]:
    """Returns the versions of packages that are imported, or that the model's name mentions."""
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
    """Returns metadata in JSON's types; None if JSON has no type for a value."""
    try:
        saved: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError):
        return None
    return saved


def metadata_of(checkpoint: Path) -> tuple[dict[str, Any] | None, bool]:
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
            f"{checkpoint} was trained on the classes {', '.join(before)}, and the data has the "
            f"classes {', '.join(now)}: use data with the same classes"
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
        return (
            f"its files have other names, sizes or contents, with {now['train']:,} samples as "
            f"before"
        )
    return ""
