"""The run directory: its files, and who writes them.

    <output_dir>/<run_name>/
        config.yaml     the resolved config        overrides.yaml  the command line's
        metrics.jsonl   a line per logged step     summary.json    written at the end
        tensorboard/    event files                checkpoints/    see `checkpoint.store`
        logs/           rank_000.log, ...          export/         see the command `export`
        plan.yaml       stages and their costs     timeline.*      see `monitor.timeline`
        run.lock        see `app.run_lock`         evaluations.jsonl   a line per `evaluate`
        predictions/    see the command `predict`

Its path depends on names only, not on the clock, so that a restarted run finds its checkpoints.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile
from yaml import YAMLError

from hybridtrain.app.config import Config
from hybridtrain.app.config_text import to_yaml
from hybridtrain.app.keys import with_config_keys
from hybridtrain.app.terminal import finite, json_line
from hybridtrain.errors import ConfigError, UserError
from hybridtrain.files import write_atomically

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


_log = logging.getLogger(__name__)


class RunDirectory:
    """The directory of one run.

    Attributes:
        path: the directory itself.
        checkpoints: the folder of the checkpoints.
        plan: the plan that the run is cut by.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir) / str(config.run_name)
        self.checkpoints = self.path / "checkpoints"
        self.plan = self.path / "plan.yaml"
        self._log_file: RunLog | None = None

    def check_writable(self) -> None:
        """Raises the error of `create` early, where it can be foreseen; makes nothing.

        Raises:
            ConfigError: the directory cannot be made or written to.
        """
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not existing.is_dir():
            raise self._unwritable(f"{existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._unwritable("Permission denied")

    def create(self) -> None:
        """Makes the directory; every process calls it, since each has a log in it.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(str(error.strerror)) from error
        if self._log_file is not None:
            self._log_file.begin_file()

    def write_config(
        self,
        config: Config,
        overrides: Sequence[str],
        texts: Mapping[tuple[str | int, ...], str],
    ) -> None:
        """Writes `config.yaml` and `overrides.yaml`; `texts` as in `to_yaml`."""
        self._write("config.yaml", to_yaml(config, texts))
        self._write("overrides.yaml", OmegaConf.to_yaml(list(overrides)))

    def overrides(self) -> list[str]:
        """Returns those of `overrides.yaml`; none if it cannot be read."""
        try:
            found = OmegaConf.to_container(OmegaConf.load(self.path / "overrides.yaml"))
        except (OSError, YAMLError, OmegaConfBaseException):
            return []
        return [str(each) for each in found] if isinstance(found, list) else []

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`; NaN and the infinities are null."""
        self._write("summary.json", json.dumps(finite(summary), indent=1, allow_nan=False) + "\n")

    def add_evaluation(self, result: Mapping[str, Any]) -> None:
        """Appends a line to `evaluations.jsonl`; only warns if that fails."""
        try:
            with open(self.path / "evaluations.jsonl", "a", encoding="utf-8") as file:
                file.write(json_line(result) + "\n")
        except OSError as error:
            _log.warning("the evaluation is not in evaluations.jsonl: %s", error)

    def log_to_files(self, rank: int) -> None:
        """Sends the log of this process to its own file and, on rank 0, to the terminal too.

        The file is there once the directory is.
        """
        self._log_file = RunLog(self.path / "logs", rank)

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path / name}: {error.strerror or error}; free some space, or "
                f"set another output_dir="
            ) from error

    def _unwritable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"cannot write to the run directory {self.path}: {reason}; set output_dir or run_name"
        )
