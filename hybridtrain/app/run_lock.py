"""The lock of a run directory: one writer at a time, which is named, and known when it is dead.

    <run directory>/run.lock      a line of JSON: host, process, time, job

The file is made by an exclusive `link`, which is atomic on NFS too. Its owner touches it every
`BEAT_S` seconds. An owner is dead if

- it was on this host, and its process is gone or began at another time; or
- the file has not been touched for `STALE_S` seconds; or
- it was an earlier attempt of the same job, which torchrun or Slurm has started again.

A dead owner's file is renamed before it is removed, so that of two processes that find it dead only
one gets the lock.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from uuid import uuid4

from hybridtrain.errors import UserError
from hybridtrain.launch.processes import process_namespace

BEAT_S = 20.0
STALE_S = 120.0

_log = logging.getLogger(__name__)

_held: set[str] = set()
"""The keys of the locks that this process holds."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as it is written to the file.

    Attributes:
        host, pid: where it runs.
        began: when the process began, in the kernel's units; "" where that cannot be read.
        namespace: of process ids: a container's processes are not seen from another one.
        job: of Slurm or torchrun, and which attempt of it; "" and 0 without.
        since: the time of the lock.
        key: unique for each lock.
    """

    host: str
    pid: int
    began: str
    namespace: str
    job: str
    attempt: int
    since: str
    key: str

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class RunLock:
    """The right to write to the run directory `folder`; a context manager.

    Rank 0 of a run acquires it. Threads and processes that it starts do not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run.lock"
        self._owner: Owner | None = None
        self._released = threading.Event()

    def check(self) -> None:
        """Raises the error of `acquire` if it would fail now; changes nothing.

        Raises:
            UserError: another process holds the lock.
        """
        holder = self._holder()
        if holder is not None and self._reason_to_take_over(holder) is None:
            raise UserError(self._refusal(holder))

    def acquire(self) -> None:
        """Takes the lock; also that of a dead owner, with a line in the log.

        Raises:
            UserError: another process holds the lock; the message names it.
        """
        owner = _this_process()
        while not self._create(owner):
            holder = self._holder()
            if holder is None:
                continue  # released or taken over in between
            reason = self._reason_to_take_over(holder)
            if reason is None:
                raise UserError(self._refusal(holder))
            if self._remove(holder):
                _log.warning("took over %s from %s: %s", self.folder, holder, reason)
        self._owner = owner
        _held.add(owner.key)
        threading.Thread(target=self._keep_fresh, name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Gives the lock back; it may be called without a lock, and more than once."""
        self._released.set()
        if self._owner is not None:
            self._remove(self._owner)
            _held.discard(self._owner.key)
            self._owner = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _create(self, owner: Owner) -> bool:
        """Makes the file with its content in one step; returns whether there was none."""
        temporary = self._beside()
        try:
            temporary.write_text(json.dumps(asdict(owner)) + "\n")
            try:
                os.link(temporary, self.path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                with open(self.path, "x") as file:
                    file.write(json.dumps(asdict(owner)) + "\n")
            return True
        except FileExistsError:
            return False
        except OSError as error:
            raise UserError(f"cannot lock the run directory {self.folder}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _holder(self) -> Owner | None:
        return _read(self.path)

    def _remove(self, holder: Owner) -> bool:
        """Removes the file of `holder`; returns False if it is another's by now."""
        aside = self._beside()
        try:
            os.rename(self.path, aside)
        except OSError:
            return False
        found = _read(aside)
        if found is not None and found.key != holder.key:
            # a new owner's, made between our reading and our renaming
            os.rename(aside, self.path)
            return False
        aside.unlink(missing_ok=True)
        return True

    def _reason_to_take_over(self, holder: Owner) -> str | None:
        """Returns why `holder` no longer writes; None: it may."""
        here = _this_process()
        if holder.host == here.host and holder.namespace == here.namespace:
            if holder.pid == here.pid and holder.began == here.began:
                return None if holder.key in _held else "this process has ended that run"
            return None if _is_alive(holder) else "that process is gone"
        if holder.job and holder.job == here.job and holder.attempt < here.attempt:
            return "this is a later attempt of the same job"
        try:
            untouched = self._now() - self.path.stat().st_mtime
        except OSError:
            return None
        return f"it has given no sign for {untouched:.0f} s" if untouched > STALE_S else None

    def _now(self) -> float:
        """Returns the time of the file system, whose clock may differ from this host's."""
        probe = self._beside()
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            probe.unlink(missing_ok=True)

    def _refusal(self, holder: Owner) -> str:
        elsewhere = holder.host != socket.gethostname()
        wait = f" (if that one is dead, wait {STALE_S:.0f} s, or remove {self.path})"
        return (
            f"{self.folder} is being written by another run: {holder}. Wait for its end, or set "
            f"another run_name={wait if elsewhere else ''}"
        )

    def _beside(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{uuid4().hex}")

    def _keep_fresh(self) -> None:
        while not self._released.wait(BEAT_S):
            owner, holder = self._owner, self._holder()
            if owner is None:
                return
            if holder is not None and holder.key != owner.key:
                _log.error("%s was taken over by %s: end one of the two", self.folder, holder)
                return
            try:
                os.utime(self.path)
            except OSError as error:
                _log.debug("cannot touch %s: %s", self.path, error)


def _read(path: Path) -> Owner | None:
    """Returns the owner in the file; None: there is no file, or it is being written."""
    try:
        content = json.loads(path.read_text())
        return Owner(**{field.name: content[field.name] for field in fields(Owner)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # damaged, by a full disk or a person: nobody's
        return Owner("?", -1, "", "?", "", 0, "?", "")


def _this_process() -> Owner:
    job, attempt = _job(os.environ)
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_began(os.getpid()),
        namespace=process_namespace(),
        job=job,
        attempt=attempt,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        key=uuid4().hex,
    )


def _job(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the job of this process and its attempt; torchrun's, which may run in Slurm's."""
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    requeues = int(environ.get("SLURM_RESTART_COUNT") or 0)
    # torchrun's id is "none" if nobody has chosen one
    if (
        run := environ.get("TORCHELASTIC_RUN_ID", "none")
    ) != "none" and "SLURM_JOB_ID" not in environ:
        return f"torchrun {run}", restarts
    if slurm := environ.get("SLURM_JOB_ID"):
        return f"Slurm job {slurm}", requeues * 1000 + restarts
    return "", 0


def _is_alive(owner: Owner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    began = _began(owner.pid)
    return began == owner.began if began or not Path("/proc/self").exists() else False


def _began(pid: int) -> str:
    """Returns when a process began, of those that have not ended; "" where it cannot be read."""
    try:
        # the name of the program, in brackets, may hold anything
        state, *_, began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else began
