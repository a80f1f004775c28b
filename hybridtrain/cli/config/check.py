"""Checks the values of a config that no object of the library checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridtrain.cli.config.run_name import check_run_name
from hybridtrain.cli.config.schema import AUTO, Config
from hybridtrain.errors import ConfigError
from hybridtrain.options import check_batch_size


def check_config(config: Config) -> None:
    """Checks the values that no object of the library checks.

    Raises:
        ConfigError: names the key to change.
    """
    nb_part = config.pipeline.nb_part
    if type(nb_part) is not int or nb_part < 1:
        raise ConfigError(f"pipeline.nb_part={nb_part!r} must be a number of devices, or auto")
    if config.world.timeout_s < 1:
        raise ConfigError(f"world.timeout_s={config.world.timeout_s} must be at least 1")
    if (config.world.stall_s or 0) < 0:
        raise ConfigError(
            f"world.stall_s={config.world.stall_s} must be positive, or null for never"
        )
    checkpoint = config.checkpoint
    if (every := checkpoint.every_steps or 0) < 0:
        raise ConfigError(
            f"checkpoint.every_steps={every} must be positive, 0 (never), or null (only at the end)"
        )
    for name in ("every_minutes", "every_epochs", "best"):
        value = getattr(checkpoint, name)
        if value is not None and checkpoint.every_steps == 0:
            raise ConfigError(
                f"checkpoint.every_steps=0 turns checkpoints off, but checkpoint.{name}={value} "
                f"needs them: set checkpoint.every_steps=null, or checkpoint.{name}=null"
            )
    for group in ("optim", "lr_schedule"):
        _check_finite(group, getattr(config, group))
    if config.data.get("batch_size") != AUTO:
        check_batch_size(config.data.get("batch_size"))
    check_run_name(config.run_name or "")


def check_rate(optim: Mapping[str, Any]) -> None:
    """Rejects a learning rate with which nothing is learned.

    Raises:
        ConfigError: it is not above 0, and no group of parameters has another one.
    """
    rate = optim.get("lr")
    if isinstance(rate, int | float) and rate <= 0 and not optim.get("groups"):
        raise ConfigError(f"optim.lr={rate:g} must be above 0, such as optim.lr=1e-3")


def _check_finite(key: str, value: Any) -> None:
    """Rejects an infinite rate, such as 1e400, which only a step would find."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_finite(f"{key}.{name}", part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            _check_finite(f"{key}.{number}", part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} must be a finite number")
