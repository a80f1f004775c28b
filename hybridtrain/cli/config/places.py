"""What a config may write, send or run, and who may say so: the table `PLACES`.

A recipe, the config of a run and an option may come from a stranger. They say what is trained. The
command line says where files are written, to whom something is sent and which commands run; files
may name places in the run directory. `check_places` compares a config with the table, SECURITY.md
shows it, and a test fails for an argument that names a file, a folder, an address or a command and
is not in it. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtrain.cli.config.names import check_name
from hybridtrain.cli.config.overrides import hydra_quoted, parse_overrides, shell_quoted
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.config.tree import to_tree
from hybridtrain.errors import ConfigError

READ = "anything"
RUN_DIRECTORY = "a place in the run directory"
WORKING_DIRECTORY = "a folder in the working directory, not hidden"
OPTION = "an option of a group; no recipe and no run"
NAME = "a plain name"
NOTHING = "nothing"


@dataclass(frozen=True)
class Place:
    """Arguments of a config that name a file, a folder, an address or a command.

    Attributes:
        keys: their keys; `*` is any name.
        does: read, write, send, run or trust.
        what: the file, service or command, for the documentation and for messages.
        file: what a recipe, an option or the config of a run may set: `READ`, `RUN_DIRECTORY`,
            `WORKING_DIRECTORY`, `OPTION`, `NAME` (see `check_name`) or `NOTHING`. The command line
            may set anything.
        commands: the commands that use them; none: all.
        searched: whether `search.space` may have them. A trial gets its values as overrides.
    """

    keys: tuple[str, ...]
    does: str
    what: str
    file: str = READ
    commands: tuple[str, ...] = ()
    searched: bool = False


# The commands that construct the trackers and call the callbacks of a run.
_TRAIN = ("train",)

PLACES = (
    Place(
        ("monitor.*.path",),
        "write",
        "a metrics file: replaced at step 0 if it is one, else refused",
        RUN_DIRECTORY,
        _TRAIN,
    ),
    Place(
        ("monitor.*.directory", "callbacks.*.directory"),
        "write",
        "event files, profiler traces, weights, the files of W&B and MLflow",
        RUN_DIRECTORY,
        _TRAIN,
    ),
    Place(
        ("monitor.*.tracking_uri",),
        "send",
        "config, curves and pictures, with the credentials of `MLFLOW_TRACKING_...`",
        NOTHING,
        _TRAIN,
    ),
    Place(
        tuple(f"monitor.*.{name}" for name in ("entity", "host", "base_url", "endpoint")),
        "send",
        "config, curves and pictures, with the login of W&B",
        NOTHING,
        _TRAIN,
    ),
    Place(("push_to",), "send", "the exported model, with the login of the Hub", NOTHING),
    Place(("output",), "write", "the predictions", NOTHING),
    Place(("output_dir",), "write", "the folder of the run directories", WORKING_DIRECTORY),
    Place(("run_name",), "write", "the run directory, a folder in `output_dir`", NAME),
    Place(
        ("data.root",),
        "read",
        "the data; `imdb` and `cifar10` unpack their archive there, `imdb` caches token ids",
    ),
    Place(
        ("data.root with data.download=true",),
        "write",
        "the downloaded data, from an address that is fixed in the code",
        WORKING_DIRECTORY,
    ),
    Place(
        ("search.storage",), "write", "the database of the study, with its login", NOTHING,
        ("search",),
    ),
    Place(("search.launcher",), "run", "the command that starts a trial", NOTHING, ("search",)),
    Place(
        tuple(
            f"submit.{name}"
            for name in ("setup", "modules", "container", "srun_args", "sbatch_args")
        ),
        "run",
        "lines and arguments of the job's script",
        OPTION,
        ("submit",),
    ),
    Place(("allow_targets",), "trust", "packages whose code may run", NOTHING),
    Place(("recipe", "hardware"), "read", "YAML files"),
    Place(("resume", "init_from"), "read", "checkpoints and weights, or a model of the Hub"),
    Place(
        ("pipeline.split", "pipeline.schedule"),
        "read",
        "a plan, or a schedule as CSV",
        searched=True,
    ),
    Place(
        ("data.path", "data.eval_path", "data.predict_path", "data.chat_template"),
        "read",
        "the data, or a data set of the Hub",
        searched=True,
    ),
    Place(
        ("data.tokenizer",),
        "read",
        "a tokenizer: a file, a folder, or a name on the Hub",
        searched=True,
    ),
    Place(
        ("model.source", "data.model_source"),
        "read",
        "the config of a model: a folder, or a name on the Hub",
        searched=True,
    ),
)  # fmt: skip
"""The table. A key that is not in it names no file, folder, address or command."""

_DOWNLOAD = "data.root with data.download=true"

Key = tuple[str, ...]


@dataclass(frozen=True)
class ConfigFile:
    """A file with values of a config.

    Attributes:
        name: for messages.
        tree: its values, with interpolations as text.
    """

    name: str
    tree: Mapping[str, Any]


def check_places(
    command: str,
    config: Config,
    overrides: Sequence[str],
    files: Sequence[ConfigFile] = (),
    *,
    of_run: bool = True,
) -> None:
    """Rejects what a file of a config may not say in a group, such as `monitor.csv.path`.

    Args:
        command: such as train.
        config: the config of the command, with its `output_dir` and `run_name`.
        overrides: the overrides of the command line.
        files: the recipe and the config of the run.
        of_run: whether `config` names the run directory; False: leave out places in it.

    Raises:
        ConfigError: names the key, the file that sets it, and what to add to the command line.
    """
    places = [
        place
        for place in PLACES
        if (not place.commands or command in place.commands)
        and "." in place.keys[0]
        and (place.file != RUN_DIRECTORY or of_run)
        and (place.keys != (_DOWNLOAD,) or config.data.get("download"))
    ]
    _check(places, config, overrides, files)


def check_run_keys(
    config: Config, overrides: Sequence[str], files: Sequence[ConfigFile] = ()
) -> None:
    """Does what `check_places` does for keys without a group, such as `output_dir`."""
    _check([place for place in PLACES if "." not in place.keys[0]], config, overrides, files)


def _check(
    places: Sequence[Place], config: Config, overrides: Sequence[str], files: Sequence[ConfigFile]
) -> None:
    typed, run = Typed(overrides), Path(config.output_dir) / str(config.run_name)
    whole = to_tree(config)
    for place in places:
        # an option that the command line selects may set what a recipe may not
        trees = [file.tree for file in files] if place.file == OPTION else [whole]
        for key, value in (pair for tree in trees for pair in _named(tree, place)):
            if (
                place.file == READ
                or value in (None, "", [])
                or typed.covers(key, value)
                or (place.file == WORKING_DIRECTORY and _is_in_working_directory(key, str(value)))
                or (place.file == RUN_DIRECTORY and is_within(Path(str(value)), run))
            ):
                continue
            if place.file == NAME:
                check_name(".".join(key), value, "run")
                continue
            raise _refusal(place, key, value, files, run)


def is_within(path: Path, folder: Path) -> bool:
    """Returns whether `path` is `folder` or in it, wherever links lead."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, a null character
        return False


