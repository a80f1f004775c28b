"""The settings of one command: the run's config, with the command line applied.

A run directory contains the config that its run started with. A command on that run starts from
this config, not from the recipe or the defaults: otherwise, evaluating with the recipe alone after
training with `data.max_len=64` would report results for other data. The log lists every difference;
differences that change the model or the data are errors.

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

from hybridtrain.cli.command_table import COMMANDS, check_changes
from hybridtrain.cli.config.changes import (
    EVALUATED,
    OF_THE_COMMAND,
    Change,
    as_yaml,
    changes_table,
    differences,
    in_words,
)
from hybridtrain.cli.config.compose import compose_settings
from hybridtrain.cli.config.moved_base import follow_moved_base
from hybridtrain.cli.config.overrides import given_keys, parse_overrides
from hybridtrain.cli.config.places import ConfigFile, check_places
from hybridtrain.cli.config.run_name import (
    check_run_name,
    name_run,
    naming_overrides,
)
from hybridtrain.cli.config.saved_run import (
    check_is_run,
    check_recipe,
    config_of_run,
    invalid_config,
    is_same_file,
    read_config,
    recipe_of_run,
)
from hybridtrain.cli.config.schema import AUTO, OPEN_GROUPS, Config, with_auto_replaced
from hybridtrain.cli.config.secrets import from_environment
from hybridtrain.cli.config.tree import to_config, to_tree
from hybridtrain.errors import ConfigError

# The overrides that an option is composed with, in addition to its group and the recipe.
_TRUST = ("allow_targets", "hydra.", "push_to", "output=", "output_dir=")


@dataclass
class Settings:
    """The values and overrides of one command.

    Attributes:
        config: the values to use.
        overrides: the overrides of the command line.
        texts: by path, interpolations of environment variables, which files store instead of their
            values.
        leftovers: see `Composition`.
        of_run: the config of the run, if that was the base.
        changes: differences between the run's config and the command line.
        kept: keys where the recipe on the command line differs from the run, which wins.
        moved: keys with the new location of the run's adapter base.
        notes: lines for the log.
        config_dir: a folder with more groups and options, from the command line.
        files: the files of the config: the recipe, or the run's config.
        quiet: the terminal shows only warnings, errors and the result.
        dry_run: the run leaves nothing behind, so only the terminal's tracker reports it.
        command: the command, which builds its `parts` of the run.
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
    files: Sequence[ConfigFile] = ()
    quiet: bool = False
    dry_run: bool = False
    command: str = "train"

    def uses(self, part: str) -> bool:
        """Returns whether the command builds or reads a part of the run; see `PARTS`."""
        return part in COMMANDS[self.command].parts


def resolve_settings(
    command: str,
    overrides: Sequence[str],
    config_dir: str | None = None,
    run_name: str | None = None,
) -> Settings:
    """Returns the settings of `command` with `overrides`.

    Args:
        command: such as train, evaluate or export.
        overrides: the overrides of the command line.
        config_dir: a folder with more groups and options.
        run_name: in a sweep, the name of this run.

    Raises:
        ConfigError: an override is wrong, would turn the existing run into a different one, or a
            file says what only the command line may say (`check_places`).
    """
    settings = _resolved(command, overrides, config_dir, run_name)
    settings.command = command
    check_places(command, settings.config, overrides, settings.files)
    return settings


def _resolved(
    command: str, overrides: Sequence[str], config_dir: str | None, run_name: str | None
) -> Settings:
    """Returns the settings without the checks of `check_places`."""
    keys = given_keys(overrides)
    error = None
    try:
        composed = compose_settings(overrides, config_dir)
    except ConfigError as problem:  # possibly about keys that only a run's config has
        composed, error = compose_settings(naming_overrides(overrides), config_dir), problem
    names = composed.config
    run = _run_of(command, names, keys, run_name)
    try:
        from hybridtrain.checkpoint import CheckpointStore  # imports torch

        begun = bool(CheckpointStore(run / "checkpoints").steps())
    except OSError as problem:  # for example, a name that is too long
        raise ConfigError(
            f"cannot read the run directory {run}: {problem.strerror}; set run_name= or output_dir="
        ) from problem
    saved = read_config(run / "config.yaml")
    if saved is None or (command == "train" and not begun and "recipe" in keys):
        if error is not None:
            raise error
        if saved is not None:
            check_is_run(saved, run)
        texts = from_environment(composed.tree)
        return Settings(
            composed.config,
            list(overrides),
            texts,
            composed.leftovers,
            config_dir=config_dir,
            files=composed.files,
        )
    of_run = config_of_run(saved, run)
    if "recipe" in keys:
        check_recipe(composed.recipe, recipe_of_run(saved), run)
    if command != "export":  # export runs no code of the run
        _refuse_untrusted_code(of_run, run, keys)
    settings = _on_top_of(of_run, saved, run, overrides, config_dir)
    settings.config.run_name = names.run_name
    settings.config.output_dir = names.output_dir
    if command == "train" and not begun:
        for key in {"resume", "init_from"} - set(keys):  # the run has no checkpoints yet
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
    if "recipe" in keys and not is_same_file(str(composed.recipe), run / "config.yaml"):
        # the run has left these out, see `leave_out_leftovers`
        leftovers = {f"{group}.{k}" for group, of in composed.leftovers.items() for k in of}
        kept = differences(settings.config, composed.config)
        settings.kept = [
            change
            for change in kept
            if not {change.key, change.key.partition(".")[0]} & set(keys)
            and not (change.is_new and change.key in leftovers)
        ]
    settings.notes += _listed(settings, run)
    return settings


