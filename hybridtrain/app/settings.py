"""The settings of one command: those of the run, with the command line's on top.

A run directory has the config that its run began with. A command on that run takes its config as
the base, not the recipe's or the defaults: whoever trained with `data.max_len=64` and evaluates
with the recipe alone would otherwise get the numbers of another data set. Every difference is
listed; one that makes another model or other data ends the command.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import compress
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridtrain.app.changes import OF_THE_COMMAND, Change, differences, in_words, table
from hybridtrain.app.compose import (
    compose_settings,
    given_keys,
    given_recipe,
    parse_overrides,
)
from hybridtrain.app.config import OPEN_GROUPS, Config, with_auto_replaced
from hybridtrain.app.hidden import from_environment, to_config, to_tree
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.errors import ConfigError

# What the config of a run has, of whatever version; the groups after these have good defaults.
_GROUPS = (*OPEN_GROUPS, "pipeline", "world", "trainer", "checkpoint")

_NAMING = ("recipe", "run_name", "output_dir", "resume", "allow_targets")


@dataclass
class Settings:
    """The values and overrides of one command.

    Attributes:
        config: the values to use.
        overrides: the command line's.
        texts: by path, interpolations of environment variables, which are written in the place of
            their values.
        leftovers: see `Composition`.
        of_run: the config of the run, where that was the base.
        changes: what the command line changes in the config of the run.
        kept: what the recipe on the command line says otherwise than the run.
        notes: lines for the log.
    """

    config: Config
    overrides: list[str]
    texts: dict[tuple[str | int, ...], str] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    of_run: Config | None = None
    changes: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def settle(
    command: str,
    overrides: Sequence[str],
    config_dir: str | None = None,
    run_name: str | None = None,
) -> Settings:
    """Returns the settings of `command` with `overrides`.

    Args:
        command: such as train, evaluate or export.
        overrides: the command line's.
        config_dir: a folder with more groups and options.
        run_name: in a sweep, the name of this run.

    Raises:
        ConfigError: an override is wrong, or would make another run of the one that is there.
    """
    keys = given_keys(overrides)
    # Only what names the run; the other overrides may be about keys that the run's config has.
    naming = [key in _NAMING or key.startswith("hydra.") for key in keys]
    named = compose_settings(list(compress(overrides, naming)), config_dir)
    if run_name is not None:
        named.config.run_name = run_name
    elif command in ("evaluate", "predict", "export") and not {"recipe", "run_name"} & set(keys):
        _name_run_of_checkpoint(named.config)
    run = Path(named.config.output_dir) / str(named.config.run_name)
    try:
        begun = bool(CheckpointStore(run / "checkpoints").steps())
    except OSError as error:  # a name that is too long, say
        raise ConfigError(
            f"cannot read the run directory {run}: {error.strerror}; set run_name= or output_dir="
        ) from error
    saved = _read(run / "config.yaml")
    if saved is None or (command == "train" and not begun and "recipe" in keys):
        given = compose_settings(overrides, config_dir)
        given.config.run_name = str(named.config.run_name)
        given.config.output_dir = named.config.output_dir
        texts = from_environment(given.tree)
        return Settings(given.config, list(overrides), texts, given.leftovers)
    if "recipe" in keys:
        _check_recipe(named.recipe, _recipe_of_run(saved, run), run)
    if command != "export":  # which runs no code of the run's
        _refuse_untrusted_code(saved, run, keys)
    settings = _on_top_of(saved, run, overrides, config_dir)
    settings.config.run_name = named.config.run_name
    settings.config.output_dir = named.config.output_dir
    if command == "train" and not begun and settings.of_run is not None:
        for key in {"resume", "init_from"} - set(keys):  # it has not got further than its start
            setattr(settings.config, key, getattr(settings.of_run, key))
    if command == "train" and begun and "init_from" in {key.partition(".")[0] for key in keys}:
        _refuse_other_weights(run, settings)
    if begun and not settings.config.allow_changes:
        _refuse_another_identity(run, settings.changes)
    if "recipe" in keys and not _is_file(str(named.recipe), run / "config.yaml"):
        kept = differences(settings.config, named.config)
        settings.kept = [c for c in kept if not {c.key, c.key.partition(".")[0]} & set(keys)]
    settings.notes += _listed(settings, run)
    return settings


def _refuse_other_weights(run: Path, settings: Settings) -> None:
    """Refuses an `init_from` that a run with checkpoints would ignore."""
    from hybridtrain.checkpoint.init_from import parse_init_from  # imports torch

    given = settings.config.init_from
    began = settings.of_run.init_from if settings.of_run is not None else None
    if parse_init_from(given) != parse_init_from(began):
        start = "without init_from=" if began is None else f"from init_from={began}"
        raise ConfigError(
            f"init_from={given}: the run {run} has begun {start}, and goes on from its own "
            f"checkpoints; to begin with other weights, set another run_name="
        )


def _refuse_untrusted_code(saved: Mapping[str, Any], run: Path, keys: Sequence[str]) -> None:
    """Refuses a run with code of packages that the command line does not allow."""
    allowed = _config_of_run(saved, run).allow_targets
    if allowed and "allow_targets" not in keys:
        packages = ",".join(allowed)
        raise ConfigError(
            f"{run} is a run with code of {packages}: if you trust it, say so with "
            f"allow_targets=[{packages}] on the command line"
        )


def _on_top_of(
    saved: dict[str, Any], run: Path, overrides: Sequence[str], config_dir: str | None
) -> Settings:
    """Returns the config of the run with `overrides` on top of it."""
    of_run = _config_of_run(saved, run)
    recipe = _recipe_of_run(saved, run)
    keys = given_keys(overrides)
    base = {
        name: saved.get(name, value)  # with its interpolations
        if name in OPEN_GROUPS
        else value
        for name, value in to_tree(of_run).items()
        if name not in OF_THE_COMMAND
    }
    others = [o for o, key in zip(overrides, keys, strict=True) if key != "recipe"]
    given = compose_settings(others, config_dir, base=base)
    tree, leftovers = dict(given.tree), dict(given.leftovers)
    # An option that is chosen has the recipe's keys on top, as when the run began.
    for group, values in given.tree.items():
        if group in keys and isinstance(values, Mapping):
            of_group = [o for o, k in zip(overrides, keys, strict=True) if k.split(".")[0] == group]
            if recipe is not None:
                of_group.insert(0, f"recipe={recipe}")
            chosen = compose_settings([*of_group, *_allowed(overrides)], config_dir)
            tree[group] = chosen.tree[group]
            leftovers |= {name: found for name, found in chosen.leftovers.items() if name == group}
    _put_overrides(base, tree, others)
    base |= {name: tree[name] for name in OF_THE_COMMAND if name in tree}
    base["recipe"] = recipe
    try:
        config = to_config(base)
    except OmegaConfBaseException as error:
        raise _wrong_value(run, error) from error
    # what was chosen when the run began, so that its steps stay the same
    config.pipeline = with_auto_replaced(config.pipeline, of_run.pipeline)
    leftovers = {
        group: [key for key in getattr(config, group) if key in names]
        for group, names in leftovers.items()
    }
    return Settings(
        config,
        list(overrides),
        from_environment(base),
        leftovers,
        of_run,
        list(differences(of_run, config)),
    )


def _refuse_another_identity(run: Path, changes: Iterable[Change]) -> None:
    others = [change for change in changes if change.is_identity]
    if others:
        raise ConfigError(
            f"{run} is a run with {in_words(others)}: leave that out to use the run unchanged, set "
            f"another run_name= to begin another run, or allow it with allow_changes=true"
        )


def _listed(settings: Settings, run: Path) -> list[str]:
    """Returns a block of lines for each kind of difference."""
    notes = []
    if settings.changes:
        head = f"settings are those of {run}/config.yaml, except for"
        notes.append(table(head, settings.changes, "{} -> {}"))
    if settings.kept:
        recipe = settings.config.recipe
        head = f"kept as in {run}/config.yaml, although the recipe {recipe} differs"
        notes.append(table(head, settings.kept, "{}  (recipe: {})"))
    return notes


def _allowed(overrides: Sequence[str]) -> list[str]:
    return [o for o in overrides if o.lstrip("+").startswith(("allow_targets", "hydra."))]


def _put_overrides(
    base: dict[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Sets in `base` what `overrides` set in the tree `given`."""
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if key.startswith("hydra") or key == "recipe":
            continue
        *above, leaf = key.split(".")
        here: Any = base
        there: Any = given
        for name in above:
            here = here.setdefault(name, {}) if isinstance(here, dict) else {}
            there = there.get(name) if isinstance(there, Mapping) else None
        if not override.is_delete() and isinstance(there, Mapping) and leaf in there:
            here[leaf] = copy.deepcopy(there[leaf])
        elif isinstance(here, dict):
            here.pop(leaf, None)


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the config in the file, with interpolations as text; None: there is no file."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: restore it, or set another run_name=")
    return {str(key): value for key, value in tree.items()}


