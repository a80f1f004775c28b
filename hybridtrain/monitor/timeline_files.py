"""The newest timeline as two files: a trace for the browser and a picture."""

import json
from pathlib import Path

from hybridtrain.files import atomic_file, write_atomically
from hybridtrain.monitor.base import Monitor
from hybridtrain.monitor.timeline import chrome_trace, draw
from hybridtrain.schedule import Spans


class TimelineFiles(Monitor):
    """Keeps `timeline.json` (Chrome's trace format) and `timeline.png` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`; the files of an earlier step are replaced."""
        trace = json.dumps(chrome_trace(measured, f"step {step}"))
        write_atomically(self.directory / "timeline.json", trace)
        with atomic_file(self.directory / "timeline.png") as file:
            draw(predicted, measured).save(file, format="PNG")
