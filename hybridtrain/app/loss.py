"""The loss of a run: one by name, or what a `_target_` makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hybridtrain.app import instantiate
from hybridtrain.app.config import Config
from hybridtrain.errors import ConfigError, check_choice
from hybridtrain.losses import LOSSES, LossFn

# Settings of PyTorch's losses that are tensors, one number for each class.
_TENSORS = ("weight", "pos_weight")


def build_loss(config: Config) -> LossFn:
    """Returns the loss function that `trainer.loss` names or describes.

    A `_target_` is a class, such as `torch.nn.CrossEntropyLoss`; a function that makes a loss
    function; or itself a `loss_fn(output, targets)`, whose other arguments are the other keys.

    Raises:
        ConfigError: the name is unknown, or the target is not allowed or does not fit its keys.
    """
    chosen = config.trainer.loss
    if not isinstance(chosen, Mapping):
        check_choice("trainer.loss", chosen, LOSSES)
        return LOSSES[chosen]
    settings = {
        key: torch.tensor(value, dtype=torch.float32)
        if key in _TENSORS and isinstance(value, list)
        else value
        for key, value in chosen.items()
    }
    target = instantiate.resolve("trainer.loss", settings.get("_target_"), config.allow_targets)
    if not isinstance(target, type) and callable(getattr(target, "count", None)):
        return target  # a loss that counts, not what makes one
    positional = [] if isinstance(target, type) else _output_and_targets(target, settings)
    if positional:
        del settings["_target_"]
        known = list(inspect.signature(target).parameters)
        for key in settings:
            if key not in known:
                raise ConfigError(
                    instantiate.unknown_key(
                        f"trainer.loss.{key}", [f"trainer.loss.{name}" for name in known]
                    )
                )
        return partial(target, **settings) if settings else target
    made: Any = instantiate.build("trainer.loss", settings, object, config.allow_targets)
    if not callable(made):
        raise ConfigError(
            f"trainer.loss._target_={settings['_target_']} must give a loss function, not "
            f"{type(made).__name__}"
        )
    loss_fn: LossFn = made
    return loss_fn


def _output_and_targets(target: Any, settings: Mapping[str, Any]) -> list[str]:
    """Returns the two arguments that a loss function itself needs besides its settings."""
    needed = [
        name
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in settings
    ]
    return needed if len(needed) == 2 else []
