"""Optimizers that were made before a parameter of their model was replaced.

Plain PyTorch goes on without a word: the optimizer updates the old parameter, and nobody the new
one. Here the step of such an optimizer is an error. Nothing is watched until a parameter that the
model had before is gone from it, but held by someone.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybridtrain.errors import ConfigError


class StaleOptimizers:
    """Refuses steps of optimizers that update parameters which a model no longer has.

    Args:
        net: the model.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._handle: Any = None
        # not weakly, because PyTorch swaps no tensor that has a weak reference
        self._held = dict(net.named_parameters())
        self._gone: dict[int, tuple[str, weakref.ref[nn.Parameter]]] = {}

    def look(self) -> None:
        """Notes the parameters of the model; if one is gone, watches optimizers from now on."""
        held, self._held = self._held, dict(self._net.named_parameters())
        numbers = set(map(id, self._held.values()))
        for name, parameter in held.items():
            if id(parameter) not in numbers:
                self._gone[id(parameter)] = name, weakref.ref(parameter)
        if self._gone and self._handle is None:
            check = weakref.WeakMethod(self._check)

            def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                if (method := check()) is not None:
                    method(optimizer)

            self._handle = register_optimizer_step_pre_hook(hook)
            weakref.finalize(self, self._handle.remove)

    def _check(self, optimizer: Optimizer) -> None:
        """Checks an optimizer before its step.

        Raises:
            ConfigError: it has a parameter in the place of which the model has a trained one that
                the optimizer does not have.
        """
        parameters = dict(self._net.named_parameters())
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = set(map(id, updated))
        for parameter in updated:
            name, seen = self._gone.get(id(parameter), ("", None))
            now = parameters.get(name)
            if seen is None or seen() is not parameter or now is None or now is parameter:
                continue
            if now.grad is not None and id(now) not in numbers:
                raise ConfigError(
                    f"{name} was replaced after this {type(optimizer).__name__} was made, which "
                    "would update the old parameter: make the optimizer after the last change of "
                    "the model's parameters, or add the new one by optimizer.add_param_group(...)"
                )
