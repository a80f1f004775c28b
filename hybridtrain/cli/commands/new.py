"""The command `new`: creates a small working project as a starting point."""

from __future__ import annotations

import keyword
import re
import shutil
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from hybridtrain.errors import ConfigError


def new(arguments: Sequence[str]) -> int:
    """Creates a small working project and prints the next commands; returns the exit code.

    Args:
        arguments: the path of its folder; the folder's name becomes the package's name.

    Raises:
        ConfigError: the name is not a valid package name, or the folder is not empty or not
            writable.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("usage: hybridtrain new <folder>")
    folder = Path(arguments[0])
    name = folder.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"{name} is not a valid Python package name: use letters, digits and _ only, such as "
            f"{re.sub(r'[^0-9a-zA-Z]+', '_', name).strip('_').lower() or 'my_project'}"
        )
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} already exists and is not empty")
        _write(folder, name)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    print(
        f"Created the project {folder}. To train its model:\n"
        f"    cd {folder}\n"
        f"    hybridtrain recipe=recipes/first.yaml"
    )
    return 0


def _write(folder: Path, name: str) -> None:
    with as_file(files("hybridtrain.cli.commands").joinpath("template")) as template:
        for source in sorted(path for path in template.rglob("*") if path.is_file()):
            inner = str(source.relative_to(template)).removesuffix(".txt")
            path = folder / inner.replace("package", name, 1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source.read_text(encoding="utf-8").format(name=name), encoding="utf-8")
    with as_file(files("hybridtrain.configs").joinpath("schema.json")) as schema:
        shutil.copy(schema, folder / "schema.json")  # editors complete keys with it
