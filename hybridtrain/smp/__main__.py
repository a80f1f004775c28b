"""Runs an unchanged script for smp 1.x.

    torchrun --standalone --nproc-per-node 2 -m hybridtrain.smp train.py --its-arguments

Imports from `smdistributed.modelparallel` resolve to this package, and `SplitDataset` from
`torchnet.dataset` to this package's class, if torchnet is not installed.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hybridtrain.smp as smp
from hybridtrain.smp import microbatches


class _Names(MetaPathFinder, Loader):
    """Imports this project's modules under the names that scripts use.

    A finder, and not only entries of `sys.modules`, because libraries look for the names with
    `importlib.util.find_spec`, which needs a module's `__spec__`.
    """

    def __init__(self) -> None:
        self.modules = {"smdistributed.modelparallel.torch": smp.__name__}
        self.packages = {"smdistributed", "smdistributed.modelparallel"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.packages:
            return ModuleSpec(fullname, self, is_package=True)
        own = self._own_name(fullname)
        spec = None if own is None else importlib.util.find_spec(own)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        own = self._own_name(module.__name__)
        if own is None:
            module.__version__ = smp.__version__  # type: ignore[attr-defined]
        else:  # the import returns what is in `sys.modules` now
            sys.modules[module.__name__] = importlib.import_module(own)

    def _own_name(self, fullname: str) -> str | None:
        for name, own in self.modules.items():
            if fullname == name or fullname.startswith(f"{name}."):
                return own + fullname.removeprefix(name)
        return None


_names = _Names()


def provide_modules() -> None:
    """Makes this package importable under the names that smp scripts use."""
    if _names not in sys.meta_path:
        sys.meta_path.insert(0, _names)
        if "torchnet" not in sys.modules and importlib.util.find_spec("torchnet") is None:
            _names.packages.add("torchnet")
            _names.modules["torchnet.dataset"] = microbatches.__name__


def main() -> None:
    """Runs the script from the command line with its arguments."""
    del sys.argv[0]
    if not sys.argv:
        sys.exit("usage: torchrun ... -m hybridtrain.smp <script> [arguments]")
    provide_modules()
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