def _config_of_run(saved: Mapping[str, Any], run: Path) -> Config:
    """Returns the config of a run, also of one that another version has begun."""
    missing = [name for name in _GROUPS if not isinstance(saved.get(name), dict)]
    missing += [f"{name}._target_" for name in OPEN_GROUPS if "_target_" not in saved.get(name, {})]
    if missing:
        raise ConfigError(
            f"{run}/config.yaml has no {missing[0]}: it was emptied or cut short; restore it, or "
            f"set another run_name="
        )
    known = dict(saved)
    for name, schema in get_type_hints(Config).items():
        if is_dataclass(schema) and isinstance(known.get(name), dict):
            names = {setting.name for setting in fields(schema)}
            known[name] = {key: value for key, value in known[name].items() if key in names}
    known = {key: value for key, value in known.items() if key in get_type_hints(Config)}
    try:
        return to_config(known)
    except OmegaConfBaseException as error:
        raise _wrong_value(run, error) from error


def _wrong_value(run: Path, error: OmegaConfBaseException) -> ConfigError:
    return ConfigError(f"{run}/config.yaml: {str(error).strip().splitlines()[0]}")


def _recipe_of_run(saved: Mapping[str, Any], run: Path) -> str | None:
    if "recipe" in saved:
        recipe = saved["recipe"]
        return None if recipe is None else str(recipe)
    overrides = run / "overrides.yaml"  # a run of version 0.1
    if not overrides.exists():
        return None
    listed = OmegaConf.to_container(OmegaConf.load(overrides))
    words = [str(word) for word in listed] if isinstance(listed, list) else []
    return given_recipe(words)


def _check_recipe(given: str | None, of_run: str | None, run: Path) -> None:
    """Refuses the recipe of another run; the run's own config.yaml is a recipe too."""
    if given == of_run or (given is not None and _is_file(given, run / "config.yaml")):
        return
    if given is not None and of_run is not None and _is_file(given, Path(of_run)):
        return
    of = f"of recipe={of_run}" if of_run else "without a recipe"
    raise ConfigError(
        f"{run} is a run {of}, not of recipe={given}: set another run_name=, or leave recipe= out "
        f"to use the run unchanged"
    )


def _is_file(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()


def _name_run_of_checkpoint(config: Config) -> None:
    """Makes the run of the checkpoint that `resume` names the run of this command."""
    if config.resume in (None, "auto", "last", "best"):
        return
    folder = Path(str(config.resume))
    for run in (folder, folder.parent, folder.parent.parent):
        if (run / "config.yaml").is_file() and (run / "checkpoints").is_dir():
            config.run_name, config.output_dir = run.name, str(run.parent)
            return
