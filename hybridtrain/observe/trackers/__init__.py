"""Trackers of a run: callbacks of rank 0 that need numbers, texts and pictures alone.

tensorboard        scalars, texts and pictures for TensorBoard
files              files of metrics, a line for each logged step
tracker            a thread for services that may be slow or away: `wandb`, `mlflow`
progress           a bar or lines
"""

from hybridtrain.loop import Callback, Profile
from hybridtrain.observe.trackers.files import CSVFile, MetricsFile
from hybridtrain.observe.trackers.mlflow import MLflow
from hybridtrain.observe.trackers.progress import Progress
from hybridtrain.observe.trackers.tensorboard import TensorBoard
from hybridtrain.observe.trackers.tracker import Tracker
from hybridtrain.observe.trackers.wandb import WandB

__all__ = [
    "MONITORS",
    "CSVFile",
    "MLflow",
    "MetricsFile",
    "Progress",
    "TensorBoard",
    "Tracker",
    "WandB",
]

MONITORS: dict[str, type[Callback]] = {
    "csv": CSVFile,
    "mlflow": MLflow,
    "profile": Profile,
    "progress": Progress,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
"""The names that a config has for them; a profile is of every process, and so no `Monitor`."""