def _run_of(command: str, config: Config, keys: Sequence[str], run_name: str | None) -> Path:
    """Sets the name of a command's run in `config`, and returns the run directory.

    Args:
        command: such as train.
        config: the command line's config; this sets its `run_name` and `output_dir`.
        keys: the keys on the command line.
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
    """Rejects an `init_from` that a run with checkpoints would ignore."""
    from hybridtrain.checkpoint import parse_init_from  # imports torch

    if parse_init_from(given) != parse_init_from(began):
        start = "without init_from=" if began is None else f"from init_from={as_yaml(began)}"
        raise ConfigError(
            f"init_from={as_yaml(given)}: the run {run} started {start} and resumes from its own "
            f"checkpoints; to start from other weights, set another run_name="
        )


def _refuse_untrusted_code(of_run: Config, run: Path, keys: Sequence[str]) -> None:
    """Rejects a run with code from packages that the command line does not allow."""
    if of_run.allow_targets and "allow_targets" not in keys:
        packages = ",".join(of_run.allow_targets)
        raise ConfigError(
            f"the run {run} uses code from {packages}: if you trust it, add "
            f"allow_targets=[{packages}] to the command line"
        )


def _on_top_of(
    of_run: Config,
    saved: Mapping[str, Any],
    run: Path,
    overrides: Sequence[str],
    config_dir: str | None,
) -> Settings:
    """Returns the config of the run with `overrides` applied.

    Args:
        of_run: the config of the run.
        saved: the same config as written, with interpolations.
        run: its directory.
        overrides: the overrides of the command line.
        config_dir: a folder with more groups and options.
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
    source = compose_settings(others, config_dir, base=base)
    tree, leftovers = dict(source.tree), dict(source.leftovers)
    files: list[ConfigFile] = []
    # The recipe's keys override a selected option, as when the run started.
    for group, values in source.tree.items():
        if group in keys and isinstance(values, Mapping):
            of_group = [o for o, k in zip(overrides, keys, strict=True) if k.split(".")[0] == group]
            if recipe is not None:
                of_group.insert(0, f"recipe={recipe}")
            of_group += [o for o, k in zip(overrides, keys, strict=True) if k.startswith(_TRUST)]
            chosen = compose_settings(of_group, config_dir)
            tree[group] = _as_in_run(chosen.tree[group], saved.get(group), group, keys)
            files += [ConfigFile(f.name, {group: f.tree.get(group)}) for f in chosen.files]
            leftovers |= {name: found for name, found in chosen.leftovers.items() if name == group}
    _put_overrides(base, tree, others)
    base |= {name: tree[name] for name in OF_THE_COMMAND if name in tree}
    base["recipe"] = recipe
    try:
        config = to_config(base)
    except OmegaConfBaseException as error:
        raise invalid_config(run, error) from error
    # the values chosen when the run started, so that its steps stay the same
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
        # an option that the command line selects replaces the group of the run
        files=[
            ConfigFile(f"{run}/config.yaml", {k: v for k, v in saved.items() if k not in keys}),
            *files,
        ],
    )


def _as_in_run(option: Any, of_run: Any, group: str, keys: Sequence[str]) -> Any:
    """Returns an option without the arguments that came after the release of the run.

    They keep the defaults of the function, by which it does what it did.
    """
    if not (isinstance(option, Mapping) and isinstance(of_run, Mapping)):
        return option
    if option.get("_target_") is None or option["_target_"] != of_run.get("_target_"):
        return option
    return {
        name: value
        for name, value in option.items()
        if name in of_run or any(f"{key}.".startswith(f"{group}.{name}.") for key in keys)
    }


def _refuse_another_identity(run: Path, changes: Iterable[Change]) -> None:
    others = [change for change in changes if change.is_identity]
    if others:
        raise ConfigError(
            f"the run {run} has {in_words(others)}: remove the change to use the run as it is, set "
            f"another run_name= to start a new run, or set allow_changes=true"
        )


def _listed(settings: Settings, run: Path) -> list[str]:
    """Returns a block of lines for each kind of difference."""
    notes: list[str] = []
    if settings.changes:
        head = f"using the settings in {run}/config.yaml, except for"
        notes.append(changes_table(head, settings.changes, "{} -> {}"))
    if settings.kept:
        recipe = settings.config.recipe
        head = f"keeping these settings of {run}/config.yaml, although recipe={recipe} differs"
        notes.append(changes_table(head, settings.kept, "{}  (recipe: {})"))
    return notes


def _put_overrides(
    base: dict[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Copies the values that `overrides` set from the tree `given` to `base`."""
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
