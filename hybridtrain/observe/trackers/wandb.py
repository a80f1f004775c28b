"""Weights & Biases."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from hybridtrain.observe.trackers.queued import QueuedTracker
from hybridtrain.options import names_checked

_log = logging.getLogger(__name__)

# The end of an offline run only closes a local file.
_OFFLINE_PATIENCE_S = 5.0


class WandB(QueuedTracker):
    """Reports config, curves, results and timeline images to Weights & Biases.

    W&B reads its own settings, such as `WANDB_API_KEY` and `WANDB_MODE=offline`, from the
    environment. Without a login, the run is recorded offline; upload it with `wandb sync`.

    W&B keeps the first value of a step and cannot delete values. A resumed run therefore does not
    report steps that the interrupted attempt already reported; because resuming is exact, their
    losses are equal.

    Args:
        directory: the run directory; W&B writes its files to the subfolder `wandb`.
        project: the W&B project.
        entity: a user or a team; None for W&B's default.
        group: a name for related runs; the command line uses the name of a sweep.
        tags: the tags of the run.
        mode: `online`, `offline` or `disabled`; None to follow the environment.

    Raises:
        ConfigError: the package is not installed.
    """

    package = "wandb"

    @names_checked
    def __init__(
        self,
        directory: str | Path,
        project: str = "hybridtrain",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        mode: str | None = None,
    ) -> None:
        super().__init__(directory)
        self._settings: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "tags": tags,
            "mode": mode,
        }
        self._run: Any = None

    def begin(self, run_id: str | None, config: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """Begins the run; the text `overrides` becomes a key of W&B's config."""
        import wandb

        mode = self._settings["mode"] or os.environ.get("WANDB_MODE") or "online"
        # otherwise it would prompt for a key and wait
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            self._settings["mode"] = "offline"
            _log.warning(
                "not logged in to W&B, so the run is recorded offline: upload it with `wandb "
                "sync`. To log in, run `wandb login`, or set WANDB_API_KEY"
            )
        init_timeout = self.patience_s
        if "offline" in (mode, self._settings["mode"]):
            self.patience_s = min(self.patience_s, _OFFLINE_PATIENCE_S)
        overrides = yaml.safe_load(texts.get("overrides", "")) or {}
        settings = wandb.Settings(
            console="off",  # the run directory already has the logs
            quiet=True,
            init_timeout=init_timeout,
            finish_timeout=self.patience_s,  # also silences the end of the process
        )
        self._run = wandb.init(
            **self._settings,
            id=run_id or secrets.token_hex(4),
            resume="allow",
            name=self.run_name,
            dir=self.directory,
            config={**config, "overrides": overrides},
            allow_val_change=True,
            settings=settings,
        )
        return str(self._run.id)

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Reports values by tag; W&B's step is the optimizer step."""
        # A resumed run reports the step of its last accepted report.
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """Reports a picture."""
        import wandb

        if step >= self._run.step:
            self._run.log({name: wandb.Image(picture)}, step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._run.finish(exit_code=int(self.failed))
