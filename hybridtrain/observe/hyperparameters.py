"""The config keys that are hyperparameters: pages and dashboards compare runs by them."""

from __future__ import annotations

import re

_OTHERS = re.compile(
    r"run_name|recipe|output_dir|resume|init_from|allow_.*|monitor\b.*|(submit|search)\..*"
    r"|hardware.*|checkpoint\..*|trainer\.\w+_every"
)


def is_hyperparameter(key: str) -> bool:
    """Returns False for keys that change neither what a run learns nor how fast."""
    return _OTHERS.fullmatch(key) is None
