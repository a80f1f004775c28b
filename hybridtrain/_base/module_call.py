"""A replacement of what calling a module does, which neither copies nor pickles of it contain."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class ModuleCall:
    """What calling a module does instead of running its hooks and forward; see `replace_call`.

    Does not hold the module, which holds this: a deleted model is freed at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module."""
        module = self._module()
        assert module is not None
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leaves a copy of the module without this; parametrized modules copy all they hold."""

    def __reduce__(self) -> Any:
        """Leaves a pickle of the module without this, for the same reason."""
        return type(None), ()
