"""TensorBoard event files."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridtrain.monitor.timeline import Lanes, draw

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# A dashboard that is watched should not lag by the writer's own two minutes.
FLUSH_SECONDS = 10


class TensorBoard:
    """Writes scalars under their tags, and texts, to event files in `directory`.

    Files of earlier attempts of the run stay where they are. A mark in the new file makes
    TensorBoard drop their points after the step that the run resumed from.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer: SummaryWriter | None = None

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """See `Monitor.start`; the texts appear in the tab of that name."""
        # Half a second, which only rank 0 of a run that really starts should pay.
        from torch.utils.tensorboard import SummaryWriter

        # The mark purges the step it names too, and the points of `first_step` were reported
        # before the checkpoint was saved. On a fresh start nothing that is there is of this run.
        purge_step = first_step + 1 if first_step else 0
        self._writer = SummaryWriter(
            str(self.directory), purge_step=purge_step, flush_secs=FLUSH_SECONDS
        )
        for title, text in texts.items():
            # An indented Markdown code block, as a fenced one could end inside the text.
            self._writer.add_text(title, textwrap.indent(text, "    "), first_step)
        self._writer.flush()

    def step(self, step: int, samples: int) -> None:
        """Do nothing: curves are made of the logged steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`; only queues them, a thread of the writer's does the rest."""
        if self._writer is None:
            raise RuntimeError("TensorBoard.start() has to be called first")
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def timeline(self, step: int, predicted: Lanes, measured: Lanes) -> None:
        """See `Monitor.timeline`; a picture in the tab of images."""
        if self._writer is None:
            raise RuntimeError("TensorBoard.start() has to be called first")
        picture = torch.from_numpy(np.asarray(draw(predicted, measured)).copy())
        self._writer.add_image("timeline", picture, step, dataformats="HWC")

    def close(self) -> None:
        """See `Monitor.close`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
