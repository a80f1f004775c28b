"""One optimizer step: gradients, their norm, whether the optimizer may step, the schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.data.batch import Batch
from hybridtrain.errors import ConfigError
from hybridtrain.launch.activity import activity
from hybridtrain.losses import StepWeights
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.trainer_options import TrainerOptions
from hybridtrain.training.finite_check import FiniteCheck
from hybridtrain.training.optimizer_check import OptimizerCheck
from hybridtrain.training.run_stats import RunStats

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer


class OptimizerStep:
    """Takes the optimizer steps of a run, all replicas alike.

    Args:
        model: the model.
        optimizer: over its parameters.
        scaler: scales the loss, for fp16.
        options: of the run.

    Attributes:
        finite: decides whether the optimizer may step.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer,
        scaler: GradScaler,
        options: TrainerOptions,
    ) -> None:
        self.finite = FiniteCheck(
            model, scaler, options.max_skipped, adaptive_scale=options.loss_scale is None
        )
        self._check = OptimizerCheck(model, optimizer)

    def take(
        self,
        trainer: Trainer,
        batches: Sequence[Batch],
        train: Callable[[StepWeights], list[TrainStepResult]],
        on_gradients: Callable[[], None],
        stats: RunStats,
    ) -> torch.Tensor:
        """Takes the next step of `trainer`; returns the gradients' norm before clipping.

        Args:
            trainer: its model, loss, optimizer, scaler and schedule are used; nothing is kept.
            batches: this replica's.
            train: forward, loss and backward of all `batches`, given their weights in the step.
            on_gradients: called when the gradients are there, unscaled and not clipped.
            stats: receives losses and the timeline.

        Raises:
            DivergedError: too many consecutive steps were skipped.
            ConfigError: `train` has not returned a result for each batch.
        """
        model, finite, scaler, options = trainer.model, self.finite, trainer.scaler, trainer.options
        number = trainer.step + 1
        weights = model.step_weights(
            [(batch.inputs, batch.targets) for batch in batches],
            trainer.loss_fn,
            samples=[batch.samples for batch in batches],
            total=sum(batch.total for batch in batches),
        )
        finite.begin_step()
        outs = train(weights)
        if len(outs) != len(batches):
            raise ConfigError(
                f"training_step has returned {len(outs)} results for {len(batches)} batches: "
                f"return that of train_step for each batch"
            )
        stats.record(outs[-1].timeline)
        self._check.drop_gradients_left_out()
        losses = [out.loss for out in outs]
        model.unscale_(scaler, trainer.optimizer)
        try:
            on_gradients()
            norm = model.grad_norm()
            if not weights.total:  # no target of any replica counts
                finite.skip_empty(number)
            elif finite.allows_step(number, norm, batches, losses, trainer.loss_fn):
                for out in outs:
                    stats.add(out.loss, out.count)
                if options.clip_norm is not None:
                    model.pipeline.clip_grads_with_norm_(options.clip_norm, norm)
                activity.now(f"step {number}: optimizer")
                scaler.step(trainer.optimizer)
        finally:  # or the scaler would refuse the first step of another fit
            scaler.update(options.loss_scale)
        if trainer.lr_schedule is not None:
            trainer.lr_schedule.step()  # also where a step is skipped: a function of the step
        trainer.optimizer.zero_grad()
        return norm


def replay(lr_schedule: LRScheduler, steps: int) -> None:
    """Steps a learning-rate schedule from 0 again, for a run that is resumed.

    It is not loaded, since its parameters and length are this run's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
        for _ in range(steps):
            lr_schedule.step()
