"""The lock of a run directory: allows one writer, names it, and detects when it is dead.

    <run directory>/run.lock      a line of JSON: host, process, time, job

An exclusive `link`, which is atomic on NFS too, creates the file. Its owner touches it every
`BEAT_S` seconds. An owner is dead if

- it was on this host, and its process is gone or has another start time; or
- nobody has touched the file for `STALE_S` seconds; or
- it was an earlier attempt of the same job, which torchrun or Slurm has restarted.

Only the process that holds its guard may replace or remove a lock file. The guard is a second lock
file next to it, named after the current owner. If several processes find the owner dead, only one
of them gets the lock, and none removes the file of a new owner. If the holder of a guard is dead,
another process takes over the guard in the same way.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from uuid import uuid4

from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.errors import UserError
from hybridtrain.launch import ProcessId, has_ended, is_seen_from_here, this_process
from hybridtrain.world import World

_log = logging.getLogger(__name__)

BEAT_S = 20.0
STALE_S = 120.0


_held: set[str] = set()
"""The keys of the locks that this process holds."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as stored in the file.

    Attributes:
        host, pid, began, namespace: see `ProcessId`; `began` is its `started`.
        job: the Slurm or torchrun job, or "".
        attempt: the attempt of that job, or 0.
        since: the time when the process took the lock.
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

    @property
    def process(self) -> ProcessId:
        """The process itself."""
        return ProcessId(self.host, self.pid, self.began, self.namespace)

    def __str__(self) -> str:
        if not self.key:
            return "an unknown process (the lock is damaged)"
        job = f", {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class RunLock:
    """The right to write to the run directory `folder`; a context manager.

    Rank 0 of a run acquires it. Threads and processes that it starts do not. The module's docstring
    describes the protocol.
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
        holder = _read(self.path)
        if holder is not None and self._reason_to_take_over(self.path, holder) is None:
            raise UserError(self._refusal(holder))

    def acquire(self) -> None:
        """Takes the lock, also from a dead owner, which it logs.

        Raises:
            UserError: another process holds the lock; the message names it.
        """
        owner = _this_owner()
        _held.add(owner.key)
        try:
            self._take(self.path, owner)
        except OSError as error:
            _held.discard(owner.key)
            raise UserError(f"cannot lock the run directory {self.folder}: {error}") from error
        except UserError:
            _held.discard(owner.key)
            raise
        self._owner = owner
        threading.Thread(target=self._keep_fresh, name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Releases the lock, if this object holds it."""
        self._released.set()
        owner, self._owner = self._owner, None
        if owner is None:
            return
        guard = _guard(self.path, owner)
        try:
            # if the guard exists, another process found this one dead and is taking over
            if self._create(guard, owner):
                if _is_of(self.path, owner):
                    self.path.unlink()
                guard.unlink()
        except OSError as error:  # the directory may have vanished
            _log.debug("cannot remove %s: %s", self.path, error)
        _held.discard(owner.key)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, path: Path, owner: Owner) -> None:
        """Makes `owner` the owner of the lock file `path`, replacing a dead one.

        Raises:
            UserError: the current owner may be writing.
        """
        while not self._create(path, owner):
            holder = _read(path)
            if holder is None:
                continue  # released in the meantime
            reason = self._reason_to_take_over(path, holder)
            if reason is None:
                raise UserError(self._refusal(holder))
            guard = _guard(path, holder)
            self._take(guard, owner)
            try:
                if _is_of(path, holder):
                    _log.warning("took over %s from %s: %s", self.folder, holder, reason)
                    temporary = self._beside()
                    temporary.write_text(_to_text(owner))
                    os.replace(temporary, path)
                    return
            finally:
                guard.unlink(missing_ok=True)

    def _create(self, path: Path, owner: Owner) -> bool:
        """Creates the file and its content atomically; returns False if it exists."""
        temporary = self._beside()
        try:
            temporary.write_text(_to_text(owner))
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                with open(path, "x") as file:
                    file.write(_to_text(owner))
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)

    def _reason_to_take_over(self, path: Path, holder: Owner) -> str | None:
        """Returns why `holder` can no longer be writing; None: it may be."""
        here = _this_owner()
        if holder.process == here.process:
            return None if holder.key in _held else "this process has ended that run"
        if is_seen_from_here(holder.process):
            return "that process is gone" if has_ended(holder.process) else None
        if holder.job and holder.job == here.job and holder.attempt < here.attempt:
            return "this is a later attempt of the same job"
        try:
            untouched = self._now() - path.stat().st_mtime
        except OSError:
            return None
        return f"no heartbeat for {untouched:.0f} s" if untouched > STALE_S else None

    def _now(self) -> float:
        """Returns the file system's time, which may differ from this host's clock."""
        probe = self._beside()
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            probe.unlink(missing_ok=True)

    def _refusal(self, holder: Owner) -> str:
        if not holder.key:
            return (
                f"{self.path} is damaged, so another run may be writing there: if none is, remove "
                f"it or wait {STALE_S:.0f} s; otherwise set another run_name="
            )
        elsewhere = holder.host != socket.gethostname()
        wait = f" (if that process is dead, wait {STALE_S:.0f} s, or remove {self.path})"
        return (
            f"another run is writing to {self.folder}: {holder}. Wait until it ends, or set "
            f"another run_name={wait if elsewhere else ''}"
        )

    def _beside(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{uuid4().hex}")

    def _keep_fresh(self) -> None:
        while not self._released.wait(BEAT_S):
            owner, holder = self._owner, _read(self.path)
            if owner is None:
                return
            if holder is not None and holder.key != owner.key:
                _log.error(
                    "%s took over %s from this process: end one of them", holder, self.folder
                )
                return
            try:
                os.utime(self.path)
            except OSError as error:
                _log.debug("cannot touch %s: %s", self.path, error)


def _guard(path: Path, holder: Owner) -> Path:
    """Returns the guard: its owner may replace or remove `path` while `holder` owns it."""
    return path.with_name(f".{path.name.lstrip('.')}.after-{holder.key or 'damaged'}")


def _is_of(path: Path, owner: Owner) -> bool:
    holder = _read(path)
    return holder is not None and holder.key == owner.key


def _to_text(owner: Owner) -> str:
    return json.dumps(asdict(owner)) + "\n"


def _read(path: Path) -> Owner | None:
    """Returns the owner in the file; None: there is no file, or a process is writing it."""
    try:
        content = json.loads(path.read_text())
        return Owner(**{field.name: content[field.name] for field in fields(Owner)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # damaged, by a full disk or a person: no known owner
        return Owner("?", -1, "", "?", "", 0, "?", "")


def _this_owner() -> Owner:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return Owner(*this_process(), *_job(os.environ), since, uuid4().hex)


def _job(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the job of this process and its attempt; torchrun's if it runs within Slurm's."""
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    requeues = int(environ.get("SLURM_RESTART_COUNT") or 0)
    # torchrun's default id is "none"
    if (
        run := environ.get("TORCHELASTIC_RUN_ID", "none")
    ) != "none" and "SLURM_JOB_ID" not in environ:
        return f"torchrun {run}", restarts
    if slurm := environ.get("SLURM_JOB_ID"):
        return f"Slurm job {slurm}", requeues * 1000 + restarts
    return "", 0


@contextmanager
def writing(directory: RunDirectory, world: World) -> Iterator[None]:
    """Creates the run directory and locks it until the end of the block.

    Raises:
        ConfigError: the directory is not writable.
        UserError: another process holds the lock.
    """
    directory.create()
    lock = RunLock(directory.path)
    world.on_main(lock.acquire)
    try:
        yield
    finally:
        lock.release()
