"""Builds the optimizer and the learning rate schedule from their configs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from hybridtrain.app import instantiate
from hybridtrain.app.config import GROUP_KEYS
from hybridtrain.app.keys import errors_with_config_keys
from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel
from hybridtrain.param_groups import CombinedOptimizer, check_steps_alone, parameter_groups
from hybridtrain.sharded_optimizer import ShardedOptimizer
from hybridtrain.step import check_lr_schedule

_log = logging.getLogger(__name__)


def build_model_optimizer(
    config: Mapping[str, Any], model: HybridModel, allow: Sequence[str] = ()
) -> Optimizer:
    """Returns the optimizer of `model` that `config` describes, with its parameter groups.

    It is one for the model's `shard`.

    Each of `config["groups"]` has `match`, patterns for names, and the settings of its group; with
    a `_target_` it is an optimizer by itself, with all its settings. `layer_decay` is that of
    `parameter_groups`.

    Raises:
        ConfigError: a target is not an optimizer, a key does not fit it, or a pattern matches no
            parameter.
    """
    plain = {key: value for key, value in config.items() if key not in GROUP_KEYS}
    rules, decay = config.get("groups") or [], config.get("layer_decay")
    if isinstance(rules, Mapping):
        rules = list(rules.values())
    sharded = model.options.shard == "optimizer"

    def make(parameters: Iterable[Any]) -> Optimizer:
        return build_optimizer(plain, parameters, allow)

    if not rules and decay is None:
        return ShardedOptimizer(model, make) if sharded else make(model.parameters())
    _check_rules(plain, rules, allow)
    passed = [{key: v for key, v in rule.items() if key != "_target_"} for rule in rules]
    apart = [number for number, rule in enumerate(rules) if "_target_" in rule]
    places = [{"match": rule["match"], "rule": number} for number, rule in enumerate(rules)]
    with errors_with_config_keys(
        {"match": "optim.groups.match", "layer_decay": "optim.layer_decay"}
    ):
        split = parameter_groups(model, places, lr=plain.get("lr"), layer_decay=decay)
    rest: list[dict[str, Any]] = []
    alone: dict[int | None, list[dict[str, Any]]] = {number: [] for number in apart}
    for group in split:
        number = group.pop("rule", None)
        settings = {} if number is None else dict(passed[number])
        settings.pop("match", None)
        if "lr" in group and "lr" in settings:  # of layer_decay: in the same proportion
            settings["lr"] *= group["lr"] / plain["lr"]
        alone.get(number, rest).append({**group, **settings})
    if sharded and apart:
        raise ConfigError(
            "optim.groups has a _target_, which makes several optimizers, and shard=optimizer "
            "spreads one: leave it out, or set shard=none"
        )
    if sharded:
        return ShardedOptimizer(model, make, rest)
    made = [make(rest)] if rest else []
    for number in apart:
        settings = {key: v for key, v in rules[number].items() if key != "match"}
        made.append(build_optimizer(settings, alone[number], allow, key=f"optim.groups.{number}"))
    return made[0] if len(made) == 1 else CombinedOptimizer(made)


def _check_rules(
    config: Mapping[str, Any], rules: Sequence[Mapping[str, Any]], allow: Sequence[str]
) -> None:
    """Checks the keys of groups that are not an optimizer by themselves.

    Raises:
        ConfigError: the optimizer has no such setting for a group.
    """
    known = build_optimizer(config, [Parameter(torch.zeros(1))], allow).defaults
    for number, rule in enumerate(rules):
        if not isinstance(rule, Mapping) or "match" not in rule:
            raise ConfigError(f"optim.groups.{number}={rule} must be a mapping with the key match")
        for key in rule:
            if "_target_" not in rule and key not in ("match", "name", *known):
                raise ConfigError(
                    instantiate.unknown_key(
                        f"optim.groups.{number}.{key}",
                        [f"optim.groups.{number}.{name}" for name in known],
                    )
                )


def build_optimizer(
    config: Mapping[str, Any],
    parameters: Iterable[Any],
    allow: Sequence[str] = (),
    *,
    key: str = "optim",
) -> Optimizer:
    """Returns the optimizer that `config["_target_"]` names, over the trainable `parameters`.

    Args:
        config: its keys but those of `GROUP_KEYS` are the optimizer's arguments.
        parameters: or parameter groups, of which none is left out.
        allow: see `instantiate.build`.
        key: of `config`, for messages.

    Raises:
        ConfigError: the target is not an optimizer, or a key does not fit it.
    """
    trained = [each for each in parameters if isinstance(each, dict) or each.requires_grad]
    # a process of a pipeline may have frozen ones only, and an optimizer wants one at least
    trained = trained or [Parameter(torch.empty(0))]
    optimizer = instantiate.build(
        key, config, Optimizer, allow, positional=[trained], ignore=GROUP_KEYS
    )
    check_steps_alone(optimizer, f"{key}._target_={config['_target_']}")
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
    check_lr_schedule(schedule)
    if not warmup:
        return schedule
    rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
