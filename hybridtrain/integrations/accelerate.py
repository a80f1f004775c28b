"""Accelerate: `prepare` keeps its autocast around a pipelined model, but not DDP."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.integrations import Averages

# Plugins that take a model apart, or run its steps.
_REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


def install(package: str, averages: Averages) -> None:
    """Changes `Accelerator.prepare` and `prepare_model`, for models that `averages` is true for."""
    kind: Any = import_module(package).Accelerator
    prepare, prepare_model = kind.prepare, kind.prepare_model

    @functools.wraps(prepare)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = str(getattr(self.distributed_type, "name", self.distributed_type))
        if plugin in _REFUSED:
            for value in args:
                if isinstance(value, nn.Module) and averages(value):
                    raise ConfigError(
                        f"Accelerate's plugin {plugin} cannot wrap a pipelined model: launch "
                        "without the plugin (accelerate launch --multi_gpu, or torchrun), and use "
                        "more stages for a larger model"
                    )
        return prepare(self, *args, **kwargs)

    @functools.wraps(prepare_model)
    def without_ddp(
        self: Any,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        # in evaluation mode, everything but the wrapper for several processes is as in training
        return prepare_model(self, model, device_placement, evaluation_mode or averages(model))

    kind.prepare, kind.prepare_model = checked, without_ddp
