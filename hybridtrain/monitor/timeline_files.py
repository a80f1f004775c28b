"""The newest timeline as two files, for a browser and for the eye."""

import json
from collections.abc import Mapping
from pathlib import Path

from hybridtrain.monitor.timeline import Lanes, chrome_trace, draw


class TimelineFiles:
    """Keeps `timeline.json` (Chrome's trace format) and `timeline.png` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """Do nothing: see `Monitor.start`."""

    def step(self, step: int, samples: int) -> None:
        """Do nothing: see `Monitor.step`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: see `Monitor.scalars`."""

    def timeline(self, step: int, predicted: Lanes, measured: Lanes) -> None:
        """See `Monitor.timeline`; the files of an earlier step are replaced."""
        trace = json.dumps(chrome_trace(measured, f"step {step}"))
        (self.directory / "timeline.json").write_text(trace)
        draw(predicted, measured).save(self.directory / "timeline.png")

    def close(self) -> None:
        """Do nothing: all is written."""
