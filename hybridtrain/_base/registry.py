"""Packages that import a module when one of its names is first used.

A package with many plug-ins (models, data sets, callbacks, trackers) would import them all for the
one that a run uses. Such a package lists its names in two places: as imports under `TYPE_CHECKING`,
for type checkers and editors, and as paths for `import_on_first_use`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """A package with names that are imported on first use."""

    _paths: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        path = vars(self).get("_paths", {}).get(name)
        if path is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return pkgutil.resolve_name(path)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets each module as an attribute of its package when it is imported, where it would
        # hide a function of the same name: `datasets.imdb` is the function
        if not (name in self._paths and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._paths})


def import_on_first_use(package: str, paths: Iterable[str]) -> None:
    """Makes objects attributes of a package, whose modules are imported when they are first used.

    Args:
        package: the package's `__name__`.
        paths: of the objects, as `module:name`.
    """
    module = sys.modules[package]
    vars(module)["_paths"] = {path.partition(":")[2]: path for path in paths}
    module.__class__ = _Package
