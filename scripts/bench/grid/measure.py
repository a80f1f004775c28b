"""Measured cells: one launch for each, whose outcome is kept before the next one starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from scripts.bench.grid.cells import Cell, stage_layers
from scripts.bench.grid.predict import Predictor
from scripts.bench.grid.results import ERROR, MEMORY, TIMEOUT, Outcome, Results

Task = Mapping[str, Any]

# Runs a task, and returns the time of its step or why there is none.
Launch = Callable[[Cell, Task], Outcome]

TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone "
TORCHRUN += "--nproc-per-node {ntasks}"

# Seconds that the processes of a cell have to end when they are told to.
_PATIENCE = 20
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|Signal 9 \(SIGKILL\)")
_ERROR = re.compile(
    r"^(?:\[rank\d+\]:)?\s*(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.*)$", re.MULTILINE
)


def emulated_task(predictor: Predictor, cell: Cell, steps: int, step_s: float) -> Task:
    """Returns the task of devices that sleep for the predicted times of their stages.

    All times of a cell are stretched, so that its step takes about `step_s` seconds: then what the
    engine takes is as small a part of it as on a device that is so much slower.
    """
    return {
        **_task("emulated", predictor, cell, steps),
        "stage_ms": predictor.stage_ms(cell),
        "stretch": step_s * 1e3 / predictor.emulated_ms(cell),
    }


def real_task(predictor: Predictor, cell: Cell, steps: int, overrides: Sequence[str]) -> Task:
    """Returns the task of training steps on this machine's devices."""
    return {
        **_task("real", predictor, cell, steps),
        "layers": stage_layers(predictor.layers, cell.nb_part),
        "overrides": list(overrides),
    }


def _task(kind: str, predictor: Predictor, cell: Cell, steps: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "cell": asdict(cell),
        "nb_part": cell.nb_part,
        "schedule": predictor.schedule,
        "steps": steps,
    }


def why_not_here(cell: Cell) -> str:
    """Returns why this machine cannot run a cell; an empty string on a CPU, which has no limit."""
    gpus = torch.cuda.device_count()
    return f"this machine has {gpus} GPUs" if 0 < gpus < cell.devices else ""


def measure(
    cells: Iterable[Cell],
    why_impossible: Callable[[Cell], str],
    task_of: Callable[[Cell], Task],
    launch: Launch,
    results: Results,
    retry: bool = False,
) -> list[Outcome]:
    """Returns the outcomes of all cells, and runs those that have none yet.

    Args:
        cells: the grid.
        why_impossible: cells for which it gives a reason are not run.
        task_of: returns what the processes of a cell are told.
        launch: runs a task.
        results: what is known; each outcome is added when it is there.
        retry: run cells again that have failed.
    """
    outcomes = []
    bar = tqdm(list(cells), unit="cell")
    for cell in bar:
        bar.set_description(str(cell))
        if reason := why_impossible(cell):
            outcomes.append(Outcome(cell, reason=reason))
            continue
        task = task_of(cell)
        outcome = results.get(task)
        if outcome is None or (retry and outcome.failure):
            outcome = launch(cell, task)
            results.add(task, outcome)
        outcomes.append(outcome)
    return outcomes


def launch_cell(
    cell: Cell,
    task: Task,
    logs: Path,
    timeout_s: float,
    launcher: str = TORCHRUN,
    devices_per_node: int = 4,
) -> Outcome:
    """Runs a task in processes of its own and returns its outcome; errors are outcomes too.

    Args:
        cell: the configuration.
        task: what `worker.py` is told.
        logs: the folder for what the processes write.
        timeout_s: after so many seconds they are ended.
        launcher: the command that starts Python in `{ntasks}` processes on `{nodes}` nodes.
        devices_per_node: of these nodes.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{task['kind']}-{'-'.join(str(value) for value in asdict(cell).values())}.log"
    nodes = -(-cell.devices // devices_per_node)
    words = shlex.split(launcher.format(ntasks=cell.ntasks, nodes=nodes))
    # in `logs`, which all nodes can see
    with tempfile.TemporaryDirectory(dir=logs) as folder, log.open("w", encoding="utf-8") as output:
        result = Path(folder) / "result.json"
        command = [*words, "-m", "scripts.bench.grid.worker", json.dumps(task), str(result)]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment()
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Outcome(cell, failure=TIMEOUT, reason=f"took more than {timeout_s:g} s")
        finally:
            _end(process)
        if status == 0 and result.exists():
            found = json.loads(result.read_text(encoding="utf-8"))
            return replace(Outcome(cell), **found)
    return _failed(cell, status, log)


def _environment() -> dict[str, str]:
    """Returns this environment; on a CPU each device is one thread."""
    threads = {} if torch.cuda.device_count() else {"OMP_NUM_THREADS": "1"}
    return {**threads, **os.environ}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, which ends its processes."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failed(cell: Cell, status: int, log: Path) -> Outcome:
    """Returns the outcome of a launch that has failed, with the first error of its log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [f"{name}: {said}" for name, said in _ERROR.findall(text)]
    failure = MEMORY if _OUT_OF_MEMORY.search(text) else ERROR
    reason = errors[0] if errors else f"exit status {status}"
    return Outcome(cell, failure=failure, reason=f"{reason[:200]} (log: {log.name})")
