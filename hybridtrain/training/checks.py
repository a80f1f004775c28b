"""Checks of a `Trainer` before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.data.batch import BatchSource
from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel


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
