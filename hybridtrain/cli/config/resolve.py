"""The settings of one command: those of the run, with the command line's on top.

A run directory has the config that its run began with. A command on that run takes its config as
the base, not the recipe's or the defaults: whoever trained with `data.max_len=64` and evaluates
with the recipe alone would otherwise get the numbers of another data set. Every difference is
listed; one that makes another model or other data ends the command.

    overrides
        -> `resolve_settings` -> Settings -> `leave_out_leftovers`
        -> `agreed` -> rank 0's Config
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from hybridtrain.cli.command_table import check_changes
from hybridtrain.cli.config.changes import (
    EVALUATED,
    OF_THE_COMMAND,
    Change,
    as_yaml,
    changes_table,
    differences,
    in_words,
)
from hybridtrain.cli.config.compose import Composition, compose_settings
from hybridtrain.cli.config.moved_base import follow_moved_base
from hybridtrain.cli.config.overrides import given_keys, parse_overrides
from hybridtrain.cli.config.run_name import (
    check_run_name,
    literal_names,
    name_run,
    naming_overrides,
)
from hybridtrain.cli.config.saved_run import (
    check_recipe,
    config_of_run,
    invalid_config,
    is_same_file,
    read_config,
    recipe_of_run,
)
from hybridtrain.cli.config.schema import AUTO, OPEN_GROUPS, Config, groups, with_auto_replaced
from hybridtrain.cli.config.secrets import from_environment
from hybridtrain.cli.config.tree import flat_keys, to_config, to_tree
from hybridtrain.errors import ConfigError

# What an option that is chosen is composed with, beside its group and the recipe.
_TRUST = ("allow_targets", "hydra.", "push_to", "output=")


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
        moved: keys that say where the base of the run's adapter is now.
        notes: lines for the log.
        config_dir: of the command line, a folder with more groups and options.
        quiet: the terminal shows warnings, errors and the result only.
        dry_run: nothing of the run is kept, so no tracker reports it, except on the terminal.
    """

    config: Config
    overrides: list[str]
    texts: dict[tuple[str | int, ...], str] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    of_run: Config | None = None
    changes: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    config_dir: str | None = None
    quiet: bool = False
    dry_run: bool = False


