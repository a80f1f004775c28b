"""Runs an unchanged script for smp 1.x.

    torchrun --standalone --nproc-per-node 2 -m hybridtrain.smp train.py --its-arguments

Imports from `smdistributed.modelparallel` resolve to this package, and `SplitDataset` from
`torchnet.dataset` to this package's class, if torchnet is not installed.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import hybridtrain.smp as smp
from hybridtrain.smp import microbatches


def provide_modules() -> None:
    """Makes this package importable under the names that smp scripts use."""
    package = smp.__name__
    library: Any = types.ModuleType("smdistributed")
    library.modelparallel = types.ModuleType("smdistributed.modelparallel")
    library.modelparallel.torch = smp
    library.modelparallel.__version__ = smp.__version__
    sys.modules |= {
        library.__name__: library,
        library.modelparallel.__name__: library.modelparallel,
    }
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            sys.modules[f"smdistributed.modelparallel.torch{name.removeprefix(package)}"] = module
    if "torchnet" not in sys.modules and importlib.util.find_spec("torchnet") is None:
        torchnet: Any = types.ModuleType("torchnet")
        torchnet.dataset = microbatches
        sys.modules |= {"torchnet": torchnet, "torchnet.dataset": microbatches}


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
