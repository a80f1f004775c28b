"""The log of a run: a file for each process, and the terminal of rank 0."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from hybridtrain.app.keys import with_config_keys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Lines that are in the file only: the terminal has them from `Progress`.
_FILE_ONLY = "hybridtrain.progress"


def _use_own_lock() -> None:
    """Gives tqdm, through which the terminal's lines go, a lock of this process alone.

    Its own one is shared with forked processes: a worker of a DataLoader that is killed while it
    holds it would stop this process at the next line of its log.
    """
    tqdm.set_lock(threading.RLock())


_use_own_lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_use_own_lock)  # another thread may hold the parent's


class RunLog:
    """Sends the log of this process to `folder`, once it is there, and on rank 0 to the terminal.

    What is logged before is kept, so that a run that fails early leaves no folder, and the log of
    another has its first lines too.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank_{rank:03d}.log"
        self._early: MemoryHandler | None = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        for handler in list(root.handlers):
            root.removeHandler(handler)
        self._early.addFilter(_name_config_keys)
        root.addHandler(self._early)
        if rank == 0:
            terminal = logging.StreamHandler(DummyTqdmFile(sys.stderr))  # above the progress bar
            terminal.addFilter(lambda record: record.name != _FILE_ONLY)
            terminal.addFilter(_name_config_keys)
            root.addHandler(terminal)
        logging.captureWarnings(True)
        if folder.is_dir():
            self.begin_file()

    def begin_file(self) -> None:
        """Begins to write the file; a folder that cannot be written to is only a warning."""
        root, early = logging.getLogger(), self._early
        if early is None:
            return
        self._early = None
        root.removeHandler(early)
        try:
            file = _LogFile(self._path, encoding="utf-8")
        except OSError as error:
            logging.getLogger(__name__).warning("no log file: %s", error)
            return
        file.setFormatter(logging.Formatter(_FORMAT))
        file.addFilter(_name_config_keys)
        early.setTarget(file)
        early.flush()
        early.setTarget(None)
        root.addHandler(file)


def _name_config_keys(record: logging.LogRecord) -> bool:
    """Puts config keys in the place of arguments in the library's warnings; as a filter."""
    if record.levelno >= logging.WARNING and record.name.startswith("hybridtrain."):
        record.msg, record.args = with_config_keys(record.getMessage()), ()
    return True


class LogLines(io.TextIOBase):
    """A text stream whose lines go to the log file, and not to the terminal."""

    def write(self, text: str) -> int:
        """Logs the lines of `text`."""
        for line in text.splitlines():
            if line.strip():
                logging.getLogger(_FILE_ONLY).info("%s", line)
        return len(text)


class _LogFile(logging.FileHandler):
    """A log file that says once that it cannot be written, and not with a traceback each line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self._failed:
            self._failed = True
            error = sys.exc_info()[1]
            print(f"the log {self.baseFilename} cannot be written: {error}", file=sys.stderr)
