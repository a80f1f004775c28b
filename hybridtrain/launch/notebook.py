"""Runs a function in several processes, from a notebook or a script.

The processes are new interpreters, because a fork of a kernel that has threads or has used CUDA is
unsafe. cloudpickle sends the function, its arguments and the definitions of notebook cells that
they use.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridtrain._base.files import write_atomically
from hybridtrain.errors import ConfigError, ProcessFailedError
from hybridtrain.launch.environment import free_port
from hybridtrain.launch.process_id import end_with_parent
from hybridtrain.launch.signals import signal_name

# How long the other processes have to end when one has failed, and after a signal.
_GRACE_S = 15.0
_CHILD = "from hybridtrain.launch.notebook import run_child; run_child()"
# With variables of an outer launcher a child would take itself for one of that launcher's
# processes.
_FOREIGN = ("TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_", "MASTER_")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 1,
    nb_part: int = 1,
    *,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Calls `function(*args)` in each of `num_processes` new processes on this machine.

    The processes are set up as under torchrun, so `World.from_env()`, `Session()` and code on top
    of them work. Their output appears here, prefixed by the rank except for rank 0. The launcher
    can be called repeatedly. It forwards an interrupt, so that a `Trainer` saves first.

    Args:
        function: the function, which may be defined in a cell; later changes in other cells do not
            reach it.
        args: the arguments of the function; cloudpickle sends them too.
        num_processes: the number of processes.
        nb_part: the default `nb_part` of `World.from_env()` and `Session()`.
        env: additional environment variables.

    Returns:
        the result of `function` on rank 0.

    Raises:
        ProcessFailedError: a process failed; the message has its traceback.
        ConfigError: an argument is invalid, or cloudpickle cannot send an object.
    """
    if not callable(function):
        raise ConfigError(
            f"function= must be a function, not {function!r:.100}: pass the function without "
            "calling it, such as notebook_launcher(train, args=(2,))"
        )
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigError(
            f"args= must be a tuple of the function's arguments, not {args!r:.100}: for a single "
            "argument use args=(value,)"
        )
    for name, value in (("num_processes", num_processes), ("nb_part", nb_part)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value} must be a whole number of at least 1")
    with tempfile.TemporaryDirectory(prefix="hybridtrain-") as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(dumped((function, tuple(args)), "function= and args="))
        # Once for all ranks: the port in it must be the same.
        variables = {**_environment(num_processes, nb_part), **(env or {})}
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_processes):
                child = subprocess.Popen(
                    [sys.executable, "-c", _CHILD, name],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that only this process forwards an interrupt
                )
                children.append(child)
            failed = _follow(children)
        finally:
            for child in children:
                if child.poll() is None:
                    # By SIGKILL: the grace period is over, or this process is being interrupted for
                    # the second time.
                    child.kill()
                # Reaps it: a kernel lives long, and each zombie would keep a process ID.
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()
        _raise_first_failure(folder, children, failed)
        result = folder / "result.pkl"
        if not result.exists():
            raise ProcessFailedError(
                f"rank 0 of {num_processes} exited with code 0 before function= returned, for "
                "example by os._exit(0); its output is above"
            )
        return pickle.loads(result.read_bytes())


def run_child() -> None:
    """Calls the function in a process that `notebook_launcher` has started.

    Writes its result or its error to the folder `sys.argv[1]`.
    """
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    end_with_parent(always=True)
    try:
        function, args = pickle.loads((folder / "call.pkl").read_bytes())
        result = function(*args)
        if rank == 0:
            write_atomically(folder / "result.pkl", dumped(result, "the result of the function"))
    except BaseException as error:
        # reported to the notebook before the other processes notice and fail as well
        report = {
            "rank": rank,
            # The clock of this machine, which all children share: the earliest report is the cause
            # of the others.
            "time": time.time(),
            "summary": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
        }
        # Atomic, because the launcher may kill this process meanwhile, and then reads all reports.
        write_atomically(folder / f"error{rank}.pkl", pickle.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without waiting for threads or other processes


def dumped(value: Any, what: str) -> bytes:
    """Returns `value` pickled by cloudpickle.

    Raises:
        ConfigError: it cannot be pickled, or cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("notebook_launcher needs cloudpickle: pip install cloudpickle") from None
    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to another process: {error}. Create a World, Session or "
            "HybridModel, and open files, inside the function"
        ) from error
    return content


def _environment(num_processes: int, nb_part: int) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    if num_processes > 1:
        inherited.setdefault("OMP_NUM_THREADS", "1")  # like torchrun
    return {
        **inherited,
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HYBRIDTRAIN_NB_PART": str(nb_part),
        "PYTHONUNBUFFERED": "1",
        # modules in the notebook's folder
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _follow(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Shows the children's output until all have ended; forwards an interrupt.

    Returns:
        the rank that failed first, before others were stopped, or None.
    """
    incomplete_lines = [b""] * len(children)
    failed: int | None = None
    deadline: float | None = None
    interrupted = False
    with selectors.DefaultSelector() as selector:
        for rank, child in enumerate(children):
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ, rank)
        while True:
            try:
                # polled first, so that the output of an ended child is read below
                codes = [child.poll() for child in children]
                running = None in codes
                if failed is None:
                    failed = next((rank for rank, code in enumerate(codes) if code), None)
                events = selector.select(timeout=0.2) if running or selector.get_map() else []
                if not running and not events:
                    break  # a process started by a child may keep the output open
                for key, _ in events:
                    rank = key.data
                    read = os.read(key.fd, 65536)
                    *lines, incomplete_lines[rank] = (incomplete_lines[rank] + read).split(b"\n")
                    if not read:
                        selector.unregister(key.fileobj)
                        lines += [incomplete_lines[rank]] if incomplete_lines[rank] else []
                        incomplete_lines[rank] = b""
                    _show(rank, lines)
                # After a failure the other processes can still end by themselves and report; they
                # would wait forever in a collective otherwise.
                if deadline is None and (failed is not None or not running):
                    deadline = time.monotonic() + _GRACE_S
                if deadline is not None and time.monotonic() > deadline:
                    break
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                # Twice, because a `Trainer` finishes its step and saves first.
                deadline = time.monotonic() + 2 * _GRACE_S
                for child in children:
                    if child.poll() is None:
                        child.send_signal(signal.SIGINT)
    for rank, incomplete in enumerate(incomplete_lines):
        _show(rank, [incomplete] if incomplete else [])
    if interrupted:
        raise KeyboardInterrupt
    return failed


def _show(rank: int, lines: Sequence[bytes]) -> None:
    head = "" if rank == 0 else f"[rank {rank}] "
    for line in lines:
        sys.stdout.write(f"{head}{line.decode(errors='replace')}\n")
    sys.stdout.flush()


def _raise_first_failure(
    folder: Path, children: Sequence[subprocess.Popen[bytes]], failed: int | None
) -> None:
    """Raises the error of the process that failed first: the earliest report, or else `failed`."""
    reports = [pickle.loads(path.read_bytes()) for path in folder.glob("error*.pkl")]
    if reports:
        # Not the first in the order of exit codes: a process that fails because of another one may
        # end earlier.
        first = min(reports, key=lambda report: report["time"])
        raise ProcessFailedError(
            f"{first['summary']} on rank {first['rank']} of {len(children)}\n\n{first['traceback']}"
        )
    if failed is not None:
        code = children[failed].returncode
        reason = f"exit code {code}" if code > 0 else f"signal {signal_name(-code)}"
        raise ProcessFailedError(
            f"rank {failed} of {len(children)} ended with {reason} and without an exception; its "
            "output is above"
        )
