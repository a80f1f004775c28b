"""Trackers: callbacks that report a run and cannot end it.

tensorboard        scalars, texts and pictures for TensorBoard
files              metrics files with one line per logged step
queued             a thread for services that may be slow or unreachable: `wandb`, `mlflow`
progress           a progress bar, or lines
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridtrain._base.registry import import_on_first_use

if TYPE_CHECKING:
    from hybridtrain.loop import Tracker
    from hybridtrain.observe.trackers.files import CSVFile, MetricsFile
    from hybridtrain.observe.trackers.mlflow import MLflow
    from hybridtrain.observe.trackers.progress import Progress
    from hybridtrain.observe.trackers.queued import QueuedTracker
    from hybridtrain.observe.trackers.tensorboard import TensorBoard
    from hybridtrain.observe.trackers.wandb import WandB

__all__ = [
    "TRACKERS",
    "CSVFile",
    "MLflow",
    "MetricsFile",
    "Progress",
    "QueuedTracker",
    "RegisteredTracker",
    "TensorBoard",
    "Tracker",
    "WandB",
]


@dataclass(frozen=True)
class RegisteredTracker:
    """A tracker that a config can name: `monitor.<name>` is true, false or its arguments.

    Attributes:
        path: of the class, as `module:class`; imported on first use. Its constructor gets the
            arguments, and each of these if its signature has it: `directory` and `title`, the run's
            folder and name; `group`, of `monitor.group`; `path`, `metrics.<name>` in the folder.
        text: the meaning of the key, for the help and the documentation of the options.
        on: the default of the key.
    """

    path: str
    text: str
    on: bool = False


TRACKERS = {
    "tensorboard": RegisteredTracker(
        "hybridtrain.observe.trackers.tensorboard:TensorBoard",
        "Write event files for TensorBoard to the run directory.",
    ),
    "wandb": RegisteredTracker(
        "hybridtrain.observe.trackers.wandb:WandB",
        "Report to Weights & Biases; or a mapping such as `{project: mine, tags: [a]}`.",
    ),
    "mlflow": RegisteredTracker(
        "hybridtrain.observe.trackers.mlflow:MLflow",
        'Report to MLflow; or a mapping such as `{experiment: mine, tracking_uri: "http://..."}`.',
    ),
    "csv": RegisteredTracker(
        "hybridtrain.observe.trackers.files:CSVFile",
        "Write `metrics.csv` to the run directory.",
    ),
    "progress": RegisteredTracker(
        "hybridtrain.observe.trackers.progress:Progress",
        "Show a progress bar on a terminal, plain lines elsewhere.",
        on=True,
    ),
}
"""The trackers that a config can name. The keys of `monitor` are made from them."""

_NOT_IN_A_CONFIG = (
    "hybridtrain.loop:Tracker",
    "hybridtrain.observe.trackers.files:MetricsFile",
    "hybridtrain.observe.trackers.queued:QueuedTracker",
)

# the keys of a config are read from `TRACKERS` without torch, which the base class imports
import_on_first_use(__name__, [*(tracker.path for tracker in TRACKERS.values()), *_NOT_IN_A_CONFIG])
