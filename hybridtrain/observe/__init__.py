"""Looking at a run: trackers, pictures and pages.

trackers/      TensorBoard, W&B, MLflow, a progress bar, files of metrics
report/        the page of one or several runs: one HTML file
pictures       timelines, curves, plans and time breakdowns, drawn
timeline       what the stages do when, in files
notebook       pictures of a run in a notebook
"""

from hybridtrain.observe.pictures import (
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
from hybridtrain.observe.report.page import check_installed, write_report
from hybridtrain.observe.report.record import Curves, RunRecord, accounts_of, curves_of
from hybridtrain.observe.report.settings import RunSettings, that_differ
from hybridtrain.observe.timeline import TimelineFiles, spans_of_trace
from hybridtrain.observe.trackers import MONITORS
from hybridtrain.observe.trackers.files import CSVFile, MetricsFile
from hybridtrain.observe.trackers.mlflow import MLflow
from hybridtrain.observe.trackers.progress import Progress, describe_values
from hybridtrain.observe.trackers.tensorboard import TensorBoard
from hybridtrain.observe.trackers.tracker import Tracker
from hybridtrain.observe.trackers.wandb import WandB

__all__ = [
    "COLOURS",
    "CRITICAL",
    "MONITORS",
    "PARTS",
    "WAITS",
    "CSVFile",
    "Curve",
    "Curves",
    "MLflow",
    "MetricsFile",
    "NodesPoint",
    "Progress",
    "RunRecord",
    "RunSettings",
    "TensorBoard",
    "TimelineFiles",
    "Tracker",
    "WandB",
    "accounts_of",
    "check_installed",
    "curves_of",
    "describe_values",
    "draw_accounts",
    "draw_curves",
    "draw_plan",
    "draw_timelines",
    "in_ms",
    "spans_of_trace",
    "that_differ",
    "write_report",
]
