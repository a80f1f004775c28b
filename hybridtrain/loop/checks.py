"""Checks of a `Trainer` before its first step."""

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
from hybridtrain.data import EvalLoader, Loader, TrainLoader, share_of
from hybridtrain.errors import ConfigError, argument, did_you_mean, setting
from hybridtrain.graph import looks_only
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.model import HybridModel

_log = logging.getLogger(__name__)

# The hooks of other libraries' callbacks.
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
    """Checks the kinds of a `Trainer`'s arguments; returns the callbacks as a list.

    Raises:
        ConfigError: names the argument that is something else, and says what to write.
    """
    if not isinstance(model, HybridModel):
        raise ConfigError(
            f"model= must be a HybridModel, not {_named(model)}: write model = HybridModel(net, "
            f"World.from_env()), and make the optimizer over model.parameters()"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer= must be an optimizer, not {_named(optimizer)}: write "
            f"torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    if evaluation is not None:
        check_eval_loader("evaluation=", evaluation)
    for name, metric in _mapping(metrics).items():
        if not all(hasattr(metric, each) for each in ("update", "compute", "reset", "to")):
            raise ConfigError(
                f"{argument('metrics')} has {_named(metric)} as {name!r}, which is not a metric: "
                "write one such as hybridtrain.loss.accuracy(), or any of torchmetrics"
            )
    if isinstance(callbacks, Callback):
        raise ConfigError(f"callbacks= must be a list: write callbacks=[{_named(callbacks)}(...)]")
    checked = list(callbacks)
    for callback in checked:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks= has {_named(callback)}, which is not a Callback: write the call, such "
                f"as callbacks=[EarlyStopping()], and derive your own from hybridtrain.Callback"
            )
        check_hooks(callback)
    return checked


def check_hooks(callback: Callback) -> None:
    """Refuses a callback with a method that looks like a hook and would never be called.

    Raises:
        ConfigError: names the hook that may be meant.
    """
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in hooks and callable(getattr(callback, name)):
            other = _OTHER_HOOKS.get(name)
            meant = f"did you mean {other!r}?" if other else did_you_mean(name, hooks, "hooks")
            raise ConfigError(
                f"{type(callback).__name__}.{name} is not a hook, and is never called: {meant}"
            )


def check_eval_loader(argument: str, data: Any) -> None:
    """Refuses what does not give each sample to one replica.

    Raises:
        ConfigError: names the argument.
    """
    if not isinstance(data, EvalLoader):
        raise ConfigError(
            f"{argument} must be an EvalLoader, not {_named(data)}: write "
            f"EvalLoader(dataset, batch_size=64, world=world)"
        )


def _mapping(metrics: Any) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(
            f"{argument('metrics')} must be a dictionary, not {_named(metrics)}: write "
            f'{argument("metrics")}{{"accuracy": accuracy()}}, with accuracy of hybridtrain.loss'
        )
    return metrics or {}


def _named(value: Any) -> str:
    """Returns what a value is, in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"{'the module ' * isinstance(value, nn.Module)}{type(value).__name__}"


def check_state_names(states: Mapping[str, Any]) -> None:
    """Refuses names of the user's states under which the trainer saves its own.

    Raises:
        ConfigError: names it.
    """
    for name in ("data", "callbacks"):
        if name in states:
            raise ConfigError(
                f"states= has the name {name!r}, under which the trainer saves its own: use another"
            )


def check_last_batch(model: HybridModel, train: Loader) -> None:
    """Refuses what a synchronised batch norm would refuse at the end of the first epoch.

    Raises:
        ConfigError: the last batch has fewer samples than there are micro-batches.
    """
    replicas, last = model.world.logical_replicas, _last_batch(train)
    if model.options.sync_batch_norm and last and last // replicas < model.options.chunks:
        raise ConfigError(
            f"the last batch of an epoch has {last} samples, which are not enough for "
            f"{setting('chunks', model.options.chunks)} micro-batches on each of {replicas} "
            f"replicas, as {setting('sync_batch_norm', True)} needs: set "
            f"{setting('drop_last', True)}, or lower {argument('chunks')}"
        )


def _last_batch(train: Loader) -> int:
    """Returns the samples of a short last batch of an epoch; 0: none, or not known."""
    if not isinstance(train, TrainLoader) or train.options.drop_last:
        return 0
    return train.samples % train.batch_size


@contextmanager
def batch_norms_watched(model: HybridModel, train: Loader) -> Iterator[None]:
    """Runs the first step, and then refuses a last batch that a batch norm will fail in.

    One with a micro-batch of 1 sample, that is, if the norm's input has 1 value per channel and
    sample. Which it has is seen in the step. A collective call.

    Raises:
        ConfigError: names the norm, the numbers and the ways out.
    """
    last, world, chunks = _last_batch(train), model.world, model.options.chunks
    replicas = world.logical_replicas
    shares = [share_of(last, replica, replicas) for replica in range(replicas)]
    sizes = [max(1, share.stop - share.start) for share in shares]  # without samples it repeats one
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

    # a hook of all modules: those of one module would be part of what a graph depends on
    hook = None if model.options.compile else register_module_forward_pre_hook(looks_only(see))
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
    norms_fail = {name: one for part in world.gather(fails) for name, one in part.items()}
    text = (
        f"the last batch of an epoch has {last} samples, so that a micro-batch of it has 1 "
        f"(replicas: {replicas}, {setting('chunks', chunks)})"
    )
    way_out = (
        f"set {setting('drop_last', True)}, lower {argument('chunks')}, or choose another "
        f"{argument('batch_size')}"
    )
    if single := [name for name, one in norms_fail.items() if one]:
        raise ConfigError(
            f"{text}; the batch norm {single[0]} gets 1 value per channel of it and would fail at "
            f"the end of the epoch: {way_out}"
        )
    norms = any(isinstance(module, _BatchNorm) and module.training for module in names)
    if norms and not norms_fail and world.is_main:  # compiled, or in a graph without modules
        _log.warning("%s; a batch norm may refuse it: %s", text, way_out)
