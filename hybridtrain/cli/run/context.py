"""The objects of a run, by the stage of its construction: options, prepared run, context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.data import DataSplits, EvalLoader, StreamLoader, TrainLoader, is_stream
from hybridtrain.loop import Callback, TrainerOptions
from hybridtrain.loss import LossFn
from hybridtrain.model import HybridModel
from hybridtrain.options import LoaderOptions, PipelineOptions
from hybridtrain.world import World


@dataclass(frozen=True)
class RunOptions:
    """The objects of a run that need neither processes nor data.

    Attributes:
        pipeline: the options of the model.
        trainer: the options of the trainer.
        loader: the options of the loaders.
        loss_fn: the loss of `trainer.loss`.
        metrics: of an evaluation, by name.
        callbacks: those of the group `callbacks`.
        trackers: those of the group `monitor`; none for a command that does not train.
    """

    pipeline: PipelineOptions
    trainer: TrainerOptions
    loader: LoaderOptions
    loss_fn: LossFn
    metrics: dict[str, Any]
    callbacks: Sequence[Callback]
    trackers: Sequence[Callback] = ()


@dataclass(frozen=True)
class PreparedRun:
    """The objects of a run before its model.

    Attributes:
        settings: of the command.
        config: rank 0's, with a value for every key that was `auto`.
        directory: of the run.
        store: of its checkpoints.
        world: its processes.
        data: its data set.
        build: makes the model.
        example_inputs: of a batch of one replica.
        example_targets: of the same batch.
        options: as `config` has them.
    """

    settings: Settings
    config: Config
    directory: RunDirectory
    store: CheckpointStore
    world: World
    data: DataSplits
    build: Callable[[], nn.Module]
    example_inputs: Any
    example_targets: Any
    options: RunOptions


@dataclass(frozen=True)
class RunContext(PreparedRun):
    """The objects of a run with its model, which is what most commands work with."""

    model: HybridModel

    def train_loader(self) -> TrainLoader | StreamLoader:
        """Returns the loader of the training split."""
        size, seed, options = self.config.data["batch_size"], self.config.seed, self.options.loader
        kind = StreamLoader if is_stream(self.data.train) else TrainLoader
        return kind(self.data.train, size, self.world, seed=seed, options=options)

    def predict_loader(self) -> EvalLoader | None:
        """Returns the loader of inputs without targets; without these, the evaluation's."""
        if self.data.predict is None:
            return self.eval_loader()
        size, options = self.config.data["batch_size"], self.options.loader
        if self.data.predict_collate is not None:
            options = replace(options, collate=self.data.predict_collate)
        return EvalLoader(self.data.predict, size, self.world, options=options, inputs_alone=True)

    def eval_loader(self) -> EvalLoader | None:
        """Returns the loader of the evaluation split, if there is one."""
        if self.data.eval is None:
            return None
        return EvalLoader(
            self.data.eval,
            self.config.data["batch_size"],
            self.world,
            options=self.options.loader,
            classes=self.data.metadata.get("classes"),
        )
