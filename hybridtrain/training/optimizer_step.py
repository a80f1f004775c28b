"""One optimizer step: gradients, their norm, whether the optimizer may step, the schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.data.batch import Batch
from hybridtrain.launch.activity import activity
from hybridtrain.loss_weights import StepWeights
from hybridtrain.losses import LossFn
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.trainer_options import TrainerOptions
from hybridtrain.training.finite_check import FiniteCheck
from hybridtrain.training.optimizer_check import OptimizerCheck
from hybridtrain.training.run_stats import RunStats


class OptimizerStep:
    """Takes the optimizer steps of a run, all replicas alike.

    Args:
        model: the model.
        optimizer: over its parameters.
        loss_fn: of a micro-batch.
        options: of the run.
        scaler: scales the loss, for fp16.
        lr_schedule: stepped once per step.
        stats: receives losses and timelines.

    Attributes:
        finite: decides whether the optimizer may step.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer,
        loss_fn: LossFn,
        options: TrainerOptions,
        scaler: GradScaler,
        lr_schedule: LRScheduler | None,
        stats: RunStats,
    ) -> None:
        self.finite = FiniteCheck(
            model, scaler, options.max_skipped, adaptive_scale=options.loss_scale is None
        )
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._options = options
        self._scaler = scaler
        self._lr_schedule = lr_schedule
        self._stats = stats
        self._check = OptimizerCheck(model, optimizer)

    def take(
        self,
        number: int,
        batches: Sequence[Batch],
        train: Callable[[StepWeights], list[TrainStepResult]],
        on_gradients: Callable[[], None],
    ) -> torch.Tensor:
        """Takes the step `number`; returns the gradients' norm before clipping.

        Args:
            number: counted from 1.
            batches: this replica's.
            train: forward, loss and backward of all `batches`, given their weights in the step.
            on_gradients: called when the gradients are there, unscaled and not clipped.

        Raises:
            DivergedError: too many consecutive steps were skipped.
        """
        model, finite = self._model, self.finite
        weights = model.step_weights(
            [(batch.inputs, batch.targets) for batch in batches],
            self._loss_fn,
            samples=[batch.samples for batch in batches],
            total=sum(batch.total for batch in batches),
        )
        finite.begin_step()
        outs = train(weights)
        self._stats.record(outs[-1].timeline)
        self._check.drop_gradients_left_out()
        model.unscale_(self._scaler, self._optimizer)
        on_gradients()
        norm = model.grad_norm()
        losses = [out.loss for out in outs]
        try:
            if not weights.total:  # no target of any replica counts
                finite.skip_empty(number)
            elif finite.allows_step(number, norm, batches, losses, self._loss_fn):
                for out in outs:
                    self._stats.add(out.loss, out.count)
                if self._options.clip_norm is not None:
                    model.pipeline.clip_grads_with_norm_(self._options.clip_norm, norm)
                activity.now(f"step {number}: optimizer")
                self._scaler.step(self._optimizer)
        finally:  # or the scaler would refuse the first step of another fit
            self._scaler.update(self._options.loss_scale)
        if self._lr_schedule is not None:
            self._lr_schedule.step()  # also where a step is skipped: it is a function of the step
        self._optimizer.zero_grad()
        return norm

    def replay_schedule(self, steps: int) -> None:
        """Steps the learning-rate schedule from 0 again, for a run that is resumed.

        It is not loaded, since its parameters and length are this run's.
        """
        if self._lr_schedule is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
            for _ in range(steps):
                self._lr_schedule.step()
