"""The result of a command: the values of a row in the table of a sweep, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from hybridtrain.observe import describe_values

Result: TypeAlias = dict[str, Any]
"""The values that a command has found, for the table of a sweep."""


def values_in_words(evaluation: Mapping[str, float] | None) -> str:
    """Returns the loss and the metrics of an evaluation in one line; empty without one."""
    values = dict(evaluation or {})
    values.pop("samples", None)
    return "  ".join(describe_values(values))
