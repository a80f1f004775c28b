"""The result of a command: the values for a sweep's table, and an evaluation as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from hybridtrain.observe import describe_values

Result: TypeAlias = dict[str, Any]
"""The values that a command computed, for the table of a sweep."""


def values_in_words(evaluation: Mapping[str, float] | None) -> str:
    """Returns the loss and metrics of an evaluation on one line; empty without an evaluation."""
    values = dict(evaluation or {})
    values.pop("samples", None)
    return "  ".join(describe_values(values))
