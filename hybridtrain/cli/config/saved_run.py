"""The config that a run started with, from its directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridtrain._base.files import read_file
from hybridtrain._base.yaml_text import check_expansion
from hybridtrain.cli.config.overrides import first_line
from hybridtrain.cli.config.schema import OPEN_GROUPS, Config
from hybridtrain.cli.config.tree import to_config
from hybridtrain.errors import ConfigError

# The groups in a complete config of a run.
_GROUPS = (*OPEN_GROUPS, "pipeline", "world", "trainer", "checkpoint")


def read_config(path: Path) -> dict[str, Any] | None:
    """Returns the config in the file, with interpolations as text; None: there is no file."""
    try:
        check_expansion(read_file(path).decode())
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: restore it, or set another run_name=")
    return {str(key): value for key, value in tree.items()}


def check_is_run(saved: Mapping[str, Any], run: Path) -> None:
    """Checks that a config.yaml is that of a run, which a new run may replace.

    Raises:
        ConfigError: it is truncated, or the file of another program.
    """
    missing = [name for name in _GROUPS if not isinstance(saved.get(name), dict)]
    missing += [f"{name}._target_" for name in OPEN_GROUPS if "_target_" not in saved.get(name, {})]
    if missing:
        raise ConfigError(
            f"{run}/config.yaml has no {missing[0]}, so it is not the config of a run, or empty or "
            f"truncated: restore it, or set another run_name="
        )


def config_of_run(saved: Mapping[str, Any], run: Path) -> Config:
    """Returns the config of a run, its interpolations resolved.

    Raises:
        ConfigError: the file is truncated, or has an unknown key or a value of a wrong type.
    """
    check_is_run(saved, run)
    try:
        return to_config(saved)
    except OmegaConfBaseException as error:
        raise invalid_config(run, error) from error


def invalid_config(run: Path, error: OmegaConfBaseException) -> ConfigError:
    """Returns the error for a run's config that does not match the schema."""
    return ConfigError(f"{run}/config.yaml: {first_line(error)}")


def recipe_of_run(saved: Mapping[str, Any]) -> str | None:
    """Returns the recipe that the run started with, as on its command line."""
    recipe = saved.get("recipe")
    return None if recipe is None else str(recipe)


def check_recipe(given: str | None, of_run: str | None, run: Path) -> None:
    """Rejects the recipe of another run; the run's own config.yaml is a valid recipe too."""
    if given == of_run or (given is not None and is_same_file(given, run / "config.yaml")):
        return
    if given is not None and of_run is not None and is_same_file(given, Path(of_run)):
        return
    of = f"recipe={of_run}" if of_run else "no recipe"
    raise ConfigError(
        f"the run {run} has {of}, not recipe={given}: set another run_name=, or remove recipe= to "
        f"use the run as it is"
    )


def is_same_file(one: str, other: Path) -> bool:
    """Returns whether a path written by the user is the file `other`."""
    return Path(one).resolve() == other.resolve()
