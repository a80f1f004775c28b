"""The pyproject.toml of a user's project, and what installed plugins bring.

[tool.hybridtrain]                          in the pyproject.toml of the working directory
allow_targets = ["my_project"]              packages that a `_target_` may come from
config_dir = "configs"                      a folder with more options, as --config-dir is

[project.entry-points."hybridtrain.plugins"]    of a package that others install
my_plugin = "my_plugin"                     its `_target_`s are allowed, and the options in
                                            my_plugin/configs are found
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridtrain.cli.config.compose import given_keys
from hybridtrain.errors import ConfigError
from hybridtrain.launch import detect

_ALLOW, _FOLDER = "allow_targets", "config_dir"
_SEARCH_PATH = "hydra.searchpath"


def with_project(overrides: Sequence[str], config_dir: str | None) -> tuple[list[str], str | None]:
    """Returns the overrides and the folder of options of a command, with those of the project.

    What the command line has itself stays. Rank 0 says which packages are allowed.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or lies among runs.
    """
    given = given_keys(overrides)
    folders = [o.partition("=")[2] for o in overrides if o.startswith("output_dir=")]
    project = _project(Path("pyproject.toml"), Path(folders[-1]) if folders else None)
    plugins = [point.value for point in entry_points(group="hybridtrain.plugins")]
    added = []
    if _ALLOW not in given and (packages := [*project.get(_ALLOW, []), *plugins]):
        added.append(f"{_ALLOW}=[{','.join(packages)}]")
    paths = [f"pkg://{name}.configs" for name in plugins if _has_configs(name)]
    if paths and _SEARCH_PATH not in given:
        added.append(f"{_SEARCH_PATH}=[{','.join(paths)}]")
    if project.get(_ALLOW) and _ALLOW not in given and detect(os.environ).rank == 0:
        print(f"{added[0]}, as pyproject.toml says", file=sys.stderr, flush=True)
    return [*overrides, *added], config_dir or project.get(_FOLDER)


def _has_configs(package: str) -> bool:
    try:
        return find_spec(f"{package}.configs") is not None
    except ImportError as error:
        raise ConfigError(
            f"the plugin {package}, which is installed, cannot be imported: {error}"
        ) from error


def _project(path: Path, runs: Path | None) -> dict[str, Any]:
    """Returns the table of the file; it is empty if there is no file.

    Args:
        path: of the file.
        runs: the folder of runs that the command line names.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    table = content.get("tool", {}).get("hybridtrain", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [tool.hybridtrain] must be a table, and not {table}")
    if unknown := sorted(set(table) - {_ALLOW, _FOLDER}):
        raise ConfigError(
            f"{path}: [tool.hybridtrain] has {_ALLOW} and {_FOLDER} only, and not {unknown[0]}"
        )
    packages = table.get(_ALLOW, [])
    if not isinstance(packages, list) or not all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in packages
    ):
        raise ConfigError(
            f"{path}: {_ALLOW} of [tool.hybridtrain] must be a list of packages, such as "
            f'["my_project"], and not {packages}'
        )
    if not isinstance(table.get(_FOLDER, ""), str):
        raise ConfigError(
            f"{path}: {_FOLDER} of [tool.hybridtrain] must be the path of a folder, and not "
            f"{table[_FOLDER]}"
        )
    if table:
        _refuse_among_runs(path, table, runs)
    return table


def _is_run(folder: Path) -> bool:
    """Returns whether `folder` may be a run directory, whole or with files left out."""
    if (folder / "overrides.yaml").exists() or (folder / "metrics.jsonl").exists():
        return True
    return (folder / "config.yaml").exists() and any(
        (folder / name).is_dir() for name in ("checkpoints", "logs")
    )


def _refuse_among_runs(path: Path, table: Mapping[str, Any], runs: Path | None) -> None:
    """Refuses the file in a directory of runs or inside a run, which may be a stranger's."""
    here = Path.cwd()
    inside = runs is not None and here.is_relative_to(runs.resolve())  # runs may be in groups
    if inside or any(map(_is_run, (here, *here.parents, *here.glob("*/")))):
        packages = ",".join(table.get(_ALLOW, []))
        raise ConfigError(
            f"{path} allows code of {packages}, which does not count in a directory of runs: "
            f"call the command in the folder of your project, or add {_ALLOW}=[{packages}] to it"
        )
