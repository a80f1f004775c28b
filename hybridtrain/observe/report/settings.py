"""The settings of runs, and which of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hybridtrain._base.yaml_text import load_yaml
from hybridtrain.observe.hyperparameters import is_hyperparameter


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        config: the saved config; empty for a run that has not begun.
        overrides: the overrides of its commands.
    """

    config: Mapping[str, Any]
    overrides: Sequence[str]

    @property
    def given(self) -> dict[str, str]:
        """The overrides of the commands, by key or group."""
        pairs = (override.lstrip("+~").partition("=") for override in self.overrides)
        return {key: text for key, _, text in pairs}

    def get(self, key: str) -> Any:
        """Returns the value of a dotted key or the option of a group; None if unknown."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            return value
        text = self.given.get(key)
        try:
            return None if text is None else load_yaml(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # Hydra's grammar differs
            return text


def that_differ(runs: Sequence[RunSettings]) -> list[str]:
    """Returns the keys and groups that some run's commands set and that differ between runs.

    Keys that affect neither results nor speed are left out.
    """
    keys = dict.fromkeys(key for run in runs for key in run.given if is_hyperparameter(key))
    return [key for key in keys if len({str(run.get(key)) for run in runs}) > 1]
