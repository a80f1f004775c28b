"""How much of a large set of cases the tests run: a sample, or all with `THOROUGH=1`."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("THOROUGH") == "1"


def sample(cases: Sequence[T], every: int) -> list[T]:
    """Returns each `every`th of `cases`; all of them in a thorough run."""
    return list(cases if THOROUGH else cases[::every])
