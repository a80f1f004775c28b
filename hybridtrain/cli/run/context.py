"""The objects of a run at each stage of construction: options, prepared run, context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

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
        loss_fn: the loss of `trainer.loss`; None if the command uses none, see `PARTS`.
        metrics: the evaluation metrics, by name; empty if the command uses none.
        callbacks: the callbacks of the group `callbacks`; empty if the command uses none.
        trackers: the trackers of the group `monitor`; none for commands that do not train.
    """

    pipeline: PipelineOptions
    trainer: TrainerOptions
    loader: LoaderOptions
    loss_fn: LossFn | None
    metrics: dict[str, Any]
    callbacks: Sequence[Callback]
    trackers: Sequence[Callback] = ()


@dataclass(frozen=True)
class PreparedRun:
    """The objects of a run before its model.

    Attributes:
        settings: the settings of the command.
        config: rank 0's config, with values for `auto` keys.
        directory: the run directory.
        store: the run's checkpoints.
        world: its processes.
        data: its data set.
        build: builds the model.
        example_inputs: the inputs of one replica's batch.
        example_targets: the targets of the same batch.
        options: the options of `config`.
        class_weights: the class weights of the loss, or None.
        checkpoint: the checkpoint that a command on a trained run reads; None for other commands.
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
    class_weights: Tensor | None
    checkpoint: Path | None


@dataclass(frozen=True)
class RunContext(PreparedRun):
    """The objects of a run with its model; most commands use this."""

    model: HybridModel

    def train_loader(self) -> TrainLoader | StreamLoader:
        """Returns the loader of the training split."""
        size, seed, options = self.config.data["batch_size"], self.config.seed, self.options.loader
        kind = StreamLoader if is_stream(self.data.train) else TrainLoader
        return kind(self.data.train, size, self.world, seed=seed, options=options)

    def predict_loader(self) -> EvalLoader | None:
        """Returns the loader of unlabelled inputs, or the evaluation's loader if there are none."""
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
            tokenizer=self.data.tokenizer,
        )
