"""The facts that must be the same on all ranks of a run: the data set, and package versions.

Hosts may have their own copies of a data set, and their own environments. The facts travel with
the outcome of loading the data, in one exchange before anything is built of them.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hybridtrain import __version__
from hybridtrain._base.rank_differences import RankFacts, differences, facts_here
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.data_record import record_of
from hybridtrain.data import DataSplits, digest_of_files, length_of
from hybridtrain.errors import DataError

_log = logging.getLogger(__name__)

# Keys of a data set that say where it is, in the order in which they are shown.
_PLACES = ("root", "path", "file", "files", "folder", "data_dir", "eval_path")

# Packages whose versions decide results, beside Python and hybridtrain.
_PACKAGES = ("torch", "torchvision", "transformers", "datasets", "timm", "numpy")

# Names of that many classes are in a message.
_MOST_CLASSES = 8

_SAME = {
    "train": "the number of samples to train on",
    "eval": "the number of samples to evaluate on",
    "predict": "the number of samples to predict",
    "classes": "the classes of the data",
    "vocabulary": "the vocabulary of the tokenizer",
    "digest": "the names or sizes of the data files",
}


def place_of_data(config: Config) -> str:
    """Returns the keys of the config that say where the data is; empty if there are none."""
    places = {key: value for key, value in config.data.items() if key in _PLACES}
    return ", ".join(f"data.{key}={value}" for key, value in places.items() if value is not None)


def facts_of(config: Config, data: DataSplits | None) -> RankFacts:
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


def check_facts(everyones: Sequence[RankFacts], config: Config) -> None:
    """Refuses processes that have loaded different data; warns of different versions.

    Raises:
        DataError: names both values with their ranks and hosts.
    """
    versions = []
    for fact, values in differences(everyones):
        if fact in _SAME:
            where = f" for {place}" if (place := place_of_data(config)) else ""
            raise DataError(
                f"{_SAME[fact]} differ{'s' * (fact not in ('classes', 'digest'))} between the "
                f"ranks: {values}. Copy the same files to all of these hosts, or use a folder that "
                f"they share{where}"
            )
        versions.append(f"{fact} {values}")
    if versions:
        _log.warning(
            "the ranks run different versions: %s. Results may differ from those of one version: "
            "install the same on all hosts",
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
    return f"{len(names)} classes ({shown}, ...) with digest {digest_of_files(names)}"


def _versions(config: Config) -> dict[str, str | None]:
    """Returns the versions of packages that are imported, or that the model's name mentions."""
    model = str(config.model.get("_target_"))
    found: dict[str, str | None] = {
        "Python": platform.python_version(),
        "hybridtrain": __version__,
    }
    for name in _PACKAGES:
        module = sys.modules.get(name)
        if module is None and name not in model:
            continue
        found[name] = getattr(module, "__version__", None)
        if found[name] is None:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
    return found
