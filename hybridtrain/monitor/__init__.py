"""Monitors of a run: dashboards, a metrics file, a progress bar, and the rates they show."""

from hybridtrain.monitor.base import Monitor
from hybridtrain.monitor.composite import Monitors
from hybridtrain.monitor.jsonl import MetricsFile
from hybridtrain.monitor.progress import Progress, TqdmLoggingHandler
from hybridtrain.monitor.tensorboard import TensorBoard
from hybridtrain.monitor.throughput import Throughput
from hybridtrain.monitor.timeline_files import TimelineFiles

__all__ = [
    "MetricsFile",
    "Monitor",
    "Monitors",
    "Progress",
    "TensorBoard",
    "Throughput",
    "TimelineFiles",
    "TqdmLoggingHandler",
]
