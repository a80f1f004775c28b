"""Registries of plug-ins: the classes of a package, imported on first use."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from typing import Any


def on_first_use(package: str, name: str, paths: Iterable[str]) -> Any:
    """Returns the object called `name` among `paths`, for the `__getattr__` of a package.

    Args:
        package: the name of the package.
        name: the attribute to look up.
        paths: the objects, as `module:name`.

    Raises:
        AttributeError: no object has this name.
    """
    for path in paths:
        if path.endswith(f":{name}"):
            return pkgutil.resolve_name(path)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
