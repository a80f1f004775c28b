"""The run directory: its files, and who writes them.

    <output_dir>/<run_name>/
        config.yaml     the resolved config        overrides.yaml  the command line
        metrics.jsonl   a line per logged step     summary.json    written at the end
        events.out.*    for TensorBoard            checkpoints/    see `checkpoint.directory`
        logs/           rank_000.log, ...          export/         see the command `export`
        plan.yaml       stages and their costs     timeline.*      see `observe.timeline`
        run.lock        see `run_lock`             evaluations.jsonl   a line per `evaluate`
        predictions/    see the command `predict`  profile/        see `loop.callbacks`
        metrics.csv     from `monitor.csv`         wandb/, *.id    see `observe.trackers`

Its path depends on names only, not on the time, so that a restarted run finds its checkpoints
(`run.resume`). One process at a time may write to it (`run_lock`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from hybridtrain._base.files import open_to_append, write_atomically
from hybridtrain._base.text_table import in_log, printable
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.cli.config.places import is_within
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.config.tree import to_yaml
from hybridtrain.cli.run.colour import bold
from hybridtrain.cli.run.errors import finite, json_line, versions
from hybridtrain.errors import ConfigError, UserError
from hybridtrain.world import World

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Lines for the log file only: `Progress` prints them on the terminal.
_FILE_ONLY = "hybridtrain.progress"


def _use_own_lock() -> None:
    """Gives tqdm, which prints the terminal's lines, a lock private to this process.

    Forked processes share tqdm's default lock: a DataLoader worker that is killed while it holds
    the lock would block this process at its next log line.
    """
    tqdm.set_lock(threading.RLock())


_use_own_lock()
os.register_at_fork(after_in_child=_use_own_lock)  # another thread may hold the parent's lock


class RunLog:
    """Sends the log of this process to `folder`, once it exists, and on rank 0 to the terminal.

    Earlier lines are buffered until then, so that a run that fails early leaves no folder. With
    `quiet`, the terminal shows only warnings and the lines logged with `RESULT`.
    """

    def __init__(self, folder: Path, rank: int, quiet: bool = False) -> None:
        self._path = folder / f"rank_{rank:03d}.log"
        self._early: MemoryHandler | None = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        for handler in list(root.handlers):
            root.removeHandler(handler)
        self._early.addFilter(_escape)
        root.addHandler(self._early)
        if rank == 0:
            terminal = logging.StreamHandler(DummyTqdmFile(sys.stderr))  # above the progress bar
            terminal.addFilter(lambda record: record.name != _FILE_ONLY)
            terminal.addFilter(_escape)
            terminal.setFormatter(_OnTerminal(quiet))
            if quiet:
                terminal.addFilter(
                    lambda record: record.levelno > logging.INFO or _is_result(record)
                )
            root.addHandler(terminal)
        logging.captureWarnings(True)
        if folder.is_dir():
            self.begin_file()

    def begin_file(self) -> None:
        """Starts the log file; if the folder is not writable, this only warns."""
        root, early = logging.getLogger(), self._early
        if early is None:
            return
        self._early = None
        root.removeHandler(early)
        try:
            file = _LogFile(self._path, encoding="utf-8")
        except OSError as error:
            logging.getLogger(__name__).warning("cannot write a log file: %s", error)
            return
        file.setFormatter(logging.Formatter(_FORMAT))
        file.addFilter(_escape)
        early.setTarget(file)
        early.flush()
        early.setTarget(None)
        root.addHandler(file)


RESULT = {"result": True}
"""The `extra` of a run's last log line, its result; a quiet run shows it too."""