def grants(override: str) -> bool:
    """Returns whether an override says what only the command line may say."""
    if override.lstrip("+~").startswith(("hydra.", "hydra/", "submit.")):
        return True
    try:
        (parsed,) = parse_overrides([override])
    except ConfigError:
        return True  # nobody knows what it says
    limited = [place for place in PLACES if place.file not in (READ, NAME, WORKING_DIRECTORY)]
    value = None if parsed.is_delete() else parsed.value()
    return _is_in(limited, parsed.key_or_group, value)


def is_searched(key: str, value: Any) -> bool:
    """Returns whether `search.space` may have `value` at a dotted key."""
    return not _is_in([place for place in PLACES if not place.searched], key, value)


def _is_in(places: Sequence[Place], key: str, value: Any) -> bool:
    """Returns whether a dotted key, or a key in its value, is of one of the places."""
    patterns = [pattern.split(".") for place in places for pattern in place.keys]
    keys = [[*key.split("."), *inner] for inner, _ in _leaves(value, ())]
    return any(_fits(names, pattern) for names in keys for pattern in patterns)


class Typed:
    """The keys that the command line sets.

    A value with an interpolation of another key does not count, because a file may set that key.

    Attributes:
        keys: dotted; for a mapping, the keys of its values.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        self.keys: set[str] = set()
        for override in parse_overrides(overrides):
            if override.is_delete():
                continue
            key, value = override.key_or_group, override.value()
            for inner, leaf in _leaves(value, (key,)):
                if "${" not in _OF_ENVIRONMENT.sub("", str(leaf)):
                    self.keys.add(".".join(inner))

    def covers(self, key: Key, value: Any) -> bool:
        """Returns whether the command line sets all of the value at `key`."""
        for inner, _ in _leaves(value, key):
            above = {".".join(inner[:length]) for length in range(1, len(inner) + 1)}
            if any("." in name for name in inner) or not above & self.keys:
                return False
        return True


_OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")


def _leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Yields the values of nested mappings."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*key, str(name)))
    else:
        yield key, value


def _named(tree: Mapping[str, Any], place: Place) -> Iterator[tuple[Key, Any]]:
    """Yields the keys and values in `tree` that a place names."""
    seen = set()
    for pattern in place.keys:
        names = pattern.partition(" ")[0].split(".")
        nodes: list[tuple[Key, Any]] = [((), tree)]
        for name in names:
            nodes = [
                ((*key, str(inner)), value)
                for key, node in nodes
                if isinstance(node, Mapping)
                for inner, value in node.items()
                if name in ("*", inner)
            ]
        for key, value in nodes:
            if key not in seen:
                seen.add(key)
                yield key, value


def _fits(key: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether a key is the pattern's, or one in it."""
    pairs = zip(key, pattern, strict=False)
    return len(key) >= len(pattern) and all(name in ("*", part) for part, name in pairs)


