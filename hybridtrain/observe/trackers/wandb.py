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
    """Reports to Weights & Biases: config, curves, results, and the timeline as an image.

    Its own settings, such as `WANDB_API_KEY` and `WANDB_MODE=offline`, are read from the
    environment. Who is not logged in has an offline run, which `wandb sync` sends.

    W&B keeps the first value of a step and cannot drop any. So in a resumed run the points that the
    interrupted attempt reported after the checkpoint stay, and those of the same steps are left
    out; a resume is exact, so that their losses are the same.

    Args:
        directory: the run directory; W&B's files are in its folder `wandb`.
        project: of the run.
        entity: a user or a team; None: W&B's default.
        group: of runs that belong together; on the command line the name of a sweep.
        tags: of the run.
        mode: `online`, `offline` or `disabled`; None: as the environment says.

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

    def begin(self, known: str | None, config: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """See `QueuedTracker.begin`; the text `overrides` is a key of W&B's config."""
        import wandb

        mode = self._settings["mode"] or os.environ.get("WANDB_MODE") or "online"
        # else it would ask for a key, and wait for the answer
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            self._settings["mode"] = "offline"
            _log.warning(
                "nobody is logged in at W&B, so the run is offline: `wandb sync` sends it. To log "
                "in, call `wandb login`, or set WANDB_API_KEY"
            )
        init_timeout = self.patience_s
        if "offline" in (mode, self._settings["mode"]):
            self.patience_s = min(self.patience_s, _OFFLINE_PATIENCE_S)
        overrides = yaml.safe_load(texts.get("overrides", "")) or {}
        settings = wandb.Settings(
            console="off",  # the run has its logs
            quiet=True,
            init_timeout=init_timeout,
            finish_timeout=self.patience_s,  # also that of the end of the process
        )
        self._run = wandb.init(
            **self._settings,
            id=known or secrets.token_hex(4),
            resume="allow",
            name=self.run_name,
            dir=self.directory,
            config={**config, "overrides": overrides},
            allow_val_change=True,
            settings=settings,
        )
        return str(self._run.id)

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """See `QueuedTracker.values`; W&B's own step is the step."""
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """See `QueuedTracker.picture`."""
        import wandb

        if step >= self._run.step:
            self._run.log({name: wandb.Image(picture)}, step=step)

    def finish(self) -> None:
        """See `QueuedTracker.finish`."""
        self._run.finish(exit_code=int(self.failed))
