"""TensorBoard event files."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml

from hybridtrain.monitor.base import Monitor
from hybridtrain.monitor.pictures import draw
from hybridtrain.schedule import Spans

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# one chart for all stages, of each of these
_STAGE_CHARTS = {"forward_ms": "forward, ms per micro-batch", "backward_ms": "backward, ms per "
                 "micro-batch", "memory_bytes": "peak memory, bytes"}  # fmt: skip


class TensorBoard(Monitor):
    """Writes scalars, texts and timelines to event files in `directory`.

    TensorBoard sorts its groups by name. So that those of the stages come after `train`, the tag
    `stage0/forward_ms` is shown as `train_stages/forward_ms/0`, and `pipeline/bubble_fraction` as
    `train_stages/bubble_fraction`. The tab of custom scalars has one chart for all stages. The
    config, if it is one of the texts, is what the tab of hyperparameters lists.

    The files of earlier attempts are kept. A mark in the new file makes TensorBoard drop their
    points after the step that the run resumed from.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer: SummaryWriter | None = None

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """See `Monitor.start`; the texts appear in the tab of that name."""
        # takes half a second to import, which only rank 0 of a run that starts should pay
        from torch.utils.tensorboard import SummaryWriter

        # the mark also purges the step it names, and the points of `first_step` were reported
        # before the checkpoint was saved; on a fresh start, all old points are purged
        purge_step = first_step + 1 if first_step else 0
        # the default of two minutes is long for someone who watches the dashboard
        self._writer = SummaryWriter(str(self.directory), purge_step=purge_step, flush_secs=10)
        for title, text in texts.items():
            # an indented Markdown code block, because a fenced one could end inside the text
            self._writer.add_text(title, textwrap.indent(text, "    "), first_step)
        self._writer.add_custom_scalars(
            {
                "stages": {
                    title: ["Multiline", [f"train_stages/{name}/.*"]]
                    for name, title in _STAGE_CHARTS.items()
                },
                "loss": {"training and evaluation": ["Multiline", ["(train|eval)/loss"]]},
            }
        )
        if "config" in texts:
            _add_hyperparameters(self._writer, texts["config"])
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`; queues them for the writer's thread."""
        if self._writer is None:
            raise RuntimeError("call TensorBoard.start() first")
        for tag, value in values.items():
            self._writer.add_scalar(shown_tag(tag), value, step)

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`; a picture in the tab of images."""
        if self._writer is None:
            raise RuntimeError("call TensorBoard.start() first")
        title = f"{self.directory.resolve().name}, step {step}"
        picture = torch.from_numpy(np.asarray(draw(predicted, measured, title)).copy())
        self._writer.add_image("timeline", picture, step, dataformats="HWC")

    def close(self) -> None:
        """See `Monitor.close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def abandon(self) -> None:
        """See `Monitor.abandon`."""
        self._writer = None


def shown_tag(tag: str) -> str:
    """Returns the name that TensorBoard shows for a tag of `Monitor.scalars`."""
    if stage := re.fullmatch(r"stage(\d+)/(.*)", tag):
        return f"train_stages/{stage[2]}/{stage[1]}"
    if tag.startswith("pipeline/"):
        return "train_stages/" + tag.removeprefix("pipeline/")
    return tag


def _add_hyperparameters(writer: Any, config: str) -> None:
    """Writes the config's values; the dashboard finds the metrics among the curves."""
    from torch.utils.tensorboard.summary import hparams

    with suppress(yaml.YAMLError):
        _, started, _ = hparams(dict(_flat(yaml.safe_load(config))), {})
        writer._get_file_writer().add_summary(started)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, str | bool | float]]:
    """Returns the dotted keys of a nested mapping, with values that TensorBoard takes."""
    if not isinstance(tree, Mapping):
        return [(prefix, tree if isinstance(tree, str | bool | int | float) else str(tree))]
    return [
        entry
        for key, value in tree.items()
        if value is not None
        for entry in _flat(value, f"{prefix}.{key}" if prefix else str(key))
    ]
