"""Builds the callbacks of a run from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.app import instantiate
from hybridtrain.app.config import Config
from hybridtrain.app.run_directory import RunDirectory
from hybridtrain.callbacks import CALLBACKS, Callback
from hybridtrain.errors import ConfigError, check_choice


def build_callbacks(config: Config, directory: RunDirectory) -> list[Callback]:
    """Returns the callbacks that `callbacks` names, in its order.

    It is a list of names, or a mapping of names to their arguments; with a `_target_` the name is
    free. A `directory` that is not given is a folder of that name in the run directory.

    Raises:
        ConfigError: a name is unknown, or a key does not fit.
    """
    chosen = config.callbacks or {}
    if not isinstance(chosen, Mapping):
        if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
            raise ConfigError(
                f"callbacks={chosen} must be a list of names, or a mapping such as "
                f"callbacks={{ema: {{decay: 0.999}}}}"
            )
        chosen = dict.fromkeys(chosen)
    if "_target_" in chosen:
        raise ConfigError(
            f"callbacks._target_={chosen['_target_']}: give the callback a name, such as "
            f"callbacks={{mine: {{_target_: {chosen['_target_']}}}}}"
        )
    return [_build(name, settings, config, directory) for name, settings in chosen.items()]


def _build(name: str, settings: Any, config: Config, directory: RunDirectory) -> Callback:
    key = f"callbacks.{name}"
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"{key}={settings} must be a mapping of the callback's arguments")
    settings = dict(settings or {})
    if "_target_" not in settings:
        check_choice("callbacks", name, CALLBACKS)
        known = CALLBACKS[name]
        settings["_target_"] = f"{known.__module__}.{known.__name__}"
    made: Callback = instantiate.build(
        key,
        settings,
        Callback,
        config.allow_targets,
        defaults={"directory": directory.path / name},
    )
    return made
