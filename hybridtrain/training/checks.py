"""Checks of a `Trainer` before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hybridtrain.callbacks.base import Callback
from hybridtrain.data.batch import BatchSource
from hybridtrain.data.loader import EvalLoader
from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel


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
                f"metrics= has {_named(metric)} as {name!r}, which is not a metric: write one such "
                f"as hybridtrain.losses.accuracy(), or any of torchmetrics"
            )
    if isinstance(callbacks, Callback):
        raise ConfigError(f"callbacks= must be a list: write callbacks=[{_named(callbacks)}(...)]")
    found = list(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks= has {_named(callback)}, which is not a Callback: write the call, such "
                f"as callbacks=[EarlyStopping()], and derive your own from hybridtrain.Callback"
            )
    return found


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
            f'metrics= must be a dictionary, not {_named(metrics)}: write metrics={{"accuracy": '
            f"accuracy()}}, with accuracy of hybridtrain.losses"
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


def check_last_batch(model: HybridModel, train: BatchSource) -> None:
    """Refuses what a synchronised batch norm would refuse at the end of the first epoch.

    Raises:
        ConfigError: the last batch has fewer samples than there are micro-batches.
    """
    samples = getattr(train, "samples", None)
    drops = getattr(getattr(train, "options", None), "drop_last", True)
    if not model.options.sync_batch_norm or drops or samples is None:
        return
    replicas = model.world.replicas
    last = samples % train.batch_size
    if last and last // replicas < model.options.chunks:
        raise ConfigError(
            f"the last batch of an epoch has {last} samples, which are not enough for "
            f"chunks={model.options.chunks} micro-batches on each of {replicas} replicas, as "
            f"sync_batch_norm=true needs: set drop_last=true, or lower chunks="
        )
