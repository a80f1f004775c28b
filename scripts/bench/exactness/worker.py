"""One process of a cell: trains a case with a system, and writes what it has at the end.

torchrun --nproc-per-node 4 -m scripts.bench.exactness.worker pipelining dropout plain FOLDER
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from scripts.bench.exactness.cases import CASES, RECORDER
from scripts.bench.exactness.systems import SYSTEMS


def main(system: str, case: str, way: str, folder: str) -> None:
    """Trains the case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    trained = SYSTEMS[system].train(CASES[case], way == "remedy")
    result = {"values": trained.values, "replica": trained.replica, "masks": RECORDER.masks}
    torch.save(result, Path(folder) / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
