"""Observing a run: trackers, pictures and report pages.

trackers/      TensorBoard, W&B, MLflow, a progress bar, files of metrics
report/        the report of one or several runs: one HTML file
confusion      the confusion matrix of an evaluation
pictures       drawings of timelines, curves, plans and time breakdowns
timeline       timelines of a step, in files
hyperparameters  the keys by which runs are compared
notebook       pictures of a run in a notebook
"""

from typing import TYPE_CHECKING

from hybridtrain._base.registry import import_on_first_use
from hybridtrain.observe.trackers import TRACKERS, RegisteredTracker

if TYPE_CHECKING:
    from hybridtrain.observe.confusion import confusion_of, is_confusion
    from hybridtrain.observe.pictures import (
        COLOURS,
        CRITICAL,
        PARTS,
        WAITS,
        Curve,
        NodesPoint,
        draw_accounts,
        draw_confusion,
        draw_curves,
        draw_plan,
        draw_timelines,
        in_ms,
    )
    from hybridtrain.observe.report.page import check_installed, write_report
    from hybridtrain.observe.report.record import Curves, RunRecord, accounts_of, curves_of
    from hybridtrain.observe.report.settings import RunSettings, that_differ
    from hybridtrain.observe.timeline import TimelineFiles, spans_of_trace
    from hybridtrain.observe.trackers import (
        CSVFile,
        MetricsFile,
        MLflow,
        Progress,
        QueuedTracker,
        TensorBoard,
        Tracker,
        WandB,
    )
    from hybridtrain.observe.trackers.progress import describe_values

__all__ = [
    "COLOURS",
    "CRITICAL",
    "PARTS",
    "TRACKERS",
    "WAITS",
    "CSVFile",
    "Curve",
    "Curves",
    "MLflow",
    "MetricsFile",
    "NodesPoint",
    "Progress",
    "QueuedTracker",
    "RegisteredTracker",
    "RunRecord",
    "RunSettings",
    "TensorBoard",
    "TimelineFiles",
    "Tracker",
    "WandB",
    "accounts_of",
    "check_installed",
    "confusion_of",
    "curves_of",
    "describe_values",
    "draw_accounts",
    "draw_confusion",
    "draw_curves",
    "draw_plan",
    "draw_timelines",
    "in_ms",
    "is_confusion",
    "spans_of_trace",
    "that_differ",
    "write_report",
]


_NAMES = {
    "confusion": "confusion_of is_confusion",
    "pictures": "COLOURS CRITICAL PARTS WAITS Curve NodesPoint draw_accounts draw_confusion "
    "draw_curves draw_plan draw_timelines in_ms",
    "report": "Curves RunRecord RunSettings accounts_of check_installed curves_of that_differ "
    "write_report",
    "timeline": "TimelineFiles spans_of_trace",
    "trackers": "CSVFile MLflow MetricsFile Progress QueuedTracker TensorBoard Tracker WandB",
    "trackers.progress": "describe_values",
}
"""The names of each module; a module is imported when one of its names is first used."""

# on first use: a run without pictures or a report imports neither PIL nor drawing modules
import_on_first_use(
    __name__,
    (f"{__name__}.{module}:{name}" for module in _NAMES for name in _NAMES[module].split()),
)
