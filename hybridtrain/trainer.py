"""The training loop: steps, logging, evaluation, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.checkpoint import saving, state
from hybridtrain.checkpoint.progress import check_progress
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.data.loader import Batch, EvalLoader, TrainLoader
from hybridtrain.errors import ConfigError
from hybridtrain.evaluation import evaluate
from hybridtrain.losses import LossFn
from hybridtrain.model import HybridModel
from hybridtrain.monitor import Monitor, Throughput
from hybridtrain.run_stats import RunStats

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful
    from torchmetrics import Metric


@dataclass(frozen=True)
class TrainerOptions:
    """The length of a training run, and the steps at which to log, evaluate and save.

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
            if name not in ("clip_norm", "loss_scale"):
                if type(value) is not int or value < 1:
                    raise ConfigError(f"{name}={value} must be a whole number of at least 1")
            elif not value > 0:
                raise ConfigError(f"{name}={value} must be positive")

    def total_steps(self, batches_per_epoch: int) -> int:
        """Returns the number of optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 0) * -(-batches_per_epoch // self.accumulate)


class Trainer:
    """Trains a `HybridModel`. Every process runs it, with a store; rank 0 alone has a monitor.

    Args:
        model: the model to train.
        optimizer: over `model.parameters()`.
        loss_fn: as in `HybridModel.train_step`. A step in which nothing counts is skipped.
        train: the training batches.
        options: see `TrainerOptions`.
        evaluation: the batches to evaluate on.
        metrics: by name, what to evaluate besides the loss; see `evaluate`.
        lr_schedule: stepped once per optimizer step.
        scaler: scales the loss, for fp16; a step whose gradients overflow is skipped by all
            replicas alike, since they share the averaged gradients.
        store: where checkpoints go; None: none are saved.
        states: what else is saved and restored, by name: anything with `state_dict` and
            `load_state_dict` of tensors and plain values, such as a moving average of the weights.
            Rank 0's state counts; every process calls `state_dict`, so that one may gather.
        monitor: receives what is logged.
        settings: fields of `TrainerOptions`, in place of or on top of `options`.

    Attributes:
        step: optimizer steps done.
        samples: samples trained on so far, over all replicas.
        epoch, batch: the next batch.
        skipped_steps: steps without an optimizer step, since no target counted.

    Raises:
        ConfigError: see `TrainerOptions`.
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
        metrics: Mapping[str, Metric] | None = None,
        lr_schedule: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        store: CheckpointStore | None = None,
        states: Mapping[str, Stateful] | None = None,
        monitor: Monitor | None = None,
        **settings: Any,
    ) -> None:
        self.options = replace(options, **settings) if options else TrainerOptions(**settings)
        self.model = model
        self.world = model.world
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.loss_fn = loss_fn
        self.train = train
        self.evaluation = evaluation
        self.metrics = metrics or {}
        self.total_steps = self.options.total_steps(train.batches_per_epoch)
        self.scaler = scaler or GradScaler(enabled=False)
        self.store = store
        self.states = dict(states or {})
        self.monitor = monitor or Monitor()
        self.step = self.samples = self.epoch = self.batch = self.skipped_steps = 0
        self.throughput = Throughput()
        self._stats = RunStats(model)
        # the last of each, and its step
        self._evaluated: tuple[int, dict[str, float] | None] = -1, None
        self._checkpoint: tuple[int, Path | None] = -1, None
        self._resumed_from: Path | None = None

    def __repr__(self) -> str:
        return (
            f"Trainer(step {self.step} of {self.total_steps}, epoch {self.epoch}, "
            f"{self.samples} samples, {self.options})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be pickled or copied, because its model owns process groups and "
            "threads: save a checkpoint (store=), and resume() it in a new Trainer"
        )

    def fit(self, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Trains up to `total_steps`, evaluates and saves; returns the `summary`.

        Args:
            texts: shown by the monitors beside the curves, by title.
        """
        if not self.model.training:  # train() would also reach what the user keeps in eval mode
            self.model.train()
        self.monitor.start(total_steps=self.total_steps, first_step=self.step, texts=texts or {})
        stream = self.train.stream(self.epoch, self.batch)
        self.throughput = Throughput()
        try:
            with saving.finishing(self.store, self.world):
                while self.step < self.total_steps:
                    log_due = self._is_due(self.options.log_every, self.step + 1)
                    timeline_due = self._is_due(self.options.timeline_every, self.step + 1)
                    # an optimizer step does not reach into the next epoch
                    left = self.train.batches_per_epoch - self.batch
                    batches = [next(stream) for _ in range(min(self.options.accumulate, left))]
                    lr = self.optimizer.param_groups[0]["lr"]
                    norm = self._train_step(batches, log_due, timeline=log_due or timeline_due)
                    if log_due:
                        self._log(lr, norm)
                    if timeline_due:
                        self.monitor.timeline(self.step, *self._stats.timelines())
                    self._evaluate_and_save_if_due()
                self._evaluate_and_save_if_due()  # for a run that was complete when it was resumed
        finally:
            stream.close()
            self.monitor.close()
        return self.summary()

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model with its present weights; see `evaluate`."""
        if self.evaluation is None:
            raise ConfigError("there is nothing to evaluate on: pass evaluation= to Trainer")
        result = evaluate(self.model, self.evaluation, self.loss_fn, self.metrics)
        self._evaluated = self.step, result
        return result

    def save(self, required: bool = True) -> None:
        """Writes a checkpoint of this step on rank 0, unless this step was saved or resumed.

        Args:
            required: a full disk is an error, not a warning.

        Raises:
            CheckpointError: it cannot be written, or the one before in the background was not.
        """
        if self.store is None or self._checkpoint[0] == self.step:
            return
        path = saving.save(
            self.store,
            self.step,
            self.model,
            self.optimizer,
            {"trainer": self},
            self.states,
            required=required,
        )
        if path is not None:
            self._checkpoint = self.step, path

    def resume(self, path: Path) -> None:
        """Continues from the checkpoint at `path`, of any split and number of processes.

        Weights and optimizer state are the checkpoint's. The learning rate, its schedule and the
        other options are those of this trainer, so that a run can be made longer or be tuned.

        Raises:
            CheckpointError: it is missing or damaged, or is of another model.
            ConfigError: a run counted in epochs has another number of samples per step.
        """
        state.restore(path, self.model, self.optimizer, {"trainer": self}, self.states)
        if self.lr_schedule is not None:
            # stepped again from 0 instead of loaded: its parameters and length are this run's
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
                for _ in range(self.step):
                    self.lr_schedule.step()
        self._resumed_from = path
        self._checkpoint = self.step, path

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of the run, in JSON's types."""
        return {
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch,
            "row": self.batch * self.train.batch_size,  # the files' key; words: ok
            "rows_per_step": self._samples_per_step,
            "scaler": self.scaler.state_dict() or None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`; with another batch size, at the same sample or just before it.

        Raises:
            CheckpointError: a number is not of its type or out of bounds.
            ConfigError: see `resume`.
        """
        check_progress(state_dict, self.total_steps)
        per_step, before = self._samples_per_step, state_dict["rows_per_step"]
        if self.options.epochs is not None and before != per_step:
            raise ConfigError(
                f"batch_size={self.train.batch_size} x accumulate={self.options.accumulate} is "
                f"{per_step}, and the checkpoint was made with {before}: a run that is counted in "
                f"epochs keeps it; set steps= in place of epochs=, or start a new run"
            )
        self.step, self.samples = state_dict["step"], state_dict["samples"]
        self.epoch = state_dict["epoch"]
        self.batch = state_dict["row"] // self.train.batch_size  # words: ok
        if self.batch >= self.train.batches_per_epoch:  # the rest is what drop_last leaves out
            self.epoch, self.batch = self.epoch + 1, 0
        if state_dict["scaler"] is not None:
            self.scaler.load_state_dict(state_dict["scaler"])

    def summary(self) -> dict[str, Any]:
        """Returns the results of the run, as they are written to `summary.json`."""
        speed = self.throughput.summary()
        checkpoint = self._checkpoint[1]
        return {
            "steps": self.step,
            "samples": self.samples,
            "skipped_steps": self.skipped_steps,
            "train_loss": self._stats.loss,
            "eval": self._evaluated[1],
            "samples_per_second": speed.samples_per_second,
            "step_ms": {"p50": speed.step_ms_p50, "p95": speed.step_ms_p95},
            "bubble_fraction": self._stats.bubble,
            "stages": self._stats.stages(self.optimizer),
            "world": {
                "processes": self.world.size,
                "nb_part": self.world.nb_part,
                "engine": self.world.engine,
                "backend": self.world.backend,
            },
            "checkpoint": checkpoint and str(checkpoint),
            "resumed_from": self._resumed_from and str(self._resumed_from),
        }

    @property
    def _samples_per_step(self) -> int:
        return self.train.batch_size * self.options.accumulate

    def _is_due(self, every: int | None, step: int) -> bool:
        """Returns whether `step` is a multiple of `every`; the last step always is due."""
        return step == self.total_steps or (every is not None and step % every == 0)

    def _train_step(
        self, batches: Sequence[Batch], norm_needed: bool, timeline: bool
    ) -> torch.Tensor | None:
        """Trains on `batches`; returns the gradients' norm before clipping, if it was computed."""
        total = sum(batch.total for batch in batches)
        weights = self.model.step_weights(
            [(batch.inputs, batch.targets) for batch in batches],
            self.loss_fn,
            samples=[batch.samples for batch in batches],
            total=total,
        )
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            out = self.model.train_step(
                batch.inputs,
                batch.targets,
                self.loss_fn,
                weight=weights[index],
                sync=last,
                scale_loss=self.scaler.scale,
                timeline=timeline and last,
            )
            self._stats.add(out.loss, out.count, out.timeline)
        self.scaler.unscale_(self.optimizer)
        norm = None
        if self.options.clip_norm is not None:
            norm = self.model.clip_grad_norm_(self.options.clip_norm)
        elif norm_needed:
            norm = self.model.grad_norm()
        if weights.total:  # else no target of any replica counts
            self.scaler.step(self.optimizer)
        else:
            self.skipped_steps += 1
        self.scaler.update(self.options.loss_scale)
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += total
        self.batch += len(batches)
        if self.batch == self.train.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
        self.throughput.tick(total)
        self.monitor.step(self.step, total)
        return norm

    def _log(self, lr: float, norm: torch.Tensor | None) -> None:
        speed = self.throughput.read()
        values = {
            "train/loss": self._stats.read_loss(),
            "train/lr": lr,
            "train/samples_per_second": speed.samples_per_second,
            "train/step_ms": speed.step_ms,
            "train/epoch": self.epoch + self.batch / self.train.batches_per_epoch,
        }
        if norm is not None:
            values["train/grad_norm"] = float(norm)
        if self.scaler.is_enabled():
            values["train/loss_scale"] = self.scaler.get_scale()
        values |= self._stats.read_stages(self.optimizer)
        self.monitor.scalars(self.step, values)

    def _evaluate_and_save_if_due(self) -> None:
        evaluates = self.evaluation is not None and self._evaluated[0] != self.step
        evaluates &= self._is_due(self.options.eval_every, self.step)
        saves = self._is_due(self.options.checkpoint_every, self.step)
        if evaluates or saves:
            with self.throughput.pause():
                if evaluates:
                    result = self.evaluate().items()
                    values = {f"eval/{name}": x for name, x in result if name != "samples"}
                    self.monitor.scalars(self.step, values)
                if saves:  # without space for one on the way, the run goes on to its end
                    self.save(required=self.step == self.total_steps)
