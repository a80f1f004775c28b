"""The options of groups that are files: the recipes, and what an override names by its path.

Hydra would not find them in the folders of the configs: each is stored as an option of its group
(`register`, `register_file`).
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from hybridtrain.cli.config.schema import Config
from hybridtrain.errors import ConfigError

THIS_MACHINE = "this-machine"


def measured_file() -> Path:
    """Returns where `measure-machine` writes, and `hardware=this-machine` is read from."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hybridtrain" / f"{THIS_MACHINE}.yaml"


def register() -> None:
    """Registers the schema and the recipes with Hydra.

    Hydra would not find the recipes, which are not in a folder of the configs: each file is stored
    as an option of the group `recipe`, at the root of the config. Files of an earlier command in
    this process are left out.
    """
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    # for the user's own trackers; `to_config` refuses what is none
    OmegaConf.set_struct(schema.monitor, False)
    store.store(name="schema", node=schema)
    store.repo["recipe"] = _Recipes(
        (file.name, ConfigNode(file.name, file, "recipe", "_global_", provider=None))
        for file in files("hybridtrain.recipes").iterdir()
        if file.name.endswith(".yaml")
    )


class _Recipes(dict[str, ConfigNode]):
    """Recipes by their files' names, of which only one that is taken is parsed."""

    def __getitem__(self, name: str) -> ConfigNode:
        recipe = super().__getitem__(name)
        if not isinstance(recipe.node, DictConfig):
            recipe.node = _parsed(recipe.node.read_text())
        return recipe


def register_file(override: str) -> str:
    """Registers the file of `recipe=path/to/file.yaml` and returns `recipe=file`; or of `hardware`.

    Any other override is returned unchanged.

    Raises:
        ConfigError: the file cannot be read or is not YAML, `hardware` is a list or mapping, or
            this machine has not been measured.
    """
    key, _, value = override.partition("=")
    group = key.lstrip("+")
    if group == "hardware" and value.startswith(("[", "{")):
        raise ConfigError(
            f"hardware={value} must be the name of a machine, or the path of a YAML file with its "
            f"keys; single ones are set as hardware.nodes=2"
        )
    path = Path(value)
    if group == "hardware" and value == THIS_MACHINE:
        path = measured_file()
        if not path.exists():
            raise ConfigError(
                "hardware=this-machine: this machine has not been measured yet; "
                "`hybridtrain measure-machine` does it in a minute"
            )
    if group not in ("recipe", "hardware") or path.suffix not in (".yaml", ".yml"):
        return override
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{override}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{override}: it is not UTF-8 text") from error
    # a preset of the same name would win
    name = path.stem if group == "recipe" else f"{path.stem}-file"
    store_option(group, name, text, override)
    return f"{key}={name}"


def store_option(group: str, name: str, text: str, override: str = "") -> None:
    """Stores YAML as an option of a group with Hydra; a recipe is one of the root."""
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
