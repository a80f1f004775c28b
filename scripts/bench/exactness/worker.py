"""The processes of a cell: forked from one that has imported PyTorch and the systems.

They have torchrun's environment without its agent, whose imports would take most of the time of a
cell. Each cell has new processes, so that no cell sees what another one has left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from hybridtrain.launch import free_port

# How long the other processes have to end when one has failed.
PATIENCE_S = 5.0


def preload(modules: Iterable[str]) -> None:
    """Has the process that all others are forked from import modules, as far as it finds them."""
    names = ["torch", "torch._dynamo", __name__, "scripts.bench.exactness.systems", *modules]
    multiprocessing.get_context("forkserver").set_forkserver_preload(names)


def launch(
    system: str, case: str, way: str, count: int, folder: Path, deadline_s: float
) -> tuple[int | None, str]:
    """Trains a case with a system in `count` processes, each of which leaves a file in `folder`.

    Returns:
        the exit status of the first process that fails, 0 if none does, None after the deadline;
        and what that process has printed, or all of them.
    """
    context = multiprocessing.get_context("forkserver")
    port = str(free_port())
    processes = []
    for rank in range(count):
        env = {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
            **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "exactness"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        }
        process = context.Process(target=_run, args=(system, case, way, str(folder), env))
        process.start()
        processes.append(process)
    end = time.monotonic() + deadline_s
    failed: int | None = None
    try:
        while alive := [process for process in processes if process.is_alive()]:
            wait([process.sentinel for process in alive], timeout=max(0.0, end - time.monotonic()))
            codes = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode}
            if codes and failed is None:
                failed = next(iter(codes))
                end = min(end, time.monotonic() + PATIENCE_S)
            if time.monotonic() >= end:
                break
        if failed is None and any(process.is_alive() for process in processes):
            return None, _printed(folder, range(count))
    finally:
        for process in processes:
            _kill(process)
    if failed is None:
        return 0, _printed(folder, range(count))
    return processes[failed].exitcode, _printed(folder, [failed])


def _kill(process: BaseProcess) -> None:
    """Ends a process with its children, such as compilers."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it has no group yet
    process.join()


def _printed(folder: Path, ranks: Iterable[int]) -> str:
    files = [folder / f"output{rank}.txt" for rank in ranks]
    return "".join(file.read_text(errors="replace") for file in files if file.exists())


def _run(system: str, case: str, way: str, folder: str, env: dict[str, str]) -> None:
    """Trains in the new process, and writes what it has at the end."""
    os.setsid()
    os.environ.update(env)
    rank = env["RANK"]
    with (Path(folder) / f"output{rank}.txt").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        import torch

        from scripts.bench.exactness.cases import RECORDER
        from scripts.bench.exactness.systems import SYSTEMS

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        status = 0
        try:
            trained = SYSTEMS[system].train(SYSTEMS[system].case(case), way == "remedy")
            result = {
                "values": trained.values,
                "replica": trained.replica,
                "masks": RECORDER.masks,
            }
            torch.save(result, Path(folder) / f"rank{rank}.pt")
        except Exception:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without waiting for threads of the others' process groups
