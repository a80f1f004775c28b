"""Monitors of a run: dashboards, a metrics file, a progress bar, and the rates they show.

base               `Monitor`, a callback that needs numbers and texts alone
tensorboard        scalars, texts and pictures for TensorBoard
jsonl              the metrics file, a line for each logged step
progress           a bar or lines, and `Throughput`: samples per second
timeline           what the stages do when, in files
pictures           timelines, curves, plans and accounts, drawn
"""

from hybridtrain.monitor.base import Monitor, Monitors, call_hook
from hybridtrain.monitor.jsonl import MetricsFile
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
from hybridtrain.monitor.progress import Progress, Throughput
from hybridtrain.monitor.tensorboard import TensorBoard
from hybridtrain.monitor.timeline import TimelineFiles, spans_of_trace

__all__ = [
    "COLOURS",
    "CRITICAL",
    "PARTS",
    "WAITS",
    "Curve",
    "MetricsFile",
    "Monitor",
    "Monitors",
    "NodesPoint",
    "Progress",
    "TensorBoard",
    "Throughput",
    "TimelineFiles",
    "call_hook",
    "draw_accounts",
    "draw_curves",
    "draw_plan",
    "draw_timelines",
    "in_ms",
    "spans_of_trace",
]
