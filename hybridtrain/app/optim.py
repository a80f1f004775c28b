"""Builds the optimizer and the learning rate schedule from their configs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from hybridtrain.app import instantiate
from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel
from hybridtrain.sharded_optimizer import ShardedOptimizer

_log = logging.getLogger(__name__)


def build_model_optimizer(
    config: Mapping[str, Any], model: HybridModel, allow: Sequence[str] = ()
) -> Optimizer:
    """Returns the optimizer of `config` for `model`, as `world.shard` wants it.

    Raises:
        ConfigError: see `build_optimizer`.
    """

    def make(parameters: Iterable[Parameter]) -> Optimizer:
        return build_optimizer(config, parameters, allow)

    if model.options.shard == "optimizer":
        return ShardedOptimizer(model, make)
    return make(model.parameters())


def build_optimizer(
    config: Mapping[str, Any], parameters: Iterable[Parameter], allow: Sequence[str] = ()
) -> Optimizer:
    """Returns the optimizer that `config["_target_"]` names, over the trainable `parameters`.

    Raises:
        ConfigError: the target is not an optimizer, or a key does not fit it.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # a process of a pipeline may have frozen ones only, and an optimizer wants one at least
    trained = trained or [Parameter(torch.empty(0))]
    optimizer = instantiate.build("optim", config, Optimizer, allow, positional=[trained])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"optim._target_={config['_target_']}: its step computes the loss several times, which "
            f"a pipeline does not do; choose another optimizer"
        )
    return optimizer


def optimizer_tensors_per_param(config: Mapping[str, Any], allow: Sequence[str] = ()) -> int:
    """Returns how many tensors of a parameter's size the optimizer of `config` keeps for it."""
    parameter = Parameter(torch.zeros(2, 3))
    optimizer = build_optimizer(config, [parameter], allow)
    optimizer.param_groups[0]["capturable"] = False  # which is for parameters on a GPU
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError) as error:  # for sparse gradients only, say
        raise ConfigError(
            f"optim._target_={config['_target_']} fails at a step: {error}"
        ) from error
    kept = optimizer.state[parameter].values()
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in kept)


def build_lr_schedule(
    config: Mapping[str, Any], optimizer: Optimizer, total_steps: int, allow: Sequence[str] = ()
) -> LRScheduler:
    """Returns the schedule that `config["_target_"]` names, stepped once per optimizer step.

    `warmup_steps` come first: the learning rate rises linearly from its
    `1 / (warmup_steps + 1)`th part. A null `T_max`, `total_iters` or `total_steps` becomes the
    number of steps after the warm-up.

    Raises:
        ConfigError: the target is not a schedule, or a key does not fit it.
    """
    warmup = config.get("warmup_steps") or 0
    if type(warmup) is not int or warmup < 0:
        raise ConfigError(f"lr_schedule.warmup_steps={warmup} must be a number of steps, 0 or more")
    if warmup >= total_steps:
        _log.warning(
            "lr_schedule.warmup_steps=%d is not less than the %d steps of the run: the learning "
            "rate only rises, and never reaches its value",
            warmup,
            total_steps,
        )
    left = max(1, total_steps - warmup)
    lengths = {"T_max": left, "total_iters": left, "total_steps": left}
    if "total_iters" not in config:  # it has a default
        del lengths["total_iters"]
    if "epochs" in config:  # the other way to tell OneCycleLR its length
        del lengths["total_steps"]
    schedule = instantiate.build(
        "lr_schedule",
        config,
        LRScheduler,
        allow,
        positional=[optimizer],
        defaults=lengths,
        ignore=["warmup_steps"],
    )
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            "lr_schedule: ReduceLROnPlateau depends on a metric, but a run can be resumed at any "
            "step only if its schedule depends on the step alone; use another"
        )
    if not warmup:
        return schedule
    rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
