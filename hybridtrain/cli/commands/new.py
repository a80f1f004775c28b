"""The command `new`: a small project that works, to begin one's own with."""

from __future__ import annotations

import keyword
import re
import shutil
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from hybridtrain.errors import ConfigError


def new(arguments: Sequence[str]) -> int:
    """Writes a small project that works, and says what to do with it; returns the exit code.

    Args:
        arguments: the path of its folder, whose name is that of its package.

    Raises:
        ConfigError: the name is not that of a package, there is something already, or the folder
            cannot be written.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("usage: hybridtrain new <folder>")
    folder = Path(arguments[0])
    name = folder.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"{name} cannot be the name of a Python package: letters, digits and _ only, such as "
            f"{re.sub(r'[^0-9a-zA-Z]+', '_', name).strip('_').lower() or 'my_project'}"
        )
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is there already, and not empty")
        _write(folder, name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    print(
        f"{folder} is a project. To train it:\n"
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
        shutil.copy(schema, folder / "schema.json")  # for editors, which complete the keys by it
