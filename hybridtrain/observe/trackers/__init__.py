"""Trackers: callbacks that report a run and cannot end it.

tensorboard        scalars, texts and pictures for TensorBoard
files              metrics files with one line per logged step
queued             a thread for services that may be slow or unreachable: `wandb`, `mlflow`
progress           a progress bar, or lines
"""

from typing import TYPE_CHECKING, Any

from hybridtrain._base.registry import on_first_use
from hybridtrain.loop import Tracker

if TYPE_CHECKING:
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
    "TensorBoard",
    "Tracker",
    "WandB",
]

TRACKERS: dict[str, str] = {
    "csv": "hybridtrain.observe.trackers.files:CSVFile",
    "mlflow": "hybridtrain.observe.trackers.mlflow:MLflow",
    "progress": "hybridtrain.observe.trackers.progress:Progress",
    "tensorboard": "hybridtrain.observe.trackers.tensorboard:TensorBoard",
    "wandb": "hybridtrain.observe.trackers.wandb:WandB",
}
"""The trackers that a config can name, as `module:class`; imported on first use."""

_NOT_IN_A_CONFIG = (
    "hybridtrain.observe.trackers.files:MetricsFile",
    "hybridtrain.observe.trackers.queued:QueuedTracker",
)


def __getattr__(name: str) -> Any:
    return on_first_use(__name__, name, (*TRACKERS.values(), *_NOT_IN_A_CONFIG))
