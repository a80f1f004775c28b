"""Builds the model, loss, metrics, optimizer, schedule and callbacks that a config names."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from hybridtrain import observe
from hybridtrain._base.construction import construct_without
from hybridtrain._base.text_table import counted
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.keys import unknown_key
from hybridtrain.cli.config.names import check_name
from hybridtrain.cli.config.schema import AUTO, GROUP_KEYS, WARMUP_KEYS, WRAPPER_KEYS, Config
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.data import DataSplits
from hybridtrain.errors import ConfigError, DataError, check_choice, naming
from hybridtrain.loop import CALLBACKS, Callback, Tracker, TrainerOptions
from hybridtrain.loss import (
    LOSSES,
    METRICS,
    LossFn,
    balanced_weights,
    check_metric,
    direction,
    metric_of,
    resolve,
)
from hybridtrain.model import HybridModel
from hybridtrain.models import WRAPPERS, loss_of_model
from hybridtrain.models.quantized import quantized_weights
from hybridtrain.observe import TRACKERS
from hybridtrain.options import PipelineOptions
from hybridtrain.step import (
    CombinedOptimizer,
    MuonAdamW,
    ShardedOptimizer,
    check_lr_schedule,
    check_optimizer,
    muon_groups,
    parameter_groups,
    state_bytes,
)

# Arguments of PyTorch's losses that are tensors with one number per class.
_TENSORS = ("weight", "pos_weight")


def build_model(config: Config, data: DataSplits) -> nn.Module:
    """Returns the model; arguments without a key take their values from the data.

    Raises:
        ConfigError: the target is not allowed or does not return a module, it does not accept a
            key, a size is too small for the data, or nothing would be trained.
    """
    for name in ("num_classes", "vocab_size", "max_len", "seq_len", "pad_index"):
        value, of_data = config.model.get(name), data.metadata.get(name)
        if not isinstance(value, int) or not isinstance(of_data, int):
            continue
        if value != of_data if name == "pad_index" else value < of_data:
            is_padding = name == "pad_index"
            raise ConfigError(
                f"model.{name}={value} does not fit the data, which "
                + (f"is padded with {of_data}" if is_padding else f"needs {of_data}")
                + f": remove model.{name}= to take it from the data"
            )

    def build() -> nn.Module:
        return instantiate.build(
            "model",
            config.model,
            nn.Module,
            config.allow_targets,
            defaults=data.metadata,
            ignore=WRAPPER_KEYS,
        )

    def wrapped(net: nn.Module, name: str) -> nn.Module:
        wrap = resolve_name(WRAPPERS[name])
        return _wrapped(net, f"model.{name}", wrap, config.model[name])

    chosen = [name for name in WRAPPERS if config.model.get(name) not in (None, False)]
    if chosen == ["quantize"]:
        raise ConfigError(
            "model.quantize freezes the layers that it quantizes: set model.lora=true to train an "
            "adapter, or model.quantize=null"
        )
    if "quantize" in chosen and config.init_from is not None:  # loading gives them their values
        net = construct_without(build, lambda net: quantized_weights(wrapped(net, "quantize")))
    else:
        net = build()
    for name in chosen:
        net = wrapped(net, name)
    return net


def _wrapped(net: nn.Module, key: str, wrap: Callable[..., nn.Module], chosen: Any) -> nn.Module:
    """Returns the wrapped model.

    Raises:
        ConfigError: a setting is unknown, or the wrapper rejects it.
    """
    _, first, *others = inspect.signature(wrap).parameters.values()
    names = [parameter.name for parameter in (first, *others)]
    if isinstance(chosen, str) and isinstance(first.default, str):
        with naming({first.name: key}):
            return wrap(net, chosen)
    if chosen is not True and not isinstance(chosen, Mapping):
        raise ConfigError(
            f"{key}={chosen} must be true, or a mapping such as {{{first.name}: {first.default}}}"
        )
    settings: Mapping[str, Any] = {} if chosen is True else chosen
    for name in settings:
        if name not in names:
            raise ConfigError(unknown_key(f"{key}.{name}", [f"{key}.{known}" for known in names]))
    with naming({name: f"{key}.{name}" for name in names}):
        return wrap(net, **settings)


def build_loss(config: Config, class_weights: Tensor | None = None) -> LossFn:
    """Returns the loss function that `trainer.loss` names or describes.

    The default depends on the model's output, see `hybridtrain.models.returns`.
    `trainer.label_smoothing` and `trainer.class_weights` apply to losses given by name. A
    `_target_` is a class, such as `torch.nn.CrossEntropyLoss`; a function that returns a loss
    function; or a `loss_fn(output, targets)` that takes the other keys as further arguments.

    Args:
        config: the config of the run.
        class_weights: the result of `class_weights_of`; None: without weights.

    Raises:
        ConfigError: the name is unknown, the target is not allowed or does not accept a key, or
            the loss does not support a setting.
    """
    chosen = config.trainer.loss
    if chosen is None:
        model = instantiate.resolve("model", config.model.get("_target_"), config.allow_targets)
        chosen = loss_of_model(model, config.model)
    if not isinstance(chosen, Mapping):
        check_choice("trainer.loss", chosen, LOSSES)
        return _with_settings(chosen, config, class_weights)
    for key in ("label_smoothing", "class_weights"):
        if getattr(config.trainer, key):
            raise ConfigError(
                f"trainer.{key} applies only to a loss given by name, but trainer.loss has a "
                f"_target_: set it among the arguments of trainer.loss"
            )
    settings = {
        key: torch.tensor(value, dtype=torch.float32)
        if key in _TENSORS and isinstance(value, list)
        else value
        for key, value in chosen.items()
    }
    target = instantiate.resolve("trainer.loss", settings.get("_target_"), config.allow_targets)
    if not isinstance(target, type) and callable(getattr(target, "count", None)):
        return target  # a loss function itself, not a factory
    positional = [] if isinstance(target, type) else _output_and_targets(target, settings)
    if positional:
        _, arguments = instantiate.check(
            "trainer.loss", settings, object, config.allow_targets, positional=positional
        )
        return partial(target, **arguments) if arguments else target
    made: Any = instantiate.build("trainer.loss", settings, object, config.allow_targets)
    if not callable(made):
        raise ConfigError(
            f"trainer.loss._target_={settings['_target_']} must return a loss function, not "
            f"{type(made).__name__}"
        )
    loss_fn: LossFn = made
    return loss_fn


def _with_settings(name: str, config: Config, class_weights: Tensor | None) -> LossFn:
    """Returns a loss by name, with label smoothing and class weights."""
    loss_fn = LOSSES[name]
    arguments: dict[str, Any] = {}
    if config.trainer.label_smoothing:
        if not 0 < config.trainer.label_smoothing < 1:
            raise ConfigError(
                f"trainer.label_smoothing={config.trainer.label_smoothing} must be from 0 to 1"
            )
        arguments["label_smoothing"] = config.trainer.label_smoothing
    if config.trainer.class_weights is not None:
        _check_class_weights(config.trainer.class_weights)
        arguments["weight"] = class_weights
    takes = inspect.signature(loss_fn).parameters
    for key, argument in (("label_smoothing",) * 2, ("weight", "class_weights")):
        if key in arguments and key not in takes:
            raise ConfigError(f"trainer.loss={name} does not support trainer.{argument}: remove it")
    return partial(loss_fn, **arguments) if arguments else loss_fn


def _check_class_weights(weights: Any) -> None:
    if weights == AUTO:
        return
    if not isinstance(weights, list) or not all(type(w) in (int, float) for w in weights):
        raise ConfigError(f"trainer.class_weights={weights} must be auto, or one number per class")
    if not all(0 <= w < math.inf for w in weights) or not any(weights):
        raise ConfigError(
            f"trainer.class_weights={weights}: each weight must be a finite number of at least 0, "
            f"and one of them above 0"
        )


def class_weights_of(config: Config, data: DataSplits) -> Tensor | None:
    """Returns one weight per class: the given ones, or the inverse of each class's frequency.

    Raises:
        ConfigError: the weights do not fit the data, or its classes cannot be counted.
    """
    weights = config.trainer.class_weights
    if weights is None:
        return None
    classes = data.metadata.get("num_classes")
    if weights != AUTO:
        if isinstance(classes, int) and len(weights) != classes:
            raise ConfigError(
                f"trainer.class_weights has {len(weights)} numbers, but the data has {classes} "
                f"classes"
            )
        return torch.tensor(weights, dtype=torch.float32)
    labels = getattr(data.train, "labels", None)
    if labels is None or not isinstance(classes, int):
        raise ConfigError(
            "trainer.class_weights=auto needs a data set with a method labels(), and this one has "
            "none: set trainer.class_weights= to a list"
        )
    return balanced_weights(labels(), classes)


def check_several_classes(loss_fn: LossFn, data: DataSplits) -> None:
    """Refuses data with a single class, whose cross-entropy is always 0.

    Raises:
        DataError: names the class.
    """
    if data.metadata.get("num_classes") == 1 and resolve(loss_fn).has_class_targets:
        names = data.metadata.get("classes")
        raise DataError(
            f"the data has only one class{f', {names[0]}' if names else ''}, so there is nothing "
            "to learn: add samples of another class"
        )


def _output_and_targets(target: Any, settings: Mapping[str, Any]) -> list[str]:
    """Returns the two positional arguments of a loss function, in addition to its settings."""
    needed = [
        name
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in settings
    ]
    return needed if len(needed) == 2 else []


_log = logging.getLogger(__name__)

# of `inverse_sqrt` without a warm-up, as in transformers
_TIMESCALE = 10_000


def build_metrics(
    config: Config, loss_fn: LossFn, metadata: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Returns the metrics that `trainer.metrics` names; the default depends on the loss.

    `metadata` comes from the data and includes the number of classes.

    Raises:
        ConfigError: a name is unknown, or the target is not allowed or does not accept a key.
    """
    chosen = config.trainer.metrics
    if chosen is None:
        chosen = ["accuracy"] if resolve(loss_fn).has_class_targets else []
    if isinstance(chosen, str):
        chosen = [chosen]
    if not isinstance(chosen, Mapping):
        if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
            raise ConfigError(
                f"trainer.metrics={chosen} must be a list of names, or a mapping such as "
                "trainer.metrics={rouge: {max_new_tokens: 32}}"
            )
        _check_once("trainer.metrics", chosen)
        chosen = {name: name for name in chosen}
    _check_names("trainer.metrics", "metric", chosen)
    for name, metric in chosen.items():
        if isinstance(metric, Mapping) and "_target_" in metric:
            continue
        if isinstance(metric, Mapping):
            check_metric("trainer.metrics", name)
            continue
        if "." in str(metric):
            raise ConfigError(
                f"trainer.metrics={metric} is a class and needs a _target_: "
                f"trainer.metrics={{{str(name).rpartition('.')[2]}: {{_target_: {metric}}}}}"
            )
        check_metric("trainer.metrics", metric)
    return {
        name: instantiate.build(f"trainer.metrics.{name}", metric, object, config.allow_targets)
        if isinstance(metric, Mapping) and "_target_" in metric
        else _metric_by_name(name, metric, metadata)
        for name, metric in chosen.items()
    }


