"""The model of a run without values, and a batch of its data: what a price needs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybridtrain._base.construction import construct_on_meta
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.components import build_loss, build_model
from hybridtrain.data import Batch, DataSplits, example_batch, largest_batch
from hybridtrain.errors import ConfigError
from hybridtrain.loss import resolve
from hybridtrain.partitioning import LossOfStep
from hybridtrain.price import StepWork

SAMPLES = 16
"""Samples of a micro-batch that layers are priced with, and that are loaded to time the data."""


@dataclass(frozen=True)
class RunModel:
    """The parts of a run that a price needs.

    Attributes:
        net: the model without values.
        inputs: of a micro-batch that layers are looked at with.
        load_ms: of a sample.
        loss: on the targets of that micro-batch.
    """

    net: nn.Module
    inputs: Any
    load_ms: float
    loss: LossOfStep

    def work(self, config: Config, tensors: int) -> StepWork:
        """Returns the work of a step, with so many tensors of the optimizer for a parameter."""
        batch = Batch(self.inputs, None, 1, 1)
        return StepWork(
            config.data["batch_size"],
            config.trainer.accumulate,
            tensors,
            self.load_ms,
            batch.tokens,
        )


def model_of_run(config: Config, data: DataSplits) -> RunModel:
    """Returns the model of a run, without values, and a batch of its data.

    Raises:
        ConfigError: a batch has one sample.
    """
    count = min(SAMPLES, config.data["batch_size"])
    if count < 2:
        raise ConfigError("data.batch_size=1 leaves nothing to plan: it needs at least 2 samples")
    example_batch(data.train, count, data.collate)  # the first time opens files
    begin = time.perf_counter()
    example = example_batch(data.train, count, data.collate)
    load_ms = (time.perf_counter() - begin) / count * 1e3
    inputs, targets = largest_batch(data.train, count, data.collate, example)

    net = construct_on_meta(lambda: build_model(config, data))
    loss = LossOfStep(resolve(build_loss(config), net).function, targets)
    return RunModel(net, inputs, load_ms, loss)
