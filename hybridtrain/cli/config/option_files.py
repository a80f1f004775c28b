"""Options that are files: the recipes, and files that an override names by path.

Hydra would not find them in the config folders, so each is stored as an option of its group
(`register`, `register_file`).
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from hybridtrain.cli.config.schema import Config
from hybridtrain.errors import ConfigError

THIS_MACHINE = "this-machine"


def measured_file() -> Path:
    """Returns the file that `measure-machine` writes and `hardware=this-machine` reads."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hybridtrain" / f"{THIS_MACHINE}.yaml"


def register() -> None:
    """Registers the schema and the recipes with Hydra.

    Hydra would not find the recipes, which are outside the config folders, so each file is stored
    as an option of the group `recipe`, at the root of the config. This removes files registered by
    an earlier command in this process.
    """
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # Hydra copies it before it changes it
        schema = OmegaConf.structured(Config)
        # for user-defined trackers; `to_config` rejects other keys
        OmegaConf.set_struct(schema.monitor, False)
        store.store(name="schema", node=schema)
    store.repo["recipe"] = _Recipes(
        (file.name, ConfigNode(file.name, file, "recipe", "_global_", provider=None))
        for file in files("hybridtrain.recipes").iterdir()
        if file.name.endswith(".yaml")
    )


def recipe_names() -> list[str]:
    """Returns the names of the package's recipes."""
    names = (file.name for file in files("hybridtrain.recipes").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


class _Recipes(dict[str, ConfigNode]):
    """Recipes by file name; a recipe is parsed only when used."""

    def __getitem__(self, name: str) -> ConfigNode:
        recipe = super().__getitem__(name)
        if not isinstance(recipe.node, DictConfig):
            recipe.node = _parsed(recipe.node.read_text())
        return recipe


def recipe_tree(name: str) -> dict[str, Any]:
    """Returns a registered recipe, with interpolations as text; empty: it is in a config folder."""
    recipes = ConfigStore.instance().repo["recipe"]
    if f"{name}.yaml" not in recipes:
        return {}
    return cast(dict[str, Any], OmegaConf.to_container(recipes[f"{name}.yaml"].node))


def register_file(override: str) -> str:
    """Registers the file of `recipe=path/to/file.yaml` and returns `recipe=file`; also `hardware`.

    It returns any other override unchanged.

    Raises:
        ConfigError: the file cannot be read or is not YAML, `hardware` is a list or mapping, or
            this machine has not been measured.
    """
    key, _, value = override.partition("=")
    group = key.lstrip("+")
    if group == "hardware" and value.startswith(("[", "{")):
        raise ConfigError(
            f"hardware={value} must be the name of a machine, or the path of a YAML file with its "
            f"keys; set single keys as in hardware=h100 hardware.nodes=2"
        )
    path = Path(value)
    if group == "hardware" and value == THIS_MACHINE:
        path = measured_file()
        if not path.exists():
            raise ConfigError(
                "hardware=this-machine: this machine has not been measured yet; run `hybridtrain "
                "measure-machine`, which takes a minute"
            )
    if group not in ("recipe", "hardware") or path.suffix not in (".yaml", ".yml"):
        return override
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{override}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{override}: not UTF-8 text") from error
    # a preset with the same name would take precedence
    name = path.stem if group == "recipe" else f"{path.stem}-file"
    store_option(group, name, text, override)
    return f"{key}={name}"


def store_option(group: str, name: str, text: str, override: str = "") -> None:
    """Stores YAML with Hydra as an option of a group, or of the root for a recipe."""
    package = "_global_" if group == "recipe" else group
    node = _parsed(text, override)
    ConfigStore.instance().store(group=group, name=name, package=package, node=node)


def _parsed(text: str, override: str = "") -> DictConfig:
    """Returns the content of an option's file."""
    try:
        node = OmegaConf.create(text)
    except YAMLError as error:
        raise ConfigError(f"{override} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{override} must be a mapping of keys to values")
    return node