def _metric_by_name(name: str, chosen: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns a metric; it gets class information from the data if it accepts that.

    Args:
        name: the name of its value.
        chosen: the name of the metric; or its arguments, if `name` is the metric's name too.
        metadata: see `build_metrics`.
    """
    settings: Mapping[str, Any] = chosen if isinstance(chosen, Mapping) else {}
    make = METRICS[name if isinstance(chosen, Mapping) else chosen]
    facts = {
        "num_classes": metadata.get("num_classes"),
        "several": metadata.get("task") == "multilabel",
    }
    takes = inspect.signature(make).parameters
    key = f"trainer.metrics.{name}"
    for setting in settings:
        if setting not in takes or setting in facts:
            takes_keys = [f"{key}.{other}" for other in takes if other not in ("name", *facts)]
            if not takes_keys:
                raise ConfigError(f"{key} takes no arguments: remove {setting}")
            raise ConfigError(unknown_key(f"{key}.{setting}", takes_keys))
    with naming({setting: f"{key}.{setting}" for setting in settings}):
        return make(**{k: value for k, value in facts.items() if k in takes}, **settings)


def direction_of(
    key: str, value: str, mode: str | None, metrics: Any, allow: Sequence[str] = ()
) -> str:
    """Returns `min` or `max` for a value of the evaluation, from the metrics of a config.

    Args:
        key: the key of `mode`, for messages.
        value: `loss`, or the name of a metric.
        mode: the configured mode.
        metrics: `trainer.metrics` of the config.
        allow: see `instantiate.build`.

    Raises:
        ConfigError: see `loss.metrics.direction`; or the metric's target is not allowed.
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    names = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics or ()}
    name = metric_of(value, names) or value
    described = names.get(name, name)
    if isinstance(described, Mapping) and "_target_" not in described:
        described = name
    metric: Any = (
        METRICS[described]() if isinstance(described, str) and described in METRICS else None
    )
    if isinstance(described, Mapping) and mode is None:
        where = f"trainer.metrics.{name}"
        metric = instantiate.resolve(where, described.get("_target_"), allow)
    return direction(key, value, metric, mode)


