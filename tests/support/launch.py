"""Several processes for a test: worker scripts made of cells, and the command line.

tests/README.md says what a cell is and how to add one.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import forked

TESTS = Path(__file__).parents[1]
WORKERS = TESTS / "distributed" / "workers"
COMMAND_LINE = Path(__file__).with_name("command_line.py")

# The variables of launchers and of coverage; a test that needs one sets it.
_PREFIXES = ("TORCHELASTIC_", "SLURM_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "COV_")
_NAMES = ("RANK", "WORLD_SIZE")

# A run of a few steps of the recipe `digits`, on the CPU.
SMALL = [
    "recipe=digits",
    "world.devices=cpu",
    "data.batch_size=32",
    "pipeline.chunks=4",
    "trainer.epochs=null",
    "trainer.steps=6",
    "trainer.log_every=2",
    "trainer.eval_every=4",
    "checkpoint.every_steps=2",
]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment, with the GPUs hidden or not, without a launcher's variables; one thread."""
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_PREFIXES) and key not in _NAMES
    }
    return {**own, "OMP_NUM_THREADS": "1", **(extra or {})}


def torchrun_script(
    nproc: int, script: str | Path, *args: object, timeout: float = 300, ok: bool = True
) -> str:
    """Runs `script`, which may import `support`, in `nproc` processes; returns their output.

    Fails, showing the output, if the exit status is not zero (with `ok=False`: if it is zero), or
    after `timeout` seconds.
    """
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    command = [*_torchrun(nproc), str(script), *map(str, args)]
    done = run_command(command, timeout, {"PYTHONPATH": path}, stderr=subprocess.STDOUT)
    if (done.returncode == 0) is not ok:
        pytest.fail(f"{script} ended with {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout


def single(
    args: Sequence[str], timeout: float = 300, env: Mapping[str, str] | None = None, flags: str = ""
) -> subprocess.CompletedProcess[str]:
    """`python -m hybridtrain <args>`; `flags` are the interpreter's."""
    return run_command([sys.executable, *flags.split(), "-m", "hybridtrain", *args], timeout, env)


def torchrun(
    nproc: int, args: Sequence[str], timeout: float = 300, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone --nproc-per-node <nproc> -m hybridtrain <args>`."""
    return run_command([*_torchrun(nproc), "-m", "hybridtrain", *args], timeout, env)


def forked_script(
    nproc: int, script: str, folder: Path, *args: object, timeout: float = 200
) -> tuple[int | None, str]:
    """Runs a script of `WORKERS` in forked processes; returns the status and their output."""
    arguments = [str(folder), *map(str, args)]
    return forked.run(nproc, WORKERS / script, arguments, environment(), timeout)


def forked_command(
    nproc: int, args: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> str:
    """Like `torchrun`, without its agent and its imports; returns the output, of a good end."""
    folder.mkdir(exist_ok=True)
    (folder / "output.txt").unlink(missing_ok=True)
    status, output = forked.run(nproc, COMMAND_LINE, [str(folder), *args], environment(env), 300)
    if status != 0:
        pytest.fail(f"{args} ended with {status}\n{output}", pytrace=False)
    return output


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Undoes what a run in this process did to the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.captureWarnings(False)


class Cells:
    """The cells of a worker script, in order."""

    def __init__(self) -> None:
        self.cells: dict[str, Callable[[Any], None]] = {}
        self.thorough: set[str] = set()

    def add(
        self, name: str, thorough: bool = False
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Registers the decorated function, which every rank calls with its world.

        Args:
            name: the promise.
            thorough: whether its test is marked `thorough`.
        """

        def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
            assert name not in self.cells
            self.cells[name] = function
            if thorough:
                self.thorough.add(name)
            return function

        return register

    def main(self, folder: str, *names: str) -> None:
        """Runs cells, or all of them, on this rank and writes down the outcome of each."""
        from hybridtrain.world import World

        world = World.from_env(devices="cpu", timeout_s=120)
        outcome: dict[str, str] = {}
        for name in names or self.cells:
            try:
                self.cells[name](world)
                outcome[name] = "passed"
            except (Exception, pytest.fail.Exception):  # the latter is no Exception
                outcome[name] = traceback.format_exc()
            (Path(folder) / f"rank{world.rank}.json").write_text(json.dumps(outcome))
        gc.collect()  # the threads of a model's process groups must not outlive the interpreter
        world.gather(None)  # nobody leaves before the last one is done
        # the cells' own worlds, which a hook that refers to its trainer keeps in a cycle: their
        # groups must end before the interpreter does
        gc.collect()
        world.close()


class Results:
    """The outcome of each cell on each rank."""

    def __init__(
        self, worker: str, nproc: int, folder: Path, cells: Sequence[str], timeout: float = 300
    ) -> None:
        script, arguments = WORKERS / f"{worker}.py", [str(folder), *cells]
        status, output = forked.run(nproc, script, arguments, environment(), timeout)
        if status != 0:
            ended = (
                f"hangs: not done after {timeout} s" if status is None else f"ended with {status}"
            )
            pytest.fail(f"{script} {ended}\n{output}", pytrace=False)
        self.ranks = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(nproc)]

    def check(self, cell: str) -> None:
        """Fails with the traceback of the first rank on which `cell` failed."""
        for rank, outcome in enumerate(self.ranks):
            found = outcome.get(cell, "was not reached")
            if found != "passed":
                pytest.fail(f"on rank {rank}:\n{found}", pytrace=False)


def each_cell(processes: Mapping[str, Sequence[int]]) -> pytest.MarkDecorator:
    """Parametrizes a test by the cells of worker scripts, in each of these numbers of processes.

    In all but the last number they are thorough. The test passes `worker` and `processes` to the
    fixture `launched`.
    """
    parameters = []
    for worker, counts in processes.items():
        cells = worker_module(worker).cells
        for count, cell in itertools.product(counts, cells.cells):
            thorough = cell in cells.thorough or count != counts[-1]
            marks = [pytest.mark.thorough] if thorough else []
            parameters.append(pytest.param(worker, count, cell, marks=marks))
    return pytest.mark.parametrize(("worker", "processes", "cell"), parameters)


def worker_module(worker: str) -> Any:
    """The worker script of that name, imported."""
    spec = importlib.util.spec_from_file_location(worker, WORKERS / f"{worker}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torchrun(nproc: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(nproc)]


def run_command(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None,
    stderr: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Fails, showing the output, if `command` and its children take over `timeout` seconds."""
    process = subprocess.Popen(
        command,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers
        try:
            output, errors = process.communicate(timeout=35)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        command_line = " ".join(command)
        pytest.fail(
            f"{command_line} hangs: not done after {timeout} s\n{output}{errors or ''}",
            pytrace=False,
        )
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
