"""The config that a run began with, as its directory has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridtrain.cli.config.overrides import first_line
from hybridtrain.cli.config.schema import OPEN_GROUPS, Config
from hybridtrain.cli.config.tree import to_config
from hybridtrain.errors import ConfigError

# The groups that the config of a run has if it is whole.
_GROUPS = (*OPEN_GROUPS, "pipeline", "world", "trainer", "checkpoint")


def read_config(path: Path) -> dict[str, Any] | None:
    """Returns the config in the file, with interpolations as text; None: there is no file."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: restore it, or set another run_name=")
    return {str(key): value for key, value in tree.items()}


def config_of_run(saved: Mapping[str, Any], run: Path) -> Config:
    """Returns the config of a run, its interpolations resolved.

    Raises:
        ConfigError: it was cut short, or has an unknown key or a value of a wrong type.
    """
    missing = [name for name in _GROUPS if not isinstance(saved.get(name), dict)]
    missing += [f"{name}._target_" for name in OPEN_GROUPS if "_target_" not in saved.get(name, {})]
    if missing:
        raise ConfigError(
            f"{run}/config.yaml has no {missing[0]}: it was emptied or cut short; restore it, or "
            f"set another run_name="
        )
    try:
        return to_config(saved)
    except OmegaConfBaseException as error:
        raise invalid_config(run, error) from error


def invalid_config(run: Path, error: OmegaConfBaseException) -> ConfigError:
    """Returns the error for a config of a run that the schema does not take."""
    return ConfigError(f"{run}/config.yaml: {first_line(error)}")


def recipe_of_run(saved: Mapping[str, Any]) -> str | None:
    """Returns the recipe that the run began with, as it was given."""
    recipe = saved.get("recipe")
    return None if recipe is None else str(recipe)


def check_recipe(given: str | None, of_run: str | None, run: Path) -> None:
    """Refuses the recipe of another run; the run's own config.yaml is a recipe too."""
    if given == of_run or (given is not None and is_same_file(given, run / "config.yaml")):
        return
    if given is not None and of_run is not None and is_same_file(given, Path(of_run)):
        return
    of = f"of recipe={of_run}" if of_run else "without a recipe"
    raise ConfigError(
        f"{run} is a run {of}, not of recipe={given}: set another run_name=, or leave recipe= out "
        f"to use the run unchanged"
    )


def is_same_file(one: str, other: Path) -> bool:
    """Returns whether a path as the user wrote it is the file `other`."""
    return Path(one).resolve() == other.resolve()
