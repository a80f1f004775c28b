"""Several processes for a test: torchrun on a worker script, many small cells in one launch.

A worker script registers cells, named after what they check, and runs them all:

    cells = Cells()

    @cells.add("the gradients are equal on all ranks")
    def _(world): ...

    if __name__ == "__main__":
        cells.main(sys.argv[1])

Its test module launches it once and has one test a cell:

    results = launched(SCRIPT, nproc=2)

    @pytest.mark.parametrize("cell", cells_of(SCRIPT))
    def test_two_processes(cell, results):
        results.check(cell)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def torchrun(
    nproc: int, script: str | Path, *args: object, timeout: float = 100, ok: bool = True
) -> str:
    """Runs `script` in `nproc` processes of this machine and returns all their output.

    Fails, showing the output, if the exit status is not zero (with `ok=False`: if it is), or if
    `timeout` seconds were not enough.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), str(script), *map(str, args)]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "COV_"))
    }
    process = subprocess.Popen(
        command,
        env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers
        try:
            output, _ = process.communicate(timeout=35)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
        pytest.fail(f"{script} hangs: not done after {timeout} s\n{output}", pytrace=False)
    if (process.returncode == 0) is not ok:
        pytest.fail(f"{script} ended with {process.returncode}\n{output}", pytrace=False)
    return output


class Cells:
    """The cells of a worker script, in order."""

    def __init__(self) -> None:
        self.cells: dict[str, Callable[[Any], None]] = {}

    def add(self, name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Registers the decorated function, which every rank calls with its world."""

        def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
            assert name not in self.cells
            self.cells[name] = function
            return function

        return register

    def main(self, folder: str) -> None:
        """Runs all cells on this rank and writes down what became of each."""
        from hybridtrain.world import World

        world = World.from_env(devices="cpu", timeout_s=30)
        outcome: dict[str, str] = {}
        for name, function in self.cells.items():
            try:
                function(world)
                outcome[name] = "passed"
            except (Exception, pytest.fail.Exception):  # the latter is no Exception
                outcome[name] = traceback.format_exc()
            (Path(folder) / f"rank{world.rank}.json").write_text(json.dumps(outcome))
        world.gather(None)  # nobody leaves before the last one is done
        world.close()


class Results:
    """What became of each cell on each rank."""

    def __init__(self, folder: Path, nproc: int, output: str) -> None:
        self.output = output
        self.ranks = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(nproc)]

    def check(self, cell: str) -> None:
        """Fails with the traceback of the first rank on which `cell` failed."""
        for rank, outcome in enumerate(self.ranks):
            found = outcome.get(cell, "was not reached")
            if found != "passed":
                pytest.fail(f"on rank {rank}:\n{found}", pytrace=False)


def launched(script: Path, nproc: int) -> Any:
    """A module's fixture that launches `script` once."""

    @pytest.fixture(scope="module")
    def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
        folder = tmp_path_factory.mktemp("cells")
        return Results(folder, nproc, torchrun(nproc, script, folder))

    return results


def cells_of(script: Path) -> Sequence[str]:
    """The names of the cells of a worker script, which is imported for it."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.cells.cells)
