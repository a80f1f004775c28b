"""Composes a `Config` from the command line's overrides, with Hydra.

An error in an override or a file becomes one line with a suggestion (`explain`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtrain.cli.config.explain import explain
from hybridtrain.cli.config.keys import unknown_key
from hybridtrain.cli.config.leftovers import leftovers_of
from hybridtrain.cli.config.option_files import recipe_tree, register, register_file, store_option
from hybridtrain.cli.config.overrides import (
    as_hydra_takes_them,
    given_keys,
    given_recipe,
    parse_overrides,
    refuse_empty_texts,
    with_texts,
)
from hybridtrain.cli.config.places import ConfigFile, check_run_keys
from hybridtrain.cli.config.run_name import default_run_name
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.config.tree import flat_keys, to_config
from hybridtrain.errors import ConfigError

CONFIG_MODULE = "hybridtrain.configs"

# The name of a run's config among the recipes.
_BASE = "config_of_the_run"

# The only one of Hydra's own settings that has an effect here.
SEARCH_PATH = "hydra.searchpath"


@dataclass(frozen=True)
class Composition:
    """A composed config, and the origin of its values.

    Attributes:
        config: the values.
        tree: the same as plain dicts, with interpolations (`${...}`) as text.
        recipe: the recipe in the command line: a name, a path, or None.
        leftovers: for each group, keys from an option or recipe for a `_target_` that was replaced.
        files: the recipe's file, if the command line names one.
    """

    config: Config
    tree: dict[str, Any]
    recipe: str | None = None
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    files: tuple[ConfigFile, ...] = ()


def compose_config(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Returns the config of `compose_settings`."""
    return compose_settings(overrides, config_dir).config


def compose_settings(
    overrides: Sequence[str],
    config_dir: str | None = None,
    base: Mapping[str, Any] | None = None,
) -> Composition:
    """Composes the config of a run.

    Args:
        overrides: Hydra overrides. `recipe=path/to/file.yaml` uses that file as the recipe.
        config_dir: a folder with more groups and options.
        base: the config of a run, instead of a recipe.

    Raises:
        ConfigError: one line that names the key or option and suggests a correction.
    """
    register()
    refuse_empty_texts(overrides)
    recipe = given_recipe(overrides)
    wanted = [register_file(override) for override in as_hydra_takes_them(with_texts(overrides))]
    if base is not None:
        # selecting an option replaces the whole group
        run_values = {
            name: values for name, values in base.items() if name not in given_keys(overrides)
        }
        store_option("recipe", _BASE, OmegaConf.to_yaml(OmegaConf.create(run_values)))
        # a user may repeat the command that started the run, including its `+` and `~` overrides
        again = [f"+{o}" if re.match(r"\+[\w]+\.", o) else o for o in wanted]
        run_keys = set(flat_keys(run_values))
        wanted = [
            o for o in again if not (o.startswith("~") and "." in o and o[1:] not in run_keys)
        ]
        wanted.insert(0, f"recipe={_BASE}")
    # Hydra cannot delete a key that is null.
    deleted = [o[1:] for o in wanted if o.startswith("~") and "." in o and "=" not in o]
    wanted = [override for override in wanted if override[1:] not in deleted or override[0] != "~"]
    if config_dir is not None:
        wanted = with_search_path(wanted, config_dir)
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            composed = compose("config", overrides=wanted, return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            del composed["hydra"]
            tree = cast(dict[str, Any], OmegaConf.to_container(composed))
            for key in deleted:
                _delete(tree, key)
            # Merge into the schema again, because `+key` and untyped files bypass Hydra's check.
            tree["recipe"] = recipe or tree.get("recipe")
            tree["run_name"] = tree.get("run_name") or default_run_name(recipe)
            _let_one_length_replace_the_other(tree.get("trainer"), given_keys(overrides))
            config = to_config(tree)
        # OmegaConf asserts that a group is not null when it gets a value
        except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
            raise ConfigError(explain(error, wanted)) from error
    if config.allow_targets and "allow_targets" not in given_keys(overrides):
        raise ConfigError(
            f"the recipe wants to run code from {', '.join(config.allow_targets)}: if you trust "
            f"it, add allow_targets=[{','.join(config.allow_targets)}] to the command line"
        )
    chosen = choices.get("recipe")
    files: tuple[ConfigFile, ...] = ()
    if base is None:
        if recipe is not None:
            files = (ConfigFile(f"recipe={recipe}", recipe_tree(str(chosen))),)
        check_run_keys(config, overrides, files)
    return Composition(config, tree, recipe, leftovers_of(tree, overrides, chosen), files)


def _let_one_length_replace_the_other(trainer: Any, given: Sequence[str]) -> None:
    """Makes `trainer.steps=100` replace a recipe's `trainer.epochs`, and vice versa."""
    lengths = ("steps", "epochs")
    given_lengths = [name for name in lengths if f"trainer.{name}" in given]
    if (
        len(given_lengths) == 1
        and isinstance(trainer, MutableMapping)
        and trainer.get(given_lengths[0]) is not None
    ):
        trainer.update({name: None for name in lengths if name != given_lengths[0]})


def with_search_path(overrides: Sequence[str], config_dir: str) -> list[str]:
    """Returns `overrides` with `config_dir` at the end of the search path."""
    folder = Path(config_dir)
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    paths: list[str] = []
    for override in parse_overrides([o for o in overrides if SEARCH_PATH in o]):
        value = override.value()
        paths += [str(path) for path in value] if isinstance(value, list) else [str(value)]
    paths.append(f"file://{folder.resolve()}")
    others = [override for override in overrides if SEARCH_PATH not in override]
    return [*others, f"{SEARCH_PATH}=[{','.join(repr(path) for path in paths)}]"]


def _delete(tree: dict[str, Any], key: str) -> None:
    parent: Any = tree
    *above, leaf = key.split(".")
    for name in above:
        parent = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or leaf not in parent:
        raise ConfigError(unknown_key(key, list(flat_keys(tree))))
    del parent[leaf]
