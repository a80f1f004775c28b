"""The combinations of a sweep: their overrides, and a name for each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from hybridtrain.app.compose import compose_settings, given_keys, sweep_choices
from hybridtrain.app.config import Config
from hybridtrain.errors import ConfigError


@dataclass(frozen=True)
class SweepPoint:
    """One combination of a sweep.

    Attributes:
        overrides: all of this run's, without its name.
        swept: those of them that are not the same in all runs.
        run_name: the run's own name, with its values.
    """

    overrides: list[str]
    swept: list[str]
    run_name: str

    @property
    def values(self) -> dict[str, str]:
        """The keys that are swept over, with their values as text."""
        return dict(o.lstrip("+").split("=", 1) for o in self.swept if "=" in o)


@dataclass(frozen=True)
class Sweep:
    """The combinations of a `--multirun`.

    Attributes:
        points: one for each run.
        path: `<output_dir>/<name>-sweep-<keys>`, for what belongs to all runs.
    """

    points: list[SweepPoint]
    path: Path


def sweep_of(overrides: Sequence[str], config_dir: str | None = None) -> Sweep:
    """Returns the combinations that `overrides`, with several values for some keys, stand for.

    Raises:
        ConfigError: a combination is wrong, or two would have one name.
    """
    choices = sweep_choices(overrides, config_dir)
    configs = [compose_settings(choice, config_dir).config for choice in choices]
    varies = [len(set(values)) > 1 for values in zip(*choices, strict=True)]
    swept = [list(compress(choice, varies)) for choice in choices]
    names = _names(configs, swept)
    keys = "-".join(dict.fromkeys(key for own in swept for key in given_keys(own)))
    base = "-".join(dict.fromkeys(str(config.run_name) for config in configs))
    return Sweep(
        [SweepPoint(*point) for point in zip(choices, swept, names, strict=True)],
        Path(configs[0].output_dir) / f"{base}-sweep-{keys}".replace("/", "_"),
    )


def _names(configs: Sequence[Config], swept: Sequence[Sequence[str]]) -> list[str]:
    """Returns the runs' names, with the values, so that another sweep does not resume these runs.

    A `run_name` or recipe that is swept over is in the name already.
    """
    for left_out in (("run_name", "recipe"), ("run_name",)):
        names = []
        for config, own in zip(configs, swept, strict=True):
            values = [o for o in own if o.lstrip("+").partition("=")[0] not in left_out]
            names.append("-".join([str(config.run_name), *values]).replace("/", "_"))
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"several runs of the sweep have the name {max(names, key=names.count)}")
