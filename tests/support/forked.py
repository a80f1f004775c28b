"""Processes of a worker script, forked from one that has imported PyTorch and hybridtrain.

They have torchrun's environment without its agent. A process of their own would need seconds for
its imports, in each of the many launches; `launch.torchrun_script` is the real thing.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from hybridtrain.launch import free_port

PRELOADED = [
    *("torch", "torch._dynamo", "pytest"),
    *("hybridtrain.loop.trainer", "hybridtrain.smp", "hybridtrain.cli.command_line"),
    *("hybridtrain.cli.commands.train", "torchmetrics"),
]

# How long the others have to end by themselves after one has failed.
PATIENCE_S = 60.0


def run(
    nproc: int, script: Path, arguments: Sequence[str], env: Mapping[str, str], timeout: float
) -> tuple[int | None, str]:
    """Runs `script` in `nproc` processes that can talk to each other.

    Args:
        nproc: how many.
        script: run as `__main__`, with `arguments`.
        arguments: of the command line; the first one is a folder, for the output.
        env: the environment, but for the variables that a launcher sets.
        timeout: seconds.

    Returns:
        the exit status of the first process that has failed, 0 if none has, None after `timeout`;
        and the output of all.
    """
    output = Path(arguments[0]) / "output.txt"
    with together(nproc, script, arguments, env, [output] * nproc) as processes:
        status = _wait(processes, time.monotonic() + timeout)
    return status, output.read_text(errors="replace") if output.exists() else ""


@contextmanager
def together(
    nproc: int, script: Path, arguments: Sequence[str], env: Mapping[str, str], outputs: list[Path]
) -> Iterator[list[BaseProcess]]:
    """Starts what `run` runs, with a file for the output of each process; ends them after it."""
    port = free_port()
    processes: list[BaseProcess] = []
    try:
        for rank, output in enumerate(outputs):
            launched = {
                **env,
                **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
                **{name: str(nproc) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            processes.append(start(script, arguments, launched, output))
        yield processes
    finally:
        end(processes)


def start(
    script: Path, arguments: Sequence[str], env: Mapping[str, str], output: Path
) -> BaseProcess:
    """Starts `script` in one process, with all of its environment; `end` has to follow."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _environment(env):  # PyTorch reads the number of threads when it is imported
        forkserver.ensure_running()
    process = context.Process(target=_main, args=(script, arguments, env, output))
    process.start()
    return process


def end(processes: Iterable[BaseProcess]) -> None:
    """Ends what is left of the processes, with their children, such as a loader's workers."""
    for process in processes:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # if it has no group yet
        process.join()


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait(processes: Sequence[BaseProcess], end: float) -> int | None:
    """Waits for all, up to `end`, and for a while after a failure."""
    failed: int | None = None
    while alive := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in alive], timeout=max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes if process.exitcode]
        if codes and failed is None:
            failed, end = codes[0], min(end, time.monotonic() + PATIENCE_S)
        if time.monotonic() >= end:
            return failed
    return failed or next((p.exitcode for p in processes if p.exitcode), 0)


def _main(script: Path, arguments: Sequence[str], env: Mapping[str, str], output: Path) -> None:
    """Runs in the new process, which ends as an interpreter does."""
    gc.freeze()  # no collection looks through what was imported
    os.setsid()
    # else each data worker would import PyTorch, in a fork server of this process's own
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    with output.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        threading._shutdown()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