class _OnTerminal(logging.Formatter):
    """Sets the result of a run apart from the lines above it, unless the terminal is quiet."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self._gap = "" if quiet else "\n"

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self._gap + bold(text, sys.stderr) if _is_result(record) else text


def _is_result(record: logging.LogRecord) -> bool:
    return getattr(record, "result", False)


def _escape(record: logging.LogRecord) -> bool:
    """A filter that escapes control characters, which names in a config may contain."""
    if record.name.startswith("hybridtrain") and isinstance(record.args, tuple):
        record.args = tuple(map(in_log, record.args))
    text = record.getMessage()
    if (escaped := printable(text)) != text:
        record.msg, record.args = escaped, ()
    return True


class LogLines(io.TextIOBase):
    """A text stream that writes its lines to the log file, not to the terminal."""

    def write(self, text: str) -> int:
        """Logs the lines of `text`."""
        for line in text.splitlines():
            if line.strip():
                logging.getLogger(_FILE_ONLY).info("%s", line)
        return len(text)


class _LogFile(logging.FileHandler):
    """A log file that reports a write error once, without a traceback for each line."""

    _failed = False

    def _open(self) -> Any:
        return open_to_append(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self._failed:
            self._failed = True
            error = sys.exc_info()[1]
            print(f"cannot write the log {self.baseFilename}: {error}", file=sys.stderr)


_log = logging.getLogger(__name__)


FOLDERS = ("checkpoints", "export", "logs", "predictions", "wandb", "slurm")
"""The folders of a run that are not named after a callback."""

# What a run replaces without a look at its content, after it has written config.yaml.
_FILES = ("overrides.yaml", "summary.json", "timeline.json", "timeline.png", "report.html")


class RunDirectory:
    """The directory of one run.

    Attributes:
        path: the directory itself.
        checkpoints: the folder of the checkpoints.
        plan: the plan of the run.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir) / str(config.run_name)
        self.checkpoints = self.path / "checkpoints"
        self.plan = self.path / "plan.yaml"
        self._log_file: RunLog | None = None

    def folder(self, name: str) -> Path:
        """Returns a folder of the run, for files that a later attempt adds or removes.

        Raises:
            ConfigError: it is a link to another place.
        """
        folder = self.path / name
        if not is_within(folder, self.path):
            raise ConfigError(
                f"{folder} is a link to {os.readlink(folder)}, outside the run directory, which "
                f"may be someone else's: remove the link, or set another run_name="
            )
        return folder

    def check_files(self) -> None:
        """Checks that a run may write here: no file of another program would be replaced.

        Raises:
            ConfigError: a folder of the run is a link to another place, or a file is not a run's.
        """
        if self.path.is_symlink() and not is_within(self.path, self.path.parent):
            raise ConfigError(
                f"{self.path} is a link to {os.readlink(self.path)}: set output_dir= to the folder "
                f"that should contain the run, or set another run_name="
            )
        for name in FOLDERS:
            self.folder(name)
        if not (self.path / "config.yaml").exists():
            foreign = [name for name in _FILES if (self.path / name).is_file()]
            if foreign:
                raise ConfigError(
                    f"{self.path / foreign[0]} exists, but {self.path} is not the directory of a "
                    f"run (it has no config.yaml): move the file, or set another run_name="
                )

    def plan_to_write(self) -> Path:
        """Returns the file for a new plan; a run that has begun keeps its plan."""
        begun = CheckpointStore(self.checkpoints).steps()
        return self.plan.with_stem("plan.new" if begun else "plan")

    def check_writable(self) -> None:
        """Raises the error of `create` early, if it is foreseeable, and creates nothing.

        Raises:
            ConfigError: the directory cannot be created or is not writable, or `check_files` fails.
        """
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not existing.is_dir():
            raise self._unwritable(f"{existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._unwritable("Permission denied")
        self.check_files()

    def create(self) -> None:
        """Creates the directory; every process calls it, because each has a log in it.

        Raises:
            ConfigError: the directory cannot be created or is not writable, or `check_files` fails.
        """
        self.check_files()
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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`; NaN and infinities become null."""
        self._write("summary.json", json.dumps(finite(summary), indent=1, allow_nan=False) + "\n")

    def add_evaluation(self, result: Mapping[str, Any]) -> None:
        """Appends a line to `evaluations.jsonl`; warns if that fails."""
        try:
            with open_to_append(self.path / "evaluations.jsonl") as file:
                file.write(json_line(result) + "\n")
        except OSError as error:
            _log.warning("cannot write the evaluation to evaluations.jsonl: %s", error)

    def log_to_files(self, rank: int, quiet: bool = False) -> None:
        """Sends the log of this process to its own file and, on rank 0, to the terminal too.

        The file is created when the directory exists.
        """
        self._log_file = RunLog(self.path / "logs", rank, quiet)

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path / name}: {error.strerror or error}; free disk space, or "
                f"set another output_dir="
            ) from error

    def _unwritable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"cannot write to the run directory {self.path}: {reason}; set output_dir= or run_name="
        )


def environment(world: World) -> dict[str, str]:
    """Returns versions, and the host and devices of this process, for the record of a run."""
    gpus = [device for device in world.devices if device.type == "cuda"]
    names = {torch.cuda.get_device_name(device) for device in gpus}
    cores = f"CPU, {os.cpu_count()} cores"
    return {
        **versions(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "devices": ", ".join(sorted(names)) or cores,
    }
