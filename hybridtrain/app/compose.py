"""Composes the command line's overrides, with Hydra, to a `Config`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from hybridtrain.app.config import Config, flat_keys
from hybridtrain.app.instantiate import unknown_key
from hybridtrain.errors import ConfigError, closest, did_you_mean

CONFIG_MODULE = "hybridtrain.configs"


def register() -> None:
    """Registers the schema and the recipes with Hydra.

    Hydra would not find the recipes, which are not in a folder of the configs: each file is stored
    as an option of the group `recipe`, at the root of the config.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for recipe in files("hybridtrain.recipes").iterdir():
        if recipe.name.endswith(".yaml"):
            _store_recipe(Path(recipe.name).stem, recipe.read_text())


def compose_config(overrides: Sequence[str], search_path: str | None = None) -> Config:
    """Composes the config of a run.

    Args:
        overrides: Hydra overrides. `recipe=path/to/file.yaml` takes that file as the recipe.
        search_path: a folder with more groups and options.

    Raises:
        ConfigError: one line that names the key or option, and the one that was probably meant.
    """
    register()
    overrides = [register_recipe_file(override) for override in overrides]
    if search_path is not None:
        overrides.append(f"hydra.searchpath=[file://{Path(search_path).resolve()}]")
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            composed = compose("config", overrides=overrides, return_hydra_config=True)
            recipe = composed.hydra.runtime.choices.get("recipe")
            OmegaConf.set_struct(composed, False)
            del composed["hydra"]
            # Merged into the schema again: `+key` and untyped files pass Hydra's own check.
            plain = OmegaConf.to_container(composed, resolve=True)
            merged = OmegaConf.merge(OmegaConf.structured(Config), plain)
            config = cast(Config, OmegaConf.to_object(merged))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_explain(error, overrides)) from error
    if config.allow_targets and not any(
        o.lstrip("+").startswith("allow_targets") for o in overrides
    ):
        raise ConfigError(
            f"the recipe asks to run code of {', '.join(config.allow_targets)}: if you trust it, "
            f"say so with allow_targets=[{','.join(config.allow_targets)}] on the command line"
        )
    if config.run_name is None:
        config.run_name = Path(recipe).stem if recipe else "run"
    return config


def sweep_choices(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each run of a sweep such as `optim.lr=1e-3,1e-2`.

    Raises:
        ConfigError: an override cannot be read or swept over.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        # Not through hydra.main: within its jobs no further config can be composed.
        return [list(choice) for choice in BasicSweeper.split_arguments(parsed, None)[0]]
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error


def to_yaml(value: Config | list[str]) -> str:
    """Returns a resolved config, or a list of overrides, as written to the run directory."""
    return OmegaConf.to_yaml(value if isinstance(value, list) else OmegaConf.structured(value))


def _store_recipe(name: str, text: str) -> None:
    try:
        node = OmegaConf.create(text)
    except YAMLError as error:
        raise ConfigError(f"recipe {name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"recipe {name} must be a mapping of keys to values")
    ConfigStore.instance().store(group="recipe", name=name, package="_global_", node=node)


def register_recipe_file(override: str) -> str:
    """Registers the file of `recipe=path/to/file.yaml` and returns `recipe=file`.

    Any other override is returned unchanged.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    key, _, value = override.partition("=")
    if key.lstrip("+") != "recipe" or not value.endswith((".yaml", ".yml")):
        return override
    path = Path(value)
    try:
        _store_recipe(path.stem, path.read_text())
    except OSError as error:
        raise ConfigError(f"recipe={value}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe={value}: it is not UTF-8 text") from error
    return f"{key}={path.stem}"


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Returns one line that says what Hydra or OmegaConf found, and how to fix it."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, MissingConfigException):
            group, _, chosen = (cause.missing_cfg_file or "").lstrip("/").rpartition("/")
            return f"{group}={chosen} is unknown: {did_you_mean(chosen, cause.options or [])}"
    loader = GlobalHydra.instance().config_loader()
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as grammar:
            return f"cannot read the override {override!r}: {_first_line(grammar)}"
        key, _, value = override.partition("=")
        if not key:
            return f"cannot read the override {override!r}: there is no key before the ="
        if key.startswith("+") and key.lstrip("+") in _groups():
            return f"{override}: {key.lstrip('+')} exists already; write {override.lstrip('+')}"
        options = loader.get_group_options(key)
        if type(error) is ValueError and options and value not in options:  # a number, say
            return f"{override} is unknown: {did_you_mean(value, options)}"
    if unknown := re.search(r"In '(.+)': Could not override '([^@']+)", str(error)):
        close = closest(unknown[2].removeprefix("recipe/"), loader.list_groups(""))
        hint = f"; did you mean 'override /{close}'?" if close else ""
        return f"{unknown[1]}: there is no group {unknown[2]} in the defaults list{hint}"
    known = _known_keys(overrides)
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        if key and known and key not in known and not key.startswith("hydra."):
            return unknown_key(key, known)
    for cause in causes:
        if isinstance(cause, ConfigKeyError) and cause.full_key:
            return unknown_key(cause.full_key, known)
    for cause in causes:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return f"{cause.full_key}: {_first_line(cause)}"
    return " ".join(str(error).split())


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the config's keys and groups, composed from the overrides that choose options."""
    groups = [group for group in _groups() if group != "schema"]
    choices = [o for o in overrides if o.partition("=")[0].lstrip("+") in groups]
    try:
        composed = compose("config", overrides=choices)
    except (HydraException, OmegaConfBaseException):
        composed = compose("config")
    tree = OmegaConf.to_container(composed)
    return [*flat_keys(cast(dict[str, Any], tree)), "recipe"]


def _groups() -> list[str]:
    return [*(f.name for f in fields(Config)), "recipe"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
