"""The page of one or several runs: a single HTML file that opens without a network.

record     what the directory of a run tells: curves, summary, plan, timeline, warnings
settings   what runs were started with, and what differs
charts     figures of it, by Plotly
page       all of it in `page.html`, by Jinja2
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
