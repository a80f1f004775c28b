"""The settings of runs: what each ran with, and which of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hybridtrain.observe.hyperparameters import is_hyperparameter


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        config: as it was saved; empty for a run that has not begun.
        overrides: what its commands set.
    """

    config: Mapping[str, Any]
    overrides: Sequence[str]

    @property
    def given(self) -> dict[str, str]:
        """The texts that the commands set, by key or group."""
        pairs = (override.lstrip("+~").partition("=") for override in self.overrides)
        return {key: text for key, _, text in pairs}

    def get(self, key: str) -> Any:
        """Returns the value of a dotted key, or the option of a group; None: not known."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None and not isinstance(found, Mapping):
            return found
        text = self.given.get(key)
        try:
            return None if text is None else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # Hydra's grammar is another
            return text


def that_differ(runs: Sequence[RunSettings]) -> list[str]:
    """Returns the keys and groups that the commands of some run set, and in which runs differ.

    Those that change neither what a run learns nor how fast are left out.
    """
    keys = dict.fromkeys(key for run in runs for key in run.given if is_hyperparameter(key))
    return [key for key in keys if len({str(run.get(key)) for run in runs}) > 1]
