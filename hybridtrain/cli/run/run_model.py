"""The model of a run on meta tensors, and a batch of its data: the inputs of a prediction."""

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
from hybridtrain.options import OptimizerState
from hybridtrain.partitioning import LossOfStep
from hybridtrain.price import StepWork

SAMPLES = 16
"""Samples in the micro-batch used to estimate layer costs and to time data loading."""


@dataclass(frozen=True)
class RunModel:
    """The parts of a run that a prediction needs.

    Attributes:
        net: the model on meta tensors.
        inputs: the inputs of a micro-batch.
        load_ms: the time to load one sample.
        loss: the loss on the targets of that micro-batch.
    """

    net: nn.Module
    inputs: Any
    load_ms: float
    loss: LossOfStep

    def work(self, config: Config, tensors: OptimizerState) -> StepWork:
        """Returns the work of a step, with this size of the optimizer's state."""
        batch = Batch(self.inputs, None, 1, 1)
        return StepWork(
            config.data["batch_size"],
            config.trainer.accumulate,
            tensors,
            self.load_ms,
            batch.tokens,
        )


def model_of_run(config: Config, data: DataSplits) -> RunModel:
    """Returns the model of a run on meta tensors, and a batch of its data.

    Raises:
        ConfigError: a batch has one sample.
    """
    count = min(SAMPLES, config.data["batch_size"])
    if count < 2:
        raise ConfigError("data.batch_size=1: planning needs a batch of at least 2 samples")
    example_batch(data.train, count, data.collate)  # untimed, because the first call opens files
    begin = time.perf_counter()
    example = example_batch(data.train, count, data.collate)
    load_ms = (time.perf_counter() - begin) / count * 1e3
    inputs, targets = largest_batch(data.train, count, data.collate, example)

    net = construct_on_meta(lambda: build_model(config, data))
    loss = LossOfStep(resolve(build_loss(config), net).function, targets, config.pipeline.head)
    return RunModel(net, inputs, load_ms, loss)
