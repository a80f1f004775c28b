"""The pyproject.toml of a user's project, and installed plugins.

[tool.hybridtrain]                          in the pyproject.toml of the working directory
allow_targets = ["my_project"]              packages that a `_target_` may name
config_dir = "configs"                      a folder with more options, like --config-dir

[project.entry-points."hybridtrain.plugins"]    in an installed package
my_plugin = "my_plugin"                     allows its `_target_`s, and adds the options in
                                            my_plugin/configs
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridtrain.cli.config.compose import SEARCH_PATH, compose_settings
from hybridtrain.cli.config.overrides import given_keys, parse_overrides
from hybridtrain.cli.config.run_name import name_run, naming_overrides
from hybridtrain.cli.config.sweeps import sweep_choices
from hybridtrain.errors import ConfigError
from hybridtrain.launch import detect

_ALLOW, _FOLDER = "allow_targets", "config_dir"


def with_project(
    command: str, overrides: Sequence[str], config_dir: str | None
) -> tuple[list[str], str | None]:
    """Returns the overrides and the config folder of a command, with the project's added.

    The command line takes precedence. Rank 0 prints the allowed packages.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or is in a directory of runs.
    """
    keys, path = given_keys(overrides), Path("pyproject.toml")
    project = _project(path)
    if _ALLOW in keys:
        project.pop(_ALLOW, None)
    if config_dir is not None:
        project.pop(_FOLDER, None)
    plugins = [point.value for point in entry_points(group="hybridtrain.plugins")]
    added = []
    if _ALLOW not in keys and (packages := [*project.get(_ALLOW, []), *plugins]):
        added.append(f"{_ALLOW}=[{','.join(packages)}]")
    paths = [f"pkg://{name}.configs" for name in plugins if _has_configs(name)]
    if paths and SEARCH_PATH not in keys:
        added.append(f"{SEARCH_PATH}=[{','.join(paths)}]")
    words, folder = [*overrides, *added], config_dir or project.get(_FOLDER)
    if project:
        _refuse_among_runs(path, project, command, words, folder)
    if project.get(_ALLOW) and detect(os.environ).rank == 0:
        print(f"{added[0]} (from pyproject.toml)", file=sys.stderr, flush=True)
    return words, folder


def _has_configs(package: str) -> bool:
    try:
        return find_spec(f"{package}.configs") is not None
    except ImportError as error:
        raise ConfigError(f"cannot import the installed plugin {package}: {error}") from error


def _project(path: Path) -> dict[str, Any]:
    """Returns the table of the file; it is empty if there is no file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    table = content.get("tool", {}).get("hybridtrain", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [tool.hybridtrain] must be a table, not {table}")
    if unknown := sorted(set(table) - {_ALLOW, _FOLDER}):
        raise ConfigError(
            f"{path}: [tool.hybridtrain] supports only {_ALLOW} and {_FOLDER}, not {unknown[0]}"
        )
    packages = table.get(_ALLOW, [])
    if not isinstance(packages, list) or not all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in packages
    ):
        raise ConfigError(
            f"{path}: {_ALLOW} of [tool.hybridtrain] must be a list of packages, such as "
            f'["my_project"], not {packages}'
        )
    if not isinstance(table.get(_FOLDER, ""), str):
        raise ConfigError(
            f"{path}: {_FOLDER} of [tool.hybridtrain] must be the path of a folder, not "
            f"{table[_FOLDER]}"
        )
    return table


def _is_run(folder: Path) -> bool:
    """Returns whether `folder` may be a run directory, complete or with files missing."""
    if (folder / "overrides.yaml").exists() or (folder / "metrics.jsonl").exists():
        return True
    return (folder / "config.yaml").exists() and any(
        (folder / name).is_dir() for name in ("checkpoints", "logs")
    )


def _refuse_among_runs(
    path: Path,
    project: Mapping[str, Any],
    command: str,
    overrides: Sequence[str],
    config_dir: str | None,
) -> None:
    """Rejects the file in a directory of runs or inside a run, which may come from a stranger."""
    here = Path.cwd()
    among = any(map(_is_run, (here, *here.parents, *here.glob("*/"))))
    for output_dir, run in () if among else _runs_of_command(command, overrides, config_dir):
        among |= any(here.is_relative_to(folder) for folder in (output_dir.resolve(), run.parent))
        # `resume=` may name a run of a group here, outside any output_dir
        among |= run.is_relative_to(here) and not run.is_relative_to(output_dir.resolve())
    if not among:
        return
    words = [f"{_ALLOW}=[{','.join(project[_ALLOW])}]"] if project.get(_ALLOW) else []
    words += [f"--config-dir {project[_FOLDER]}"] if _FOLDER in project else []
    raise ConfigError(
        f"[tool.hybridtrain] in {path} is not used because this is a directory of runs, which may "
        f"be someone else's: run the command in your project's folder, or, if you trust it, add "
        f"{' '.join(words)}"
    )


def _runs_of_command(
    command: str, overrides: Sequence[str], config_dir: str | None
) -> Iterator[tuple[Path, Path]]:
    """Yields the `output_dir` and the directory of each run that a command names."""
    words = naming_overrides(overrides)
    swept = any(override.is_sweep_override() for override in parse_overrides(words))
    for choice in sweep_choices(words, config_dir) if swept else [words]:
        config = compose_settings(choice, config_dir).config
        output_dir = Path(config.output_dir)
        name_run(command, config, given_keys(choice))
        yield output_dir, (Path(config.output_dir) / str(config.run_name)).resolve()