def resolve_settings(
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
    error, composed = None, None
    names = literal_names(overrides)  # without a composition, which takes some tenths of a second
    if names is not None:
        run = _run_of(command, names, keys, run_name)
    if names is None or not (run / "config.yaml").exists():
        try:
            composed = compose_settings(overrides, config_dir)
        except ConfigError as problem:  # some may be about keys that only a run's config has
            composed, error = compose_settings(naming_overrides(overrides), config_dir), problem
        names = composed.config
        run = _run_of(command, names, keys, run_name)
    try:
        from hybridtrain.checkpoint import CheckpointStore  # which imports torch

        begun = bool(CheckpointStore(run / "checkpoints").steps())
    except OSError as problem:  # a name that is too long, say
        raise ConfigError(
            f"cannot read the run directory {run}: {problem.strerror}; set run_name= or output_dir="
        ) from problem
    saved = read_config(run / "config.yaml")
    if saved is None or (command == "train" and not begun and "recipe" in keys):
        if error is not None:
            raise error
        if composed is None:  # the file was there a moment ago
            composed = compose_settings(overrides, config_dir)
            _run_of(command, composed.config, keys, run_name)
        texts = from_environment(composed.tree)
        return Settings(
            composed.config, list(overrides), texts, composed.leftovers, config_dir=config_dir
        )
    of_run = config_of_run(saved, run)
    if composed is not None and "recipe" in keys:
        check_recipe(composed.recipe, recipe_of_run(saved), run)
    if command != "export":  # which runs no code of the run's
        _refuse_untrusted_code(of_run, run, keys)
    usable = composed if error is None else None
    settings = _on_top_of(of_run, saved, run, overrides, config_dir, usable)
    settings.config.run_name = names.run_name
    settings.config.output_dir = names.output_dir
    if command == "train" and not begun:
        for key in {"resume", "init_from"} - set(keys):  # it has not got further than its start
            setattr(settings.config, key, getattr(of_run, key))
    if begun:
        checkpoints = run / "checkpoints"
        settings.moved = follow_moved_base(settings.config, of_run, checkpoints, keys)
        settings.changes = list(differences(of_run, settings.config))
    gives_weights = "init_from" in {key.partition(".")[0] for key in keys} - settings.moved
    if command == "train" and begun and gives_weights:
        _refuse_other_weights(run, of_run.init_from, settings.config.init_from)
    changed = {change.key: as_yaml(change.of_run) for change in settings.changes}
    if gives_weights and settings.config.init_from != of_run.init_from:
        changed["init_from"] = as_yaml(of_run.init_from)
    check_changes(command, changed)
    if begun and not settings.config.allow_changes:
        allowed = {*settings.moved, *(EVALUATED if command in ("evaluate", "predict") else ())}
        _refuse_another_identity(run, [c for c in settings.changes if c.key not in allowed])
    if (
        composed is not None
        and "recipe" in keys
        and not is_same_file(str(composed.recipe), run / "config.yaml")
    ):
        kept = differences(settings.config, composed.config)
        settings.kept = [c for c in kept if not {c.key, c.key.partition(".")[0]} & set(keys)]
    settings.notes += _listed(settings, run)
    return settings


def _run_of(command: str, config: Config, keys: Sequence[str], run_name: str | None) -> Path:
    """Names the run that a command is about in `config`, and returns its directory.

    Args:
        command: such as train.
        config: of the command line, whose `run_name` and `output_dir` are set.
        keys: of the command line.
        run_name: in a sweep, the name of this run.
    """
    if run_name is not None:
        config.run_name = run_name
    else:
        name_run(command, config, keys)
    name = str(config.run_name)
    check_run_name(name)
    run = Path(config.output_dir) / name
    if "/" in name and (run.parent / "config.yaml").exists():
        raise ConfigError(f"run_name={name}: {run.parent} is a run, not a group")
    return run


def _refuse_other_weights(run: Path, began: Any, given: Any) -> None:
    """Refuses an `init_from` that a run with checkpoints would ignore."""
    from hybridtrain.checkpoint import parse_init_from  # imports torch

    if parse_init_from(given) != parse_init_from(began):
        start = "without init_from=" if began is None else f"from init_from={began}"
        raise ConfigError(
            f"init_from={given}: the run {run} has begun {start}, and goes on from its own "
            f"checkpoints; to begin with other weights, set another run_name="
        )


def _refuse_untrusted_code(of_run: Config, run: Path, keys: Sequence[str]) -> None:
    """Refuses a run with code of packages that the command line does not allow."""
    if of_run.allow_targets and "allow_targets" not in keys:
        packages = ",".join(of_run.allow_targets)
        raise ConfigError(
            f"{run} is a run with code of {packages}: if you trust it, say so with "
            f"allow_targets=[{packages}] on the command line"
        )


def _on_top_of(
    of_run: Config,
    saved: Mapping[str, Any],
    run: Path,
    overrides: Sequence[str],
    config_dir: str | None,
    composed: Composition | None,
) -> Settings:
    """Returns the config of the run with `overrides` on top of it.

    Args:
        of_run: the config of the run.
        saved: the same as it was written, with interpolations.
        run: its directory.
        overrides: the command line's.
        config_dir: a folder with more groups and options.
        composed: `overrides` with their recipe, if they were composed. Nothing is composed again
            if that gave the config of the run, as for a command that is repeated, or if it has the
            value of every override (`_holds_for_run`).
    """
    recipe = recipe_of_run(saved)
    keys = given_keys(overrides)
    base = {
        name: saved.get(name, value)  # with its interpolations
        if name in OPEN_GROUPS
        else value
        for name, value in to_tree(of_run).items()
        if name not in OF_THE_COMMAND
    }
    others = [o for o, key in zip(overrides, keys, strict=True) if key != "recipe"]
    if composed is not None and (
        (not composed.leftovers and not any(differences(of_run, composed.config)))
        or _holds_for_run(composed, others, base, recipe)
    ):
        source = composed
        tree = dict(source.tree)
        # not the recipe's: these belong to the command
        tree |= {name: value for name, value in _of_no_command().items() if name not in keys}
        leftovers = {name: names for name, names in source.leftovers.items() if name in keys}
    else:
        source = compose_settings(others, config_dir, base=base)
        tree, leftovers = dict(source.tree), dict(source.leftovers)
    # An option that is chosen has the recipe's keys on top, as when the run began.
    for group, values in source.tree.items() if source is not composed else ():
        if group in keys and isinstance(values, Mapping):
            of_group = [o for o, k in zip(overrides, keys, strict=True) if k.split(".")[0] == group]
            if recipe is not None:
                of_group.insert(0, f"recipe={recipe}")
            of_group += [o for o, k in zip(overrides, keys, strict=True) if k.startswith(_TRUST)]
            chosen = compose_settings(of_group, config_dir)
            tree[group] = chosen.tree[group]
            leftovers |= {name: found for name, found in chosen.leftovers.items() if name == group}
    _put_overrides(base, tree, others)
    base |= {name: tree[name] for name in OF_THE_COMMAND if name in tree}
    base["recipe"] = recipe
    try:
        config = to_config(base)
    except OmegaConfBaseException as error:
        raise invalid_config(run, error) from error
    # what was chosen when the run began, so that its steps stay the same
    config.pipeline = with_auto_replaced(config.pipeline, of_run.pipeline)
    if config.data.get("batch_size") == AUTO:
        config.data["batch_size"] = of_run.data["batch_size"]
    if "classes" in config.data and "data.classes" not in keys:
        config.data["classes"] = config.data["classes"] or of_run.data.get("classes")
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
        config_dir=config_dir,
    )


