"""Checks that a `Trainer` runs before its first step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from hybridtrain._base.microbatch import chunk_sizes
from hybridtrain.data import EvalLoader, Loader, TrainLoader
from hybridtrain.errors import ConfigError, argument, did_you_mean, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.model import HybridModel

_log = logging.getLogger(__name__)

# Hooks of other libraries' callbacks.
_OTHER_HOOKS = {
    **dict.fromkeys(["on_train_start", "on_train_begin", "on_fit_start"], "on_start"),
    **dict.fromkeys(["on_train_batch_end", "on_batch_end", "on_step_end"], "on_step"),
    **dict.fromkeys(["on_before_optimizer_step", "on_after_backward"], "on_gradients"),
    **dict.fromkeys(["on_validation_end", "on_validation_epoch_end", "on_test_end"], "on_evaluate"),
    **dict.fromkeys(["on_validation_batch_end", "on_prediction_step"], "on_evaluation_batch"),
    **dict.fromkeys(["on_train_end", "on_fit_end"], "on_end"),
    **dict.fromkeys(["on_save_checkpoint", "on_load_checkpoint"], "state_dict"),
}


def check_arguments(
    model: Any, optimizer: Any, evaluation: Any, metrics: Any, callbacks: Any
) -> list[Callback]:
    """Checks the types of a `Trainer`'s arguments; returns the callbacks as a list.

    Raises:
        ConfigError: an argument has the wrong type; names it and says what to pass.
    """
    if not isinstance(model, HybridModel):
        raise ConfigError(
            f"model= must be a HybridModel, not {_named(model)}: use model = HybridModel(net, "
            "World.from_env()), and build the optimizer from model.parameters()"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer= must be an optimizer, not {_named(optimizer)}: use "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    if evaluation is not None:
        check_eval_loader("evaluation=", evaluation)
    for name, metric in _mapping(metrics).items():
        if not all(hasattr(metric, each) for each in ("update", "compute", "reset", "to")):
            raise ConfigError(
                f"{argument('metrics')} has {_named(metric)} as {name!r}, which is not a metric: "
                "use one such as hybridtrain.loss.accuracy(), or any from torchmetrics"
            )
    if isinstance(callbacks, Callback):
        raise ConfigError(f"callbacks= must be a list: use callbacks=[{_named(callbacks)}(...)]")
    checked = list(callbacks)
    for callback in checked:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks= has {_named(callback)}, which is not a Callback: pass an instance, "
                "such as callbacks=[EarlyStopping()], and derive your own from "
                "hybridtrain.Callback"
            )
        check_hooks(callback)
    return checked


def check_hooks(callback: Callback) -> None:
    """Rejects a callback with a method that looks like a hook but would never be called.

    Raises:
        ConfigError: a method is not a hook; names the closest hook.
    """
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in hooks and callable(getattr(callback, name)):
            other = _OTHER_HOOKS.get(name)
            meant = f"did you mean {other!r}?" if other else did_you_mean(name, hooks, "hooks")
            raise ConfigError(
                f"{type(callback).__name__}.{name} is not a hook and would never be called: {meant}"
            )


def check_eval_loader(argument: str, data: Any) -> None:
    """Rejects an evaluation loader that does not give each sample to exactly one replica.

    Raises:
        ConfigError: an argument has the wrong type; names it.
    """
    if not isinstance(data, EvalLoader):
        raise ConfigError(
            f"{argument} must be an EvalLoader, not {_named(data)}: use EvalLoader(dataset, "
            "batch_size=64, world=world)"
        )


def _mapping(metrics: Any) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(
            f"{argument('metrics')} must be a dictionary, not {_named(metrics)}: use "
            f'{argument("metrics")}{{"accuracy": accuracy()}}, with accuracy from hybridtrain.loss'
        )
    return metrics or {}


def _named(value: Any) -> str:
    """Describes the type of a value in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"{'the module ' * isinstance(value, nn.Module)}{type(value).__name__}"


def check_state_names(states: Mapping[str, Any]) -> None:
    """Rejects names of user states that the trainer uses for its own.

    Raises:
        ConfigError: a name is taken; names it.
    """
    for name in ("data", "callbacks"):
        if name in states:
            raise ConfigError(
                f"states= uses the name {name!r}, which the trainer reserves: choose another"
            )


def check_last_batch(model: HybridModel, train: Loader) -> None:
    """Rejects a last batch that would make synchronized batch norm fail at the end of the epoch.

    Raises:
        ConfigError: the last batch has fewer samples than there are micro-batches.
    """
    replicas, last = model.world.logical_replicas, _last_batch(train)
    least = min(model.world.samples_by_replica(last))
    if model.options.sync_batch_norm and last and least < model.options.chunks:
        raise ConfigError(
            f"{setting('sync_batch_norm', True)} needs at least one sample per micro-batch, but "
            f"the last batch of an epoch has {last} samples for "
            f"{setting('chunks', model.options.chunks)} on each of {replicas} replicas: set "
            f"{setting('drop_last', True)}, or lower {argument('chunks')}"
        )


def _last_batch(train: Loader) -> int:
    """Returns the size of a short last batch of an epoch; 0 if there is none or it is unknown."""
    if not isinstance(train, TrainLoader) or train.options.drop_last:
        return 0
    return train.samples % train.batch_size


@contextmanager
def batch_norms_watched(model: HybridModel, train: Loader) -> Iterator[None]:
    """Runs the first step, then rejects a last batch in which batch norm would fail.

    Batch norm fails on a micro-batch of 1 sample if its input has 1 value per channel and sample,
    which is observed during the step. A collective call.

    Raises:
        ConfigError: a batch norm would fail; names it, the numbers and the options.
    """
    last, world, chunks = _last_batch(train), model.world, model.options.chunks
    replicas = world.logical_replicas
    # a replica without samples repeats one
    sizes = [max(1, samples) for samples in world.samples_by_replica(last)]
    synchronised = model.options.sync_batch_norm and world.data_parallel_size > 1
    if not last or synchronised or min(chunk_sizes(size, chunks)[-1] for size in sizes) > 1:
        yield
        return
    names = {module: name for name, module in model.net.named_modules()}
    fails: dict[str, bool] = {}

    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, _BatchNorm) and module.training and inputs and module in names:
            single = inputs[0].shape[1:].numel() == inputs[0].shape[1]
            fails[names[module]] = single and fails.get(names[module], True)

    # a global module hook, which needs no handle for each norm
    hook = None if model.options.compile else register_module_forward_pre_hook(see)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
    norms_fail = {name: one for part in world.gather(fails) for name, one in part.items()}
    text = (
        f"the last batch of an epoch has {last} samples, so one of its micro-batches has only 1 "
        f"(replicas: {replicas}, {setting('chunks', chunks)})"
    )
    way_out = (
        f"set {setting('drop_last', True)}, lower {argument('chunks')}, or choose another "
        f"{argument('batch_size')}"
    )
    if single := [name for name, one in norms_fail.items() if one]:
        raise ConfigError(
            f"{text}; the batch norm {single[0]} would get 1 value per channel and fail at the "
            f"end of the epoch: {way_out}"
        )
    norms = any(isinstance(module, _BatchNorm) and module.training for module in names)
    if norms and not norms_fail and world.is_main:  # compiled, or in a graph without modules
        _log.warning("%s; batch norm may fail on it: %s", text, way_out)
