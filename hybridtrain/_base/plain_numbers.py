"""Numbers of other libraries as Python's numbers; without importing PyTorch."""

from __future__ import annotations

import numbers
from typing import Any


def plain_numbers(value: Any) -> Any:
    """Returns Python's number for a number of another type, such as NumPy's; also in a list.

    Any other value is returned unchanged.
    """
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    if type(value) in (bool, int, float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)