def build_model_optimizer(
    config: Mapping[str, Any], model: HybridModel, allow: Sequence[str] = ()
) -> Optimizer:
    """Returns the optimizer of `model` that `config` describes, with its parameter groups.

    It is sharded if the model's `shard` says so.

    Each entry of `config["groups"]` has `match`, patterns for parameter names, and the settings of
    its group; with a `_target_`, it is a separate optimizer with its own settings. For
    `layer_decay`, see `parameter_groups`.

    Raises:
        ConfigError: a target is not an optimizer, it does not accept a key, or a pattern matches no
            parameter.
    """
    plain = {key: value for key, value in config.items() if key not in GROUP_KEYS}
    rules, decay = config.get("groups") or [], config.get("layer_decay")
    if isinstance(rules, Mapping):
        rules = list(rules.values())
    # `nn.Embedding(sparse=True)`: no fused kernel takes sparse gradients
    if any(getattr(module, "sparse", False) is True for module in model.net.modules()):
        plain, rules = _not_fused(plain), [_not_fused(rule) for rule in rules]
    sharded = model.options.shard == "optimizer"

    def make(parameters: Iterable[Any]) -> Optimizer:
        return build_optimizer(plain, parameters, allow)

    by_matrix = instantiate.resolve("optim", plain.get("_target_"), allow) is MuonAdamW
    if not rules and decay is None and not by_matrix:
        return ShardedOptimizer(model, make) if sharded else make(model.parameters())
    _check_rules(plain, rules, allow)
    passed = [{key: v for key, v in rule.items() if key != "_target_"} for rule in rules]
    apart = [number for number, rule in enumerate(rules) if "_target_" in rule]
    places = [
        {"match": rule["match"], "rule": number}
        | ({"use_muon": rule["use_muon"]} if "use_muon" in rule else {})
        for number, rule in enumerate(rules)
    ]
    make_groups = muon_groups if by_matrix else parameter_groups
    with naming({"match": "optim.groups.match", "layer_decay": "optim.layer_decay"}):
        split = make_groups(model, places, lr=plain.get("lr"), layer_decay=decay)
    rest: list[dict[str, Any]] = []
    alone: dict[int | None, list[dict[str, Any]]] = {number: [] for number in apart}
    for group in split:
        number = group.pop("rule", None)
        settings = {} if number is None else dict(passed[number])
        for name in ("match", "use_muon"):
            settings.pop(name, None)
        if "lr" in group and "lr" in settings:  # layer_decay scales the group's rate too
            settings["lr"] *= group["lr"] / plain["lr"]
        alone.get(number, rest).append({**group, **settings})

    def make_all(_: Any) -> Optimizer:
        made = [make(rest)] if rest else []
        for number in apart:
            settings = {key: v for key, v in rules[number].items() if key != "match"}
            settings.setdefault("fused", plain.get("fused"))
            key = f"optim.groups.{number}"
            made.append(build_optimizer(settings, alone[number], allow, key=key))
        return made[0] if len(made) == 1 else CombinedOptimizer(made)

    return ShardedOptimizer(model, make_all) if sharded else make_all(rest)


