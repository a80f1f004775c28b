"""The config keys that are hyperparameters, by which reports and dashboards compare runs."""

from __future__ import annotations

import re

_OTHERS = re.compile(
    r"run_name|recipe|output_dir|resume|init_from|allow_.*|monitor\b.*|(submit|search)\..*"
    r"|hardware.*|checkpoint\..*|trainer\.\w+_every"
)


def is_hyperparameter(key: str) -> bool:
    """Returns False for keys that affect neither results nor speed."""
    return _OTHERS.fullmatch(key) is None
