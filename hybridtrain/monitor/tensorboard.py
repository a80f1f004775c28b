"""TensorBoard event files."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridtrain.monitor.base import Monitor
from hybridtrain.monitor.timeline import draw
from hybridtrain.schedule import Spans

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Monitor):
    """Writes scalars, texts and timelines to event files in `directory`.

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
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`; queues them for the writer's thread."""
        if self._writer is None:
            raise RuntimeError("call TensorBoard.start() first")
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`; a picture in the tab of images."""
        if self._writer is None:
            raise RuntimeError("call TensorBoard.start() first")
        picture = torch.from_numpy(np.asarray(draw(predicted, measured)).copy())
        self._writer.add_image("timeline", picture, step, dataformats="HWC")

    def close(self) -> None:
        """See `Monitor.close`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
