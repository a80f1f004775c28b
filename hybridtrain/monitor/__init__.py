"""Monitors of a run: dashboards, a metrics file, a progress bar, and the rates they show."""

from hybridtrain.monitor.base import Monitor, Monitors
from hybridtrain.monitor.jsonl import MetricsFile
from hybridtrain.monitor.progress import Progress
from hybridtrain.monitor.tensorboard import TensorBoard
from hybridtrain.monitor.throughput import Throughput
from hybridtrain.monitor.timeline import TimelineFiles

__all__ = [
    "MetricsFile",
    "Monitor",
    "Monitors",
    "Progress",
    "TensorBoard",
    "Throughput",
    "TimelineFiles",
]
