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

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridtrain.app.config import Config
from hybridtrain.app.hidden import to_yaml
from hybridtrain.app.run_log import RunLog
from hybridtrain.app.terminal import finite, json_line
from hybridtrain.errors import ConfigError, UserError
from hybridtrain.files import write_atomically

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
