"""Checks that optimizers train the model as it is now."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel

log = logging.getLogger(__name__)


def check_lr_schedule(lr_schedule: LRScheduler | None) -> None:
    """Refuses a schedule that depends on more than the step.

    Raises:
        ConfigError: it does.
    """
    if isinstance(lr_schedule, ReduceLROnPlateau):
        raise ConfigError(
            "lr_schedule: ReduceLROnPlateau depends on a metric, but a run can be resumed at any "
            "step only if its schedule depends on the step alone; use another"
        )


class OptimizerCheck:
    """Checks optimizers against their model in the first step, and after every change of either."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self._seen: tuple[int, ...] | None = None
        self._left_out: list[Parameter] = []

    def drop_gradients_left_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Drops the gradients of parameters that none of `optimizers` holds.

        They must not count in the norm of the gradients: nobody trains, unscales or zeroes them.

        Raises:
            ConfigError: see `check_optimizers`.
        """
        groups = [group for each in optimizers for group in each.param_groups]
        now = self._model.changes, *(len(group["params"]) for group in groups)
        if groups and now != self._seen:
            self._left_out = check_optimizers(self._model, groups)
            self._seen = now
        for parameter in self._left_out:
            parameter.grad = None


def check_optimizers(model: HybridModel, groups: Sequence[Mapping[str, Any]]) -> list[Parameter]:
    """Warns of parameters that are not trained, and returns them.

    Gradients that frozen parameters outside the groups still have are dropped.

    Args:
        model: the model.
        groups: of all optimizers.

    Raises:
        ConfigError: the model has parameters that the groups have not, and the other way round:
            the model was changed after the optimizer was made.
    """
    # without those that stand for a group of which this process has nothing
    held = {id(p) for group in groups for p in group["params"] if p.numel()}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    left_out = [name for name, parameter in trainable.items() if id(parameter) not in held]
    if left_out:
        named = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        foreign = held - {id(parameter) for parameter in model.parameters()}
        if foreign:
            raise ConfigError(
                f"optimizer= holds {len(foreign)} parameters that the model does not have, and "
                f"not {named}: the model was changed after the optimizer was made; make it anew"
            )
        if model.world.replica == 0:
            log.warning(
                "optimizer= leaves out %d of %d trainable parameters: %s. If that is meant, "
                "requires_grad_(False) saves their gradients",
                len(left_out),
                len(trainable),
                named,
            )
    for parameter in model.parameters():
        if not parameter.requires_grad and id(parameter) not in held:
            parameter.grad = None
    return [trainable[name] for name in left_out]
