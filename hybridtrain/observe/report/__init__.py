"""The report of one or several runs: a single HTML file that opens without a network.

record     the content of a run directory: curves, summary, plan, timeline, warnings
settings   the settings of runs, and their differences
charts     figures, made with Plotly
page       the report, made from `page.html` with Jinja2
"""

from hybridtrain.observe.report.page import check_installed, write_report
from hybridtrain.observe.report.record import Curves, RunRecord, accounts_of, curves_of
from hybridtrain.observe.report.settings import RunSettings, that_differ

__all__ = [
    "Curves",
    "RunRecord",
    "RunSettings",
    "accounts_of",
    "check_installed",
    "curves_of",
    "that_differ",
    "write_report",
]