def _is_in_working_directory(key: Key, value: str) -> bool:
    if key == ("output_dir",) and value == Config.output_dir:
        return True  # it may be a link to another disk
    path = Path(value)
    hidden = any(part.startswith(".") for part in path.parts if part not in (".", ".."))
    return not path.is_absolute() and not hidden and is_within(path, Path())


def _refusal(
    place: Place, key: Key, value: Any, files: Sequence[ConfigFile], run: Path
) -> ConfigError:
    """Returns the error for a value that a file may not set."""
    dotted = ".".join(key)
    setters = [file.name for file in files if _has(file.tree, key)]
    where = setters[0] if setters else "a file of the config"
    verbs = {
        "write": "write",
        "send": "send something",
        "run": "choose a command to run",
        "trust": "trust code",
    }
    only = {
        RUN_DIRECTORY: f"a file may name only a place in the run directory {run}",
        WORKING_DIRECTORY: "a file may name only a folder in the working directory that is not "
        "hidden",
    }.get(place.file, f"only the command line may {verbs[place.does]}")
    added = shell_quoted(f"{dotted}={_as_override(value)}")
    return ConfigError(
        f"{dotted}={value} is set in {where}, but {only}: if you want it, add {added} to the "
        f"command line"
    )


def _as_override(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}: {_as_override(x)}" for name, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_as_override, value)) + "]"
    return hydra_quoted(str(value)) if isinstance(value, str | Path) else str(value)


def _has(tree: Any, key: Key) -> bool:
    for name in key:
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return tree is not None


def table() -> str:
    """Returns the table in Markdown, for SECURITY.md."""
    lines = [["does", "keys", "what", "a file may set", "`search.space`"], ["---"] * 5]
    for place in PLACES:
        keys = ", ".join(f"`{key}`" for key in place.keys)
        searched = "yes" if place.searched else "no"
        lines.append([place.does, keys, place.what, place.file, searched])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