def _check_rules(
    config: Mapping[str, Any], rules: Sequence[Mapping[str, Any]], allow: Sequence[str]
) -> None:
    """Checks the keys of groups that have no optimizer of their own.

    Raises:
        ConfigError: the optimizer does not support a setting for a group.
    """
    probes = [Parameter(torch.zeros(1)), Parameter(torch.zeros(1, 1))]
    groups = build_optimizer(config, probes, allow).param_groups
    settings = dict.fromkeys(name for group in groups for name in group if name != "params")
    for number, rule in enumerate(rules):
        if not isinstance(rule, Mapping) or "match" not in rule:
            raise ConfigError(f"optim.groups.{number}={rule} must be a mapping with the key match")
        if "name" in rule:
            check_name(f"optim.groups.{number}.name", rule["name"], "parameter group")
        for key in rule:
            if "_target_" not in rule and key not in ("match", "name", *settings):
                raise ConfigError(
                    unknown_key(
                        f"optim.groups.{number}.{key}",
                        [f"optim.groups.{number}.{name}" for name in settings],
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
        config: all keys except `GROUP_KEYS` are the optimizer's arguments.
        parameters: parameters, or parameter groups, which are all kept.
        allow: see `instantiate.build`.
        key: the config key of `config`, for messages.

    Raises:
        ConfigError: the target is not an optimizer, or it does not accept a key.
    """
    trained = [each for each in parameters if isinstance(each, dict) or each.requires_grad]
    # a pipeline process may have only frozen parameters, but an optimizer needs at least one
    trained = trained or [Parameter(torch.empty(0))]
    config = _with_fused_decided(config, trained, allow, key)
    optimizer = instantiate.build(
        key, config, Optimizer, allow, positional=[trained], ignore=GROUP_KEYS
    )
    check_optimizer(optimizer, f"{key}._target_={config['_target_']}")
    return optimizer


def _with_fused_decided(
    config: Mapping[str, Any], trained: Sequence[Any], allow: Sequence[str], key: str
) -> Mapping[str, Any]:
    """Returns `config` with PyTorch's value of `fused`, for the key's `auto`, true or false.

    A config without the key, such as an older run's, keeps PyTorch's default.

    Raises:
        ConfigError: it has another value.
    """
    chosen = config.get("fused")
    if chosen is not None and chosen != AUTO and not isinstance(chosen, bool):
        raise ConfigError(f"{key}.fused={chosen} must be auto, true or false")
    if chosen is True:
        return config  # an optimizer or device without it is an error
    # PyTorch takes False for "one tensor after the other", which is slower than its default on GPUs
    plain = _not_fused(config)
    if chosen != AUTO or instantiate.not_taken(key, plain, ["fused"], allow):
        return plain
    groups = [group for group in trained if isinstance(group, dict)]
    settings = [plain, *groups]
    if any(group.get("foreach") is not None or group.get("differentiable") for group in settings):
        return plain  # the user's choice of another implementation
    parameters = [p for group in groups for p in group["params"]] or trained
    fused = {**plain, "fused": True}
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    return fused if all(_takes_step(fused, *kind, allow, key) for kind in kinds) else plain


def _takes_step(
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    allow: Sequence[str],
    key: str,
) -> bool:
    """Returns whether the optimizer of `config` steps parameters of this device and dtype.

    The optimizer itself is asked: PyTorch 2.11's Adagrad is fused on CPUs only, for example.
    """
    probe = Parameter(torch.zeros(1, device=device, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        instantiate.build(
            key, config, Optimizer, allow, positional=[[probe]], ignore=GROUP_KEYS
        ).step()
    except Exception:
        return False
    return True


def _not_fused(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "fused"}


Sizes = dict[str, int]
"""The bytes of optimizer state of each parameter."""


def optimizer_state(
    config: Mapping[str, Any], allow: Sequence[str] = ()
) -> Callable[[nn.Module], Sizes]:
    """Returns a function that returns the bytes of optimizer state by parameter, for a model.

    See `state_bytes`. The optimizer also steps here, so that one that cannot is an error at once.

    Raises:
        ConfigError: the optimizer fails in a step.
    """
    key = f"optim._target_={config['_target_']}"

    def sizes(net: nn.Module, make: Callable[[Mapping[str, Parameter]], Optimizer]) -> Sizes:
        try:
            return state_bytes(net, make, key)
        except ConfigError:
            raise
        except Exception as error:  # for sparse gradients only, say
            raise ConfigError(f"{key} failed in an optimizer step: {error}") from error

    def of_model(net: nn.Module) -> Sizes:
        def make(parameters: Mapping[str, Parameter]) -> Optimizer:
            outline = cast(HybridModel, _Outline(net, parameters))
            return build_model_optimizer(config, outline, allow)

        return sizes(net, make)

    sizes(nn.Linear(3, 2), lambda parameters: build_optimizer(config, parameters.values(), allow))
    return of_model


class _Outline:
    """A model with small parameters, for `build_model_optimizer`."""

    def __init__(self, net: nn.Module, parameters: Mapping[str, Parameter]) -> None:
        self.options = PipelineOptions()
        self.world = SimpleNamespace(is_main=False)  # logs nothing
        self.net = net
        self.named_parameters = parameters.items
        self.parameters = parameters.values


def build_lr_schedule(
    config: Mapping[str, Any], optimizer: Optimizer, total_steps: int, allow: Sequence[str] = ()
) -> LRScheduler:
    """Returns the schedule that `config["_target_"]` names, stepped once per optimizer step.

    During the first `warmup_steps`, or the first `warmup_share` of all steps, the learning rate
    rises linearly from `1 / (warmup_steps + 1)` of its value. A null `T_max`, `total_iters` or
    `total_steps` becomes the number of steps after the warm-up, and a null `timescale` the number
    of its steps, or 10,000 without a warm-up.

    Raises:
        ConfigError: the target is not a schedule, or it does not accept a key.
    """
    warmup = warmup_steps(config, total_steps)
    if warmup >= total_steps:
        _log.warning(
            "lr_schedule.warmup_steps=%d is not less than the %d steps of the run: the run ends "
            "before the learning rate reaches its full value",
            warmup,
            total_steps,
        )
    left = max(1, total_steps - warmup)
    lengths = {"T_max": left, "total_iters": left, "total_steps": left}
    lengths["timescale"] = warmup or _TIMESCALE
    if "total_iters" not in config:  # it has a default
        del lengths["total_iters"]
    if "epochs" in config:  # the other way to set OneCycleLR's length
        del lengths["total_steps"]
    schedule = instantiate.build(
        "lr_schedule",
        config,
        LRScheduler,
        allow,
        positional=[optimizer],
        defaults=lengths,
        ignore=WARMUP_KEYS,
    )
    check_lr_schedule(schedule)
    if not warmup:
        return schedule
    rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [rise, schedule], milestones=[warmup])


def warmup_steps(config: Mapping[str, Any], total_steps: int) -> int:
    """Returns the number of steps of the warm-up.

    Raises:
        ConfigError: a key is out of range, or both are set.
    """
    warmup, share = (config.get(key) or 0 for key in WARMUP_KEYS)
    if type(warmup) is not int or warmup < 0:
        raise ConfigError(f"lr_schedule.warmup_steps={warmup} must be a number of steps, 0 or more")
    if type(share) not in (int, float) or not 0 <= share < 1:
        raise ConfigError(f"lr_schedule.warmup_share={share} must be a number from 0 to below 1")
    if warmup and share:
        raise ConfigError(
            f"lr_schedule.warmup_steps={warmup} and lr_schedule.warmup_share={share} both set the "
            "warm-up: set lr_schedule.warmup_steps=0, or lr_schedule.warmup_share=0"
        )
    return math.ceil(share * total_steps) if share else warmup


def build_callbacks(config: Config, directory: RunDirectory) -> list[Callback]:
    """Returns the callbacks that `callbacks` names, in its order.

    It is a list of names, or a mapping from names to arguments; with a `_target_`, the name is
    free. The default of an argument `directory` is a folder in the run directory, named after the
    callback.

    Raises:
        ConfigError: a name is unknown, or the callback does not accept a key.
    """
    chosen = config.callbacks or {}
    if not isinstance(chosen, Mapping):
        if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
            raise ConfigError(
                f"callbacks={chosen} must be a list of names, or a mapping such as "
                f"callbacks={{ema: {{decay: 0.999}}}}"
            )
        _check_once("callbacks", chosen)
        chosen = dict.fromkeys(chosen)
    _check_names("callbacks", "callback", chosen)
    callbacks = [
        instantiate.build(
            f"callbacks.{name}",
            _with_target(f"callbacks.{name}", settings, CALLBACKS),
            Callback,
            config.allow_targets,
            defaults={"directory": directory.folder(name)},
        )
        for name, settings in chosen.items()
    ]
    trainer = config.trainer
    evaluates = trainer.eval_every is not None or trainer.eval_every_epochs is not None
    for name, callback in zip(chosen, callbacks, strict=True):
        if callback.needs_evaluations and not evaluates:
            raise ConfigError(
                f"callbacks.{name} compares evaluations, but this run has only one, at its end: "
                f"set trainer.eval_every= to a number of steps, or trainer.eval_every_epochs=1"
            )
    return callbacks


def check_evaluations(callbacks: Iterable[Callback], options: TrainerOptions, steps: int) -> None:
    """Rejects callbacks that compare evaluations in a run that ends before its second one.

    Args:
        callbacks: the callbacks of the run.
        options: the options of the trainer.
        steps: the length of the run.
    """
    every = options.eval_every
    if every is None or every < steps or options.eval_every_epochs is not None:
        return
    for callback in callbacks:
        if callback.needs_evaluations:
            raise ConfigError(
                f"{callback.state_name} compares evaluations, but with trainer.eval_every={every} "
                f"a run of {counted(steps, 'step')} has only one, at its end: "
                + (f"set trainer.eval_every= to less than {steps}" if steps > 1 else "remove it")
            )


def _check_once(key: str, names: Sequence[Any]) -> None:
    if repeated := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"{key} has {repeated[0]} twice: remove one of them")


def build_trackers(
    config: Config, directory: RunDirectory, *, quiet: bool = False, dry_run: bool = False
) -> list[Callback]:
    """Returns the trackers that `monitor` names, and the profiler, for all processes.

    Args:
        config: the config of the run.
        directory: the run directory.
        quiet: leave out the progress on the terminal.
        dry_run: check the keys of all other trackers, user-defined ones too, but do not construct
            them, because some report a run on construction.

    Raises:
        ConfigError: a name is unknown, a tracker does not accept a key, or a package is missing.
    """
    if config.monitor.report:
        observe.check_installed()
    run, chosen = directory.path, config.monitor.chosen()
    _check_names("monitor", "tracker", chosen)
    named = {name: tracker.path for name, tracker in TRACKERS.items()}
    named["profile"] = CALLBACKS["profile"]
    callbacks: list[Callback] = []
    for name, settings in chosen.items():
        key = f"monitor.{name}"
        defaults = {"directory": run, "group": config.monitor.group}
        if name in TRACKERS:
            defaults |= {"title": run.name, "path": run / f"metrics.{name}"}
        elif name == "profile":
            defaults = {"directory": directory.folder(name)}
        arguments = _with_target(key, None if settings is True else settings, named)
        if name == "progress":
            skipped = quiet
        else:
            skipped = dry_run and _makes_tracker(key, arguments, config, defaults)
        if not skipped:
            callbacks.append(
                instantiate.build(key, arguments, Callback, config.allow_targets, defaults=defaults)
            )
    return callbacks


def _makes_tracker(
    key: str, arguments: Mapping[str, Any], config: Config, defaults: Mapping[str, Any]
) -> bool:
    """Returns whether the target of `arguments` is a tracker, or a function that may make one."""
    target, _ = instantiate.check(key, arguments, Callback, config.allow_targets, defaults=defaults)
    return not isinstance(target, type) or issubclass(target, Tracker)


def _check_names(key: str, what: str, chosen: Mapping[str, Any]) -> None:
    """Checks that the mapping has names, and that they are plain."""
    if (target := chosen.get("_target_")) is not None:
        raise ConfigError(
            f"{key}._target_={target}: give the {what} a name, such as "
            f"{key}={{mine: {{_target_: {target}}}}}"
        )
    for name in chosen:
        check_name(key, name, what, folder=key != "trainer.metrics")


def _with_target(key: str, settings: Any, named: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of a callback, with the `_target_` for the name in `key` by default.

    Args:
        key: the group and the name.
        settings: the arguments; None: no arguments.
        named: the group's callbacks by name, as `module:class`.
    """
    if settings is not None and not isinstance(settings, Mapping):
        switch = "true, false or " if key.startswith("monitor.") else ""
        raise ConfigError(f"{key}={settings} must be {switch}a mapping of its arguments")
    arguments: dict[str, Any] = dict(settings or {})
    if "_target_" not in arguments:
        group, _, name = key.partition(".")
        check_choice(group, name, named)
        arguments["_target_"] = named[name].replace(":", ".")
    return arguments
