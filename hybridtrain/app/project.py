"""The packages that a user allows for a whole project, in its `pyproject.toml`.

    [tool.hybridtrain]
    allow_targets = ["my_project"]

Only the file in the working directory counts: it is trusted by whoever works there, as pytest's
`conftest.py` is. A recipe and a run directory may be a stranger's, and bring none along.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from hybridtrain.app.compose import given_keys
from hybridtrain.errors import ConfigError
from hybridtrain.launch.environment import detect

_KEY = "allow_targets"


def with_allowed_packages(overrides: Sequence[str]) -> list[str]:
    """Returns `overrides` with the project's `allow_targets`, unless they have their own.

    Rank 0 says which packages these are.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or lies among runs.
    """
    packages = [] if _KEY in given_keys(overrides) else _allowed(Path("pyproject.toml"))
    if not packages:
        return list(overrides)
    listed = ",".join(packages)
    here = Path.cwd()
    if any((folder / "overrides.yaml").exists() for folder in (here, *here.parents)) or any(
        here.glob("*/overrides.yaml")
    ):
        raise ConfigError(
            f"pyproject.toml allows code of {listed}, which does not count in a directory of runs: "
            f"call the command in the folder of your project, or add {_KEY}=[{listed}] to it"
        )
    if detect(os.environ).rank == 0:
        print(f"{_KEY}=[{listed}], as pyproject.toml says", file=sys.stderr, flush=True)
    return [*overrides, f"{_KEY}=[{listed}]"]


def _allowed(path: Path) -> list[str]:
    """Returns the packages that the file allows; none, if there is no file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    table = content.get("tool", {}).get("hybridtrain", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [tool.hybridtrain] must be a table, and not {table}")
    if unknown := sorted(set(table) - {_KEY}):
        raise ConfigError(f"{path}: [tool.hybridtrain] has {_KEY} only, and not {unknown[0]}")
    packages = table.get(_KEY, [])
    if not isinstance(packages, list) or not all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in packages
    ):
        raise ConfigError(
            f"{path}: {_KEY} of [tool.hybridtrain] must be a list of packages, such as "
            f'["my_project"], and not {packages}'
        )
    return packages
