"""The generic loop: steps, logging, evaluation, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.checkpoint import state
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.data.loader import Batch, EvalLoader, TrainLoader
from hybridtrain.errors import ConfigError
from hybridtrain.evaluation import evaluate
from hybridtrain.losses import LossFn
from hybridtrain.model import HybridModel
from hybridtrain.monitor import Monitor, Monitors, Throughput
from hybridtrain.run_stats import RunStats


@dataclass(frozen=True)
class TrainerOptions:
    """How long to train, and at which steps to log, evaluate and save.

    Each `..._every` also takes place at the last step.

    Raises:
        ConfigError: a value is out of its range; the message names the argument.
    """

    steps: int | None = None
    """Optimizer steps in total; give this or `epochs`."""
    epochs: int | None = None
    """Passes over the data in total."""
    accumulate: int = 1
    """Batches whose gradients an optimizer step adds up. A step does not reach into the next
    epoch."""
    clip_norm: float | None = None
    """Largest norm of the gradient, over all stages."""
    loss_scale: float | None = None
    """A fixed scale for the `scaler`; None: it adapts the scale."""
    log_every: int = 10
    """Steps between two logged lines."""
    eval_every: int | None = None
    """Steps between two evaluations; None: only at the end."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None: only at the end."""
    timeline_every: int | None = None
    """Steps between two timelines; None: only at the end."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"give exactly one of steps= and epochs=, not steps={self.steps} and "
                f"epochs={self.epochs}"
            )
        for name, value in vars(self).items():
            if value is None and name not in ("accumulate", "log_every"):
                continue
            if name in ("clip_norm", "loss_scale"):
                if not value > 0:
                    raise ConfigError(f"{name}={value} must be positive")
            elif type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value} must be a whole number of at least 1")

    def total_steps(self, batches_per_epoch: int) -> int:
        """Returns the number of optimizer steps of the whole run."""
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        return self.epochs * -(-batches_per_epoch // self.accumulate)


class Trainer:
    """Trains a `HybridModel`. Every process runs it; rank 0 alone has monitors and a store.

    Args:
        model: what is trained.
        optimizer: over `model.parameters()`.
        loss_fn: `loss_fn(output, targets)`, the mean over the rows of a micro-batch.
        train: the training batches.
        evaluation: the batches to evaluate on.
        metrics: by name, what to evaluate besides the loss; see `evaluate`.
        lr_schedule: stepped once an optimizer step.
        steps: optimizer steps in all; give this or `epochs`.
        epochs: passes over the data in all.
        accumulate: batches that an optimizer step adds up.
        clip_norm: largest norm of the gradient, over all stages.
        scaler: scales the loss, for fp16; a step whose gradients overflow is skipped, by all
            replicas alike, since they share the averaged gradients.
        loss_scale: a fixed scale for `scaler`; None: it adapts the scale.
        log_every: steps between two logged lines.
        eval_every: steps between two evaluations; None: only at the end.
        store: where checkpoints go; None: there are none.
        checkpoint_every: steps between two checkpoints; None: only at the end.
        timeline_every: steps between two timelines; None: only at the end.
        monitor: whom to tell; None: nobody.

    TraceGuards:
        step: optimizer steps done.
        samples: rows trained on so far, over all replicas.
        epoch, batch: the next batch.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer,
        loss_fn: LossFn,
        train: TrainLoader,
        options: TrainerOptions | None = None,
        *,
        evaluation: EvalLoader | None = None,
        metrics: Mapping[str, Any] | None = None,
        lr_schedule: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        store: CheckpointStore | None = None,
        monitor: Monitor | None = None,
        **settings: Any,
    ) -> None:
        options = replace(options, **settings) if options else TrainerOptions(**settings)
        self.model = model
        self.world = model.world
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.loss_fn = loss_fn
        self.train = train
        self.evaluation = evaluation
        self.metrics = metrics or {}
        self.total_steps = options.total_steps(train.batches_per_epoch)
        self._by_epochs = options.epochs is not None
        self.accumulate = options.accumulate
        self.clip_norm = options.clip_norm
        self.scaler = scaler
        self.loss_scale = options.loss_scale
        self.log_every = options.log_every
        self.eval_every = options.eval_every
        self.store = store
        self.checkpoint_every = options.checkpoint_every
        self.timeline_every = options.timeline_every or self.total_steps
        self.monitor = monitor or Monitors([])
        self.step = 0
        self.samples = 0
        self.epoch = 0
        self.batch = 0
        self._measured = RunStats(model)
        self._last_eval: tuple[int, dict[str, float]] | None = None
        self._checkpoint: Path | None = None
        self._checkpoint_step: int | None = None
        self._resumed_from: Path | None = None

    def fit(self, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Trains up to `total_steps`, then evaluates and saves; returns the `summary`."""
        if not self.model.training:  # or a part that the user keeps in eval mode would leave it
            self.model.train()
        self.monitor.start(total_steps=self.total_steps, first_step=self.step, texts=texts or {})
        stream = self.train.stream(self.epoch, self.batch)
        self.throughput = Throughput()
        try:
            while self.step < self.total_steps:
                batches = [next(stream) for _ in range(self._batches_of_step())]
                logged = self._is_due(self.log_every)
                drawn = self._is_due(self.timeline_every)
                self._accumulate_gradients(batches, trace=logged or drawn)
                norm = self._clip(needed=logged)
                self._optimizer_step()
                lr = self.optimizer.param_groups[0]["lr"]
                if self.lr_schedule is not None:
                    self.lr_schedule.step()
                self.optimizer.zero_grad()
                self._advance(batches)
                if logged:
                    self._log(lr, norm)
                if drawn:
                    self.monitor.timeline(self.step, *self._measured.timelines())
                self._pause_if_due()
            if self.evaluation is not None:
                self.evaluate()
            self.save()
        finally:
            stream.close()
            self.monitor.close()
        return self.summary()

    def _pause_if_due(self) -> None:
        if self.step == self.total_steps:  # the last of each is in `fit`
            return
        evaluates = self.eval_every and self.step % self.eval_every == 0
        saves = self.checkpoint_every and self.step % self.checkpoint_every == 0
        if not evaluates and not saves:
            return
        with self.throughput.pause():
            if evaluates:
                self.evaluate()
            if saves:
                self.save()

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model as it is and reports it; see `evaluate`."""
        assert self.evaluation is not None
        result = evaluate(self.model, self.evaluation, self.loss_fn, self.metrics)
        self._last_eval = self.step, result
        values = {f"eval/{name}": value for name, value in result.items() if name != "samples"}
        self.monitor.scalars(self.step, values)
        return result

    def save(self) -> None:
        """Writes a checkpoint of this step on rank 0, unless it is what was resumed from."""
        if self.store is None or self.step == self._checkpoint_step:
            return
        if self.world.is_main:
            files = state.writers(self.model, self.optimizer, self.state_dict())
            self._checkpoint = self.store.save(self.step, files)
        self.world.broadcast(None)  # the others wait here, where they may wait long
        self._checkpoint_step = self.step

    def resume(self, path: Path) -> None:
        """Goes on from the checkpoint at `path`, of any split and number of processes.

        Weights and moments are the checkpoint's. Learning rate, its schedule and the other options
        are those that this trainer was made with, so that a run may be made longer or be tuned.
        """
        self.load_state_dict(state.restore(path, self.model, self.optimizer))
        if self.lr_schedule is not None:
            # a schedule is a function of the step: run through, so that it is this config's, and
            # of the run's length now
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
                for _ in range(self.step):
                    self.lr_schedule.step()
        self._resumed_from = self._checkpoint = path
        self._checkpoint_step = self.step

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, in JSON's types; the model and the optimizer have their own."""
        return {
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch,
            "row": self.batch * self.train.batch_size,
            "rows_per_step": self.train.batch_size * self.accumulate,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Puts the run where `state_dict` found it; with another batch size, at the same row."""
        rows_per_step = self.train.batch_size * self.accumulate
        if self._by_epochs and saved["rows_per_step"] != rows_per_step:
            raise ConfigError(
                f"data.batch_size x trainer.accumulate is {rows_per_step}, and the checkpoint was "
                f"made with {saved['rows_per_step']}: a run that is counted in epochs keeps it; "
                f"set trainer.steps, or choose another run_name"
            )
        self.step = saved["step"]
        self.samples = saved["samples"]
        self.epoch = saved["epoch"]
        self.batch = saved["row"] // self.train.batch_size
        if self.batch >= self.train.batches_per_epoch:  # the rest is what drop_last leaves out
            self.epoch, self.batch = self.epoch + 1, 0
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(saved["scaler"])

    def summary(self) -> dict[str, Any]:
        """What the run gave, as it goes into `summary.json`."""
        speed = self.throughput.summary()
        return {
            "steps": self.step,
            "samples": self.samples,
            "train_loss": self._measured.loss,
            "eval": self._last_eval[1] if self._last_eval else None,
            "samples_per_second": speed.samples_per_second,
            "step_ms": {"p50": speed.step_ms_p50, "p95": speed.step_ms_p95},
            "bubble_fraction": self._measured.bubble,
            "stages": self._measured.stages(self.optimizer),
            "world": {
                "processes": self.world.size,
                "nb_part": self.world.nb_part,
                "engine": "local",
                "backend": self.world.backend,
            },
            "checkpoint": self._checkpoint and str(self._checkpoint),
            "resumed_from": self._resumed_from and str(self._resumed_from),
        }

    def _batches_of_step(self) -> int:
        # an optimizer step does not reach into the next epoch
        return min(self.accumulate, self.train.batches_per_epoch - self.batch)

    def _is_due(self, every: int) -> bool:
        return (self.step + 1) % every == 0 or self.step + 1 == self.total_steps

    def _accumulate_gradients(self, batches: Sequence[Batch], trace: bool) -> None:
        total = sum(batch.total for batch in batches)
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            out = self.model.train_step(
                batch.inputs,
                batch.targets,
                self.loss_fn,
                weight=batch.samples * self.world.size / total,
                sync=last,
                scale_loss=None if self.scaler is None else self.scaler.scale,
                trace=trace and last,
            )
            self._measured.add(out.loss, batch.samples, out.trace)

    def _clip(self, needed: bool) -> torch.Tensor | None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            return clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if needed:
            return get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return None

    def _optimizer_step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update(self.loss_scale)

    def _advance(self, batches: Sequence[Batch]) -> None:
        rows = sum(batch.total for batch in batches)
        self.step += 1
        self.samples += rows
        self.batch += len(batches)
        if self.batch == self.train.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
        self.throughput.tick(rows)
        self.monitor.step(self.step, rows)

    def _log(self, lr: float, norm: torch.Tensor | None) -> None:
        speed = self.throughput.read()
        values = {
            "train/loss": self._measured.read_loss(),
            "train/lr": lr,
            "train/samples_per_second": speed.samples_per_second,
            "train/step_ms": speed.step_ms,
            "train/epoch": self.epoch + self.batch / self.train.batches_per_epoch,
        }
        if norm is not None:
            values["train/grad_norm"] = float(norm)
        if self.scaler is not None:
            values["train/loss_scale"] = self.scaler.get_scale()
        values |= self._measured.read_stages(self.optimizer)
        self.monitor.scalars(self.step, values)