def _holds_for_run(
    composed: Composition,
    overrides: Sequence[str],
    base: Mapping[str, Any],
    recipe: str | None,
) -> bool:
    """Returns whether `overrides` set in the run's config the values that they have in `composed`.

    They do for a plain value of a key that the run has, a key that is removed, and an option of a
    group, if the run has the same recipe. All others are composed on top of the run's config, where
    a mapping is merged with the run's, a new key is checked, and a new `_target_` has leftovers.

    Args:
        composed: with the recipe of the command line.
        overrides: without the recipe.
        base: the config of the run, without the keys that belong to a command.
        recipe: of the run.
    """
    run_keys = {*flat_keys(base), *OF_THE_COMMAND}
    chosen = {key for key in given_keys(overrides) if key in (*OPEN_GROUPS, *groups())}
    if chosen and composed.recipe != recipe:
        return False
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if key in chosen or key.partition(".")[0] in chosen or key.startswith("hydra."):
            continue
        if override.is_delete():
            if "." not in key or override.value() is not None:
                return False
            continue
        is_plain = isinstance(override.value(), str | int | float | list | None)
        if not is_plain or key not in run_keys or key.endswith("._target_"):
            return False
        if isinstance(_at(base, key), Mapping):
            return False
    return True


def _at(tree: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key; None: there is none."""
    node: Any = tree
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _of_no_command() -> dict[str, Any]:
    """Returns the keys that belong to a command and not to a run, with their defaults."""
    return {name: value for name, value in to_tree(Config()).items() if name in OF_THE_COMMAND}


def _refuse_another_identity(run: Path, changes: Iterable[Change]) -> None:
    others = [change for change in changes if change.is_identity]
    if others:
        raise ConfigError(
            f"{run} is a run with {in_words(others)}: leave that out to use the run unchanged, set "
            f"another run_name= to begin another run, or allow it with allow_changes=true"
        )


def _listed(settings: Settings, run: Path) -> list[str]:
    """Returns a block of lines for each kind of difference."""
    notes: list[str] = []
    if settings.changes:
        head = f"settings are those of {run}/config.yaml, except for"
        notes.append(changes_table(head, settings.changes, "{} -> {}"))
    if settings.kept:
        recipe = settings.config.recipe
        head = f"kept as in {run}/config.yaml, although the recipe {recipe} differs"
        notes.append(changes_table(head, settings.kept, "{}  (recipe: {})"))
    return notes


def _put_overrides(
    base: dict[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Sets in `base` what `overrides` set in the tree `given`."""
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if key.startswith("hydra") or key == "recipe":
            continue
        *above, leaf = key.split(".")
        base_node: Any = base
        given_node: Any = given
        for name in above:
            base_node = base_node.setdefault(name, {}) if isinstance(base_node, dict) else {}
            given_node = given_node.get(name) if isinstance(given_node, Mapping) else None
        if not override.is_delete() and isinstance(given_node, Mapping) and leaf in given_node:
            base_node[leaf] = copy.deepcopy(given_node[leaf])
        elif isinstance(base_node, dict):
            base_node.pop(leaf, None)
