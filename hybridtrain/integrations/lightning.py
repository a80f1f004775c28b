"""Lightning's Trainer and Fabric: the DDP strategies leave a pipelined model as it is."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hybridtrain.integrations import Averages


def install(package: str, averages: Averages) -> None:
    """Changes the DDP strategies of `package`, for models that `averages` is true for.

    Args:
        package: `lightning` or `pytorch_lightning`, which are two copies of the same code.
        averages: whether a model averages its gradients itself.
    """
    is_whole = package == "lightning"
    trainer = import_module("lightning.pytorch" if is_whole else package)
    fabric = import_module("lightning.fabric" if is_whole else "lightning_fabric")
    _leave(trainer.strategies.DDPStrategy, "_setup_model", averages)
    _leave(fabric.strategies.DDPStrategy, "setup_module", averages)
    control: Any = import_module(f"{fabric.__name__}.strategies.ddp")._DDPBackwardSyncControl
    no_sync = control.no_backward_sync

    @functools.wraps(no_sync)
    def of_model(self: Any, module: nn.Module, enabled: bool) -> Any:
        if averages(module):
            own: Any = getattr(module, "no_sync", nullcontext)
            return own() if enabled else nullcontext()
        return no_sync(self, module, enabled)

    control.no_backward_sync = of_model


def _leave(strategy: Any, method: str, averages: Averages) -> None:
    wrap = getattr(strategy, method)

    @functools.wraps(wrap)
    def unless_averaged(self: Any, module: nn.Module) -> nn.Module:
        wrapped: nn.Module = module if averages(module) else wrap(self, module)
        return wrapped

    setattr(strategy, method, unless_averaged)
