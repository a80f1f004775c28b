"""The run directory: its files, and who writes them.

    <output_dir>/<run_name>/
        config.yaml     the resolved config        overrides.yaml  the command line's
        metrics.jsonl   a line per logged step     summary.json    written at the end
        tensorboard/    event files                checkpoints/    see `checkpoint.store`
        logs/           rank_000.log, ...          export/         see the command `export`
        plan.yaml       stages and their costs     timeline.*      see `monitor.timeline`

Its path depends on names only, not on the clock, so that a restarted run finds its checkpoints.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from tqdm.contrib import DummyTqdmFile

from hybridtrain.app.compose import to_yaml
from hybridtrain.app.config import Config
from hybridtrain.errors import ConfigError
from hybridtrain.files import write_atomically


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

    def create(self) -> None:
        """Makes the directory; every process calls it, since each has a log in it.

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
        """Writes `config.yaml` and `overrides.yaml`."""
        write_atomically(self.path / "config.yaml", to_yaml(config))
        write_atomically(self.path / "overrides.yaml", to_yaml(list(overrides)))

    def read_config(self) -> dict[str, Any]:
        """Returns the config that `write_config` wrote, or an empty one."""
        path = self.path / "config.yaml"
        if not path.exists():
            return {}
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    def log_to_files(self, rank: int) -> None:
        """Sends the log of this process to its own file and, on rank 0, to the terminal too.

        Without a run directory, as when the name of a run to evaluate has a typo, there is only the
        terminal.
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
            # Above the bar of `Progress`.
            root.addHandler(logging.StreamHandler(DummyTqdmFile(sys.stderr)))
        logging.captureWarnings(True)
