"""A run as a tracker sees it, for tests that call the hooks of trackers themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunOf:
    """The run of a training loop that has done `step` steps."""

    step: int = 0
    total_steps: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    account: Mapping[str, Any] | None = None
    advice: Sequence[str] = ()
    finished: bool = False
    results: Mapping[str, Any] = field(default_factory=dict)
