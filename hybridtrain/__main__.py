"""`python -m hybridtrain`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Runs the command line; where the package is not installed, says so in one line."""
    missing = "" if find_spec("hybridtrain.recipes") else "its recipes"
    if not missing:
        try:
            from hybridtrain.cli import main as command_line
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "hybridtrain":
                raise
            missing = str(error.name)
        else:
            return command_line()
    # in a clone Python finds the package, but not what an installation adds
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(
            f"error: hybridtrain is not installed for {sys.executable} ({missing} cannot be "
            f"imported): run {sys.executable} -m pip install -e {Path(__file__).parents[1]}",
            file=sys.stderr,
        )
    return 2


sys.exit(main())
