"""Monitors of a run: dashboards, a metrics file, a progress bar, and the rates they show.

base               `Monitor`, a callback that needs numbers and texts alone
tensorboard        scalars, texts and pictures for TensorBoard
files              files of metrics, a line for each logged step
tracker            a thread for services that may be slow or away: `wandb`, `mlflow`
progress           a bar or lines
throughput         samples, tokens and steps per second
timeline           what the stages do when, in files
pictures           timelines, curves, plans and accounts, drawn
"""

from hybridtrain.callbacks import Callback, Profile
from hybridtrain.monitor.base import Monitor, Monitors, call_hook
from hybridtrain.monitor.files import CSVFile, MetricsFile
from hybridtrain.monitor.mlflow import MLflow
from hybridtrain.monitor.pictures import (
    COLOURS,
    CRITICAL,
    PARTS,
    WAITS,
    Curve,
    NodesPoint,
    draw_accounts,
    draw_curves,
    draw_plan,
    draw_timelines,
    in_ms,
)
from hybridtrain.monitor.progress import Progress, format_value
from hybridtrain.monitor.tensorboard import TensorBoard
from hybridtrain.monitor.throughput import Throughput
from hybridtrain.monitor.timeline import TimelineFiles, spans_of_trace
from hybridtrain.monitor.tracker import Tracker
from hybridtrain.monitor.wandb import WandB

__all__ = [
    "COLOURS",
    "CRITICAL",
    "MONITORS",
    "PARTS",
    "WAITS",
    "CSVFile",
    "Curve",
    "MLflow",
    "MetricsFile",
    "Monitor",
    "Monitors",
    "NodesPoint",
    "Progress",
    "TensorBoard",
    "Throughput",
    "TimelineFiles",
    "Tracker",
    "WandB",
    "call_hook",
    "draw_accounts",
    "draw_curves",
    "draw_plan",
    "draw_timelines",
    "format_value",
    "in_ms",
    "spans_of_trace",
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
