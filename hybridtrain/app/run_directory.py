"""The run directory: where it is, who writes to it, and what a run leaves there.

    <output_dir>/<run_name>/
        config.yaml     the resolved config        overrides.yaml  the command line's
        metrics.jsonl   a line a logged step       summary.json    written at the end
        tensorboard/    event files                checkpoints/    see `checkpoint.store`
        logs/           rank_000.log, ...          export/         see the command `export`

Its path depends on names only, not on the clock, so that a restarted run finds its checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from hybridtrain.app.config import Config
from hybridtrain.errors import ConfigError
from hybridtrain.monitor.progress import TqdmLoggingHandler
from hybridtrain.planning.plan import Plan


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        """The run directory that `config` names."""
        return cls(Path(config.output_dir) / str(config.run_name))

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def plan(self) -> Path:
        """Where the model was cut, and why."""
        return self.path / "plan.yaml"

    @property
    def tensorboard(self) -> Path:
        """Where the event files are."""
        return self.path / "tensorboard"

    def create(self) -> None:
        """Makes the directory; every rank does, since every rank has a log in it.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run directory {self.path}: {error.strerror}; set output_dir "
                f"or run_name"
            ) from error

    def write_config(self, config: Config, overrides: Sequence[str]) -> None:
        """Writes what the run was asked for."""
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        write_text(self.path / "overrides.yaml", OmegaConf.to_yaml(list(overrides)))

    def read_config(self) -> dict[str, Any]:
        """What `write_config` wrote; empty if it did not."""
        path = self.path / "config.yaml"
        if not path.exists():
            return {}
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))

    def write_plan(self, plan: Plan, proposed: bool = False) -> Path:
        """Writes how the model is divided; `pipeline.split` takes the file.

        A plan that is `proposed` leaves that of the run in place.
        """
        path = self.path / "plan.new.yaml" if proposed else self.plan
        write_text(path, plan.to_yaml())
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        write_text(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """What `write_summary` wrote; empty if the run was ended before."""
        path = self.path / "summary.json"
        summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return summary

    def log_to_files(self, rank: int) -> None:
        """Sends the log of this process to its own file and, on rank 0, to the terminal too.

        Without a run directory, as after a typo in the name of a run to evaluate, there is no file.
        """
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        for handler in list(root.handlers):
            root.removeHandler(handler)
        if (self.path / "logs").is_dir():
            file = logging.FileHandler(self.path / "logs" / f"rank_{rank:03d}.log")
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            root.addHandler(file)
        if rank == 0:
            root.addHandler(TqdmLoggingHandler())
        logging.captureWarnings(True)


def write_text(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
