"""The training loop: steps, logging, evaluation and checkpoints."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.rank_differences import check_same_settings
from hybridtrain.checkpoint import (
    CheckpointStore,
    check_directory,
    check_progress,
    find_checkpoint,
    finishing_saves,
    restore_run,
)
from hybridtrain.data import Batch, EvalLoader, Loader, as_loader, next_step
from hybridtrain.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    Interrupted,
    argument,
    phrase,
    setting,
)
from hybridtrain.launch import Phase, activity
from hybridtrain.loop.callbacks.base import Callback, CallbackStates
from hybridtrain.loop.callbacks.tracker import Tracker, call_hook, defines
from hybridtrain.loop.checkpoints import BestCheckpoint, RunCheckpoints
from hybridtrain.loop.checks import (
    batch_norms_watched,
    check_arguments,
    check_eval_loader,
    check_last_batch,
    check_state_names,
)
from hybridtrain.loop.evaluation import evaluate, predict
from hybridtrain.loop.interruption import Interruptions
from hybridtrain.loop.run_stats import RunStats
from hybridtrain.loop.throughput import Throughput
from hybridtrain.loss import LossFn, Metric, check_reported
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.options import TrainerOptions, check_names
from hybridtrain.pipeline import device_memory, reset_peak_memory
from hybridtrain.step import OptimizerStep, check_not_past, check_sharded, learning_rates

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["Trainer", "TrainerOptions"]

_log = logging.getLogger(__name__)

# How long an interrupted run waits for the other processes before it exits.
_WAIT_FOR_OTHERS_S = 10.0


class Trainer:
    """Trains a `HybridModel`. Every process creates and runs a Trainer.

    Args:
        model: the model to train.
        optimizer: an optimizer over `model.parameters()`; a `ShardedOptimizer` with
            `shard="optimizer"`.
        loss_fn: as in `HybridModel.train_step`; None for a subclass with `compute_loss`. A step in
            which no target counts is skipped.
        train: the training batches: a `Loader`, or any iterable of this replica's `(inputs,
            targets)` batches, see `OwnLoader`.
        options: the settings; see `TrainerOptions`.
        evaluation: the batches to evaluate on.
        metrics: metrics to evaluate in addition to the loss, by name; see `evaluate`.
        lr_schedule: a learning rate schedule, stepped once per optimizer step.
        scaler: the loss scaler; None to create one for `precision="fp16"`, with `loss_scale`. All
            replicas skip a step with overflowing gradients, because they share the averaged
            gradients.
        store: where to save checkpoints; None to save none.
        states: further objects to save and restore, by name, with `state_dict` and
            `load_state_dict` of tensors and plain values. Rank 0's state is saved; every process
            calls `state_dict`, so that it may communicate.
        callbacks: a list of `Callback`s. They run on every process, and checkpoints contain their
            states; `main_only` callbacks, such as trackers, run on rank 0.
        training_step: a function that replaces the method of that name; its first argument is this
            trainer.
        record: further JSON values for `state.json` of each checkpoint, such as the origin of the
            data. Resuming does not load them.
        settings: fields of `TrainerOptions`, instead of `options` or overriding it.

    Attributes:
        train: the training batches, with the run's position in them.
        samples: the number of samples trained on so far, over all replicas.
        total_steps: the length of the run; may be set between two calls of `fit`.
        logging: whether the step in progress will be logged.
        texts: the `texts` passed to `fit`.
        compared: the names of the evaluation values that `best` and callbacks compare.

    Raises:
        ConfigError: an option is invalid or differs between ranks (a collective check); `best` is
            not a value of the evaluation; `optimizer` does not match the model's `shard`; no loss
            is given; or a callback is invalid.
    """

    def __init__(
        self,
        model: HybridModel,
        optimizer: Optimizer,
        loss_fn: LossFn | None,
        train: Loader | Iterable[Any],
        options: TrainerOptions | None = None,
        *,
        evaluation: EvalLoader | None = None,
        metrics: Mapping[str, Metric] | None = None,
        lr_schedule: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        store: CheckpointStore | None = None,
        states: Mapping[str, Stateful] | None = None,
        callbacks: Iterable[Callback] = (),
        training_step: Callable[..., list[TrainStepResult]] | None = None,
        record: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_names(TrainerOptions, settings, list(inspect.signature(Trainer).parameters))
        self.options = replace(options, **settings) if options else TrainerOptions(**settings)
        callbacks = check_arguments(model, optimizer, evaluation, metrics, callbacks)
        check_sharded(model, optimizer)
        self.model = model
        self.world = model.world
        check_same_settings(self.world.gather, "TrainerOptions", vars(self.options))
        self._step = OptimizerStep(
            model,
            optimizer,
            lr_schedule=lr_schedule,
            scaler=scaler,
            loss_scale=self.options.loss_scale,
            clip_norm=self.options.clip_norm,
            max_skipped=self.options.max_skipped,
            on_gradients=partial(self._tell_in_step, "on_gradients"),
        )
        self._finite = self._step.finite
        self.loss_fn = self._chosen_loss(loss_fn)
        self._training_step = training_step or type(self).training_step
        self.train = as_loader(train, self.world)
        self.evaluation = evaluation
        self.metrics = metrics or {}
        self.compared = {self.options.best} if self.options.best else set()
        self.samples = 0
        self.total_steps = self.options.total_steps(self.train.batches_per_epoch)
        check_last_batch(model, self.train)
        self.store = store
        self.record = dict(record or {})
        self.states = dict(states or {})
        check_state_names(self.states)
        if self.train.has_state:
            self.states["data"] = self.train
        self.callbacks = sorted(
            (each for each in callbacks if self.world.is_main or not each.main_only),
            key=lambda each: (isinstance(each, Tracker), each.main_only),
        )
        # which callbacks define the hooks of every step, for the list that it was found for
        self._in_step: dict[str, list[Callback]] = {}
        self._found_for: list[Callback] = []
        self.texts: Mapping[str, str] = {}
        self.logging = False
        if callback_states := CallbackStates(self, self.callbacks):
            self.states["callbacks"] = callback_states
        self.throughput = Throughput()
        self._stats = RunStats(model, self.train)
        self._interruptions = Interruptions(
            self.world, self.options.max_seconds, self.options.checkpoint_every_minutes
        )
        values = None if evaluation is None else {"loss": None, **self.metrics}
        self._best = BestCheckpoint(self.options.best, self.options.best_mode, values)
        self._checkpoints = RunCheckpoints(self._best)
        # step and result of the last evaluation
        self._evaluated: tuple[int, dict[str, float] | None] = -1, None
        # whether weights, optimizer and callbacks are consistent with `step`
        self._between_steps = False
        self._tell("on_init")

    def _chosen_loss(self, loss_fn: LossFn | None) -> LossFn:
        overridden = type(self).compute_loss is not Trainer.compute_loss
        if (loss_fn is None) is not overridden:
            raise ConfigError(
                f"specify exactly one loss: pass {argument('loss_fn')}, or override compute_loss "
                f"and pass {setting('loss_fn', None)}"
            )
        return loss_fn if loss_fn is not None else self.compute_loss

    def __repr__(self) -> str:
        return (
            f"Trainer(step {self.step} of {self.total_steps}, epoch {self.epoch}, "
            f"{self.samples} samples, {self.options})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be pickled or copied, because its model owns process groups and "
            "threads: save a checkpoint (store=) and resume() it in a new Trainer"
        )

    def fit(self, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Trains up to `total_steps`, evaluating and saving; returns the `summary`.

        Handles SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 meanwhile, if called in the main thread.

        Args:
            texts: texts that trackers show with the curves, by title.

        Raises:
            Interrupted: a signal arrived or `max_time` has passed; the step was completed and
                saved.
            DivergedError: losses, gradients or weights are not finite; see `max_skipped`.
            DataError: no target counted for the loss in any step of the run.
        """
        check_directory(self.store, self.world)
        # train() would also change modules that the user keeps in eval mode
        if not self.model.training:
            self.model.train()
        self.texts = texts or {}
        # a subclass may use the step's batches
        own_step = type(self).training_step is not Trainer.training_step
        stream = self.train.stream(None if own_step else self.model.readers)
        try:
            with (
                self._interruptions.listening(),
                self._closing(stream),
                finishing_saves(self.store, self.world),
            ):
                self._tell("on_start")
                self.model.zero_grad()  # left by an earlier fit that ended inside a step
                self.optimizer.zero_grad()
                self._try_evaluation()
                # memory of measurements and of earlier models
                if self.model.is_split:
                    reset_peak_memory(self.model.pipeline)
                self.throughput = Throughput()
                try:
                    self._train(stream)
                except Exception as error:
                    self._save_finished_step(error)
                    raise
                self._step.show_weights(training=False)  # the weights to evaluate and export
        except DivergedError as error:
            error.args = (f"{error}. {self._ways_out()}",)
            raise
        return self.summary()

    def compute_loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Returns the loss of one micro-batch, a mean over its samples; for subclasses.

        Runs on the last stage. For a mean over something other than samples, pass a `SumLoss` or
        `MeanLoss` as `loss_fn`.
        """
        raise NotImplementedError

    def training_step(self, batches: Sequence[Batch], timeline: bool) -> list[TrainStepResult]:
        """Runs the forward, loss and backward of a step's batches; for subclasses.

        The trainer still skips non-finite steps, clips, scales the loss and steps the schedule.
        Random draws must depend only on `self.step`, otherwise a resumed run differs.

        Args:
            batches: this replica's batches, at most `accumulate`.
            timeline: whether to record the batches.

        Returns:
            the result of each batch. The gradients are in `parameter.grad`, averaged over the
            replicas.
        """
        return [
            self.train_step(batch.inputs, batch.targets, timeline=timeline) for batch in batches
        ]

    def train_step(self, inputs: Any, targets: Any, *, timeline: bool = False) -> TrainStepResult:
        """Runs the forward, loss and backward of the next batch; for use in `training_step`.

        Batches must be used in order, and have their weights in the step's mean loss. The last one
        averages the gradients over the replicas.

        Args:
            inputs: the inputs of the batch, possibly modified.
            targets: the targets of the batch, possibly modified without changing how many count.
            timeline: whether to record the batch.

        Raises:
            BatchError: the step has no further batch.
        """
        return self._step.train_step(inputs, targets, timeline=timeline)

    def _tell(self, hook: str, *args: object) -> None:
        """Calls a hook of all callbacks, the trackers last."""
        for callback in self.callbacks:
            call_hook(callback, hook, self, *args)

    def _tell_in_step(self, hook: str, *args: object) -> None:
        """Calls a hook of every step, of the callbacks that define it."""
        callbacks, found_for = self.callbacks, self._found_for
        # callbacks may come and go during a run
        if len(callbacks) != len(found_for) or not all(map(is_, callbacks, found_for)):
            self._found_for, self._in_step = list(callbacks), {}
        if hook not in self._in_step:
            self._in_step[hook] = [each for each in callbacks if defines(each, hook)]
        for callback in self._in_step[hook]:
            call_hook(callback, hook, self, *args)

    @contextmanager
    def _closing(self, stream: Generator[Batch, None, None]) -> Iterator[None]:
        """Closes a run's resources; after an interruption, waits for the other processes.

        Otherwise the launcher would send a signal to processes that are still writing.
        """
        work_before, interrupted = activity.work, False
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, Interrupted)
            for callback in self.callbacks:
                try:
                    call_hook(callback, "on_exception", self, error)
                except Exception:  # must not replace the run's own error
                    _log.exception("on_exception of %s failed", type(callback).__name__)
            raise
        finally:
            activity.set(work_before)
            stream.close()
            with ExitStack() as ends:  # call all of them, even if one fails
                for callback in reversed(self.callbacks):
                    ends.callback(call_hook, callback, "on_end", self)
            if interrupted:
                self.world.all_arrive(_WAIT_FOR_OTHERS_S)

    def _train(self, stream: Iterator[Batch]) -> None:
        # missed because of an interruption or an error
        self._save_and_evaluate_if_due(first=True)
        watched: AbstractContextManager[None] | None = None
        if self._reaches_last_batch():
            watched = batch_norms_watched(self.model, self.train)
        log_every, timeline_every = self.options.log_every, self.options.timeline_every
        ended = self._ended
        while not ended:
            self._interruptions.begin_step()
            number = self._step.number + 1
            is_last = number == self.total_steps
            log_due = self.logging = is_last or (log_every is not None and not number % log_every)
            timeline_due = is_last or (timeline_every is not None and not number % timeline_every)
            # read before the schedule changes them
            rates = learning_rates(self.optimizer) if log_due else {}
            if watched is None:
                norm = self._take_step(stream, timeline=log_due or timeline_due)
            else:
                with watched:
                    norm = self._take_step(stream, timeline=log_due or timeline_due)
                watched = None
            self._between_steps = True
            if log_due:
                self._log(rates, norm)
            if timeline_due and self._stats.recorded:
                with self.throughput.pause():  # excludes drawing pictures
                    self._tell("on_timeline", *self._stats.timelines())
            wanted = self._interruptions.end_step()
            if "stop" in wanted:
                self._stop()
            ended = self._ended
            if ended:
                self._finite.check_not_all_empty(self.step)
            if ended or wanted or self._may_save_or_evaluate:
                self._save_and_evaluate_if_due(save="save" in wanted)
                ended = self._ended  # an evaluation may end the run

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model with its current weights, or with their average; see `evaluate`."""
        if self.evaluation is None:
            raise ConfigError("no evaluation data: pass evaluation= to Trainer")
        result = self.test(self.evaluation)
        self._evaluated = self.step, result
        return result

    def test(self, data: EvalLoader) -> dict[str, float]:
        """Evaluates on other data than the run's evaluation; see `evaluate`."""
        check_eval_loader("test(data)", data)
        with self._evaluation_context():
            return evaluate(self.model, data, self.loss_fn, self.metrics)

    def predict(self, data: EvalLoader) -> Any:
        """Returns the model's outputs for all samples of `data`; see `evaluation.predict`."""
        check_eval_loader("predict(data)", data)
        with self._evaluation_context():
            return predict(self.model, data)

    @contextmanager
    def _evaluation_context(self) -> Iterator[None]:
        with ExitStack() as contexts:
            contexts.enter_context(self._step.evaluation_weights())
            for callback in self.callbacks:
                if not isinstance(callback, Tracker):
                    contexts.enter_context(callback.evaluation_context(self))
            yield

    def save(self, required: bool = True) -> None:
        """Saves a checkpoint of this step, unless the step was already saved or resumed.

        Args:
            required: whether a full disk is an error instead of a warning.

        Raises:
            DivergedError: the weights are not finite; nothing is written.
            UserError: the replicas' weights have diverged.
            CheckpointError: writing failed, or the previous background save failed.
        """
        self._save(required)

    def _save(self, required: bool, again: bool = False) -> None:
        """Saves a checkpoint, see `save`; `again` replaces an existing checkpoint of this step."""
        if self.store is None:
            return
        saved = self._checkpoints.step == self.step
        if again or not saved:
            activity.now(Phase.SAVE, self.step)
            # the weights may have caused the last step to fail
            prune = not self._finite.skipping
            required = required and not saved
            with self._step.evaluation_weights():
                path = self._checkpoints.write(self, self._step, required=required, prune=prune)
                if path is not None:
                    self._tell("on_save", path)
            if path is None and not saved:
                self._checkpoints.mark_best(self, saved=False)
                return
        self._checkpoints.mark_best(self)
        self._interruptions.saved()

    def resume(
        self, path: str | Path, *, missing_ok: bool = False, allow_changes: bool = False
    ) -> bool:
        """Continues from the checkpoint at `path`, or from the newest in that directory.

        The checkpoint may have any split and number of processes. Weights and optimizer state come
        from the checkpoint. The learning rate, its schedule and other options come from this
        trainer, so that a run can be extended or tuned.

        Args:
            path: a checkpoint, or the directory of all checkpoints.
            missing_ok: do nothing if there is no checkpoint.
            allow_changes: continue in the middle of an epoch also with another order of samples, of
                which some are then repeated and others left out.

        Returns:
            whether a checkpoint was loaded.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or belongs to another model, or
                it is in the middle of an epoch with another order; see `Loader.order`.
            ConfigError: the number of samples per step changed in a run counted in epochs.
        """
        checkpoint = find_checkpoint(path, self.world, missing_ok)
        self.train.refuses_other_order = not allow_changes
        if checkpoint is not None:
            restore_run(self._step, checkpoint, self.states, progress=self)
            self._checkpoints.begin_at(self, checkpoint)
        return checkpoint is not None

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of the run as JSON types; the position counts samples."""
        step = self._step.state_dict()
        return {
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch,
            "row": self.train.sample,  # the files' key
            **({"order": self.train.order} if self.train.order else {}),
            "rows_per_step": self._samples_per_step,
            "scaler": step["scaler"],
            "evaluated_step": self._evaluated[0],
            **step,
            **self._best.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`.

        With another batch size, the run continues at the saved sample, or just before it.

        Raises:
            CheckpointError: a number has the wrong type or is out of range, or as in `resume`.
            ConfigError: as in `resume`.
        """
        check_progress(state_dict, self.total_steps)
        check_not_past(self.lr_schedule, state_dict["step"])
        per_step, before = self._samples_per_step, state_dict["rows_per_step"]
        if self.options.epochs is not None and before != per_step:
            raise ConfigError(
                f"{setting('batch_size', self.train.batch_size)} x "
                f"{setting('accumulate', self.options.accumulate)} is {per_step} samples per "
                f"step, but the checkpoint was made with {before}: a run counted in epochs cannot "
                f"change it; set {argument('steps')} instead of {argument('epochs')}, or "
                f"{phrase('start a new run')}"
            )
        self.train.check_order(state_dict["row"], state_dict.get("order", {}))
        self.samples = state_dict["samples"]
        self.train.seek(state_dict["epoch"], state_dict["row"])
        self._step.load_state_dict(state_dict)
        self._best.load_state_dict(state_dict)
        self._evaluated = state_dict["evaluated_step"], None

    def summary(self) -> dict[str, Any]:
        """Returns the results of the run, the content of `summary.json`.

        With `engine="distributed"`, all processes of a pipeline must call this together.
        """
        checkpoint = self._checkpoints.on_disk(self, self.step)
        resumed_from = self._checkpoints.resumed_from
        return {
            **self.results,
            "account": self.account,
            "advice": self.advice,
            "stages": self._stats.stages(self.optimizer),
            "device_memory": device_memory(self.model.pipeline) if self.model.is_split else {},
            "world": {
                "processes": self.world.size,
                "nb_part": self.world.nb_part,
                "replicas": self.world.logical_replicas,
                "engine": self.world.engine,
                "backend": self.world.backend,
            },
            "checkpoint": checkpoint and str(checkpoint),
            "best": self._best.state_dict(),
            "resumed_from": resumed_from and str(resumed_from),
        }

    @property
    def results(self) -> dict[str, Any]:
        """The steps, samples, losses, last evaluation and speed, which `summary` includes."""
        speed = self.throughput.summary()
        return {
            "steps": self.step,
            "samples": self.samples,
            "train_loss": self._step.losses.value,
            **self._finite.counts(),
            "eval": self._evaluated[1],
            "samples_per_second": speed.samples_per_second,
            "tokens_per_second": speed.tokens_per_second or None,
            "step_ms": {"p50": speed.step_ms_p50, "p95": speed.step_ms_p95},
            "bubble_fraction": self._stats.bubble,
        }

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; may be replaced between two calls of `fit`."""
        return self._step.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._step.optimizers.clear()
        self._step.add(optimizer)

    @property
    def lr_schedule(self) -> LRScheduler | None:
        """The learning rate schedule; may be replaced between two calls of `fit`."""
        return self._step.lr_schedule

    @lr_schedule.setter
    def lr_schedule(self, lr_schedule: LRScheduler | None) -> None:
        self._step.lr_schedule = lr_schedule

    @property
    def scaler(self) -> GradScaler:
        """The loss scaler."""
        return self._step.scaler

    @property
    def step(self) -> int:
        """The number of completed optimizer steps."""
        return self._step.number

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.train.epoch

    @property
    def batch(self) -> int:
        """The index of the next batch in this epoch."""
        return self.train.batch

    @property
    def _samples_per_step(self) -> int:
        return self.train.batch_size * self.options.accumulate

    @property
    def finished(self) -> bool:
        """True if all steps are done, including the evaluation after the last one."""
        evaluated = self.evaluation is None or self._evaluated[0] == self.step
        return self._ended and evaluated

    @property
    def _ended(self) -> bool:
        """True if no steps are left or a callback has ended the run."""
        if self._step.number >= self.total_steps:
            return True
        for callback in self.callbacks:  # a plain loop, because this runs several times per step
            if callback.stops and not isinstance(callback, Tracker):
                return True
        return False

    @property
    def account(self) -> dict[str, Any] | None:
        """The time breakdown of the recorded steps in milliseconds; None without any.

        `mean` is over all devices, and `devices` has one entry per device; see
        `hybridtrain.schedule.Account`.
        """
        return self._stats.account_summary()

    @property
    def advice(self) -> list[str]:
        """Changes that would make a step shorter, with the predicted gain."""
        return self._stats.advice()

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because of a non-finite loss or gradient."""
        return self._finite.skipped

    def _is_due(self, every: int | None, step: int) -> bool:
        """Returns whether `step` is a multiple of `every`; the last step is always due."""
        last = step == self.total_steps or (step == self._step.number and self._ended)
        return last or (every is not None and step % every == 0)

    def _ended_epoch(self, every: int | None) -> bool:
        """Returns whether the last step ended an epoch that is a multiple of `every`."""
        return bool(every and self.step and self.batch == 0 and self.epoch % every == 0)

    def _reaches_last_batch(self) -> bool:
        """Returns whether the run will reach the last batch of an epoch."""
        if self.train.batches_per_epoch is None:
            return False
        left = self.train.batches_per_epoch - self.batch
        return self.step + math.ceil(left / self.options.accumulate) <= self.total_steps

    def _take_step(self, stream: Iterator[Batch], timeline: bool) -> torch.Tensor:
        """Trains on the next batches; returns the gradient norm before clipping.

        Raises:
            ConfigError: `training_step` did not return a result for each batch.
        """
        start, number = self.train.position, self._step.number
        try:
            self._stats.begin_step(timeline)
            activity.now(Phase.DATA, number + 1)
            batches = next_step(stream, self.options.accumulate)
            if timeline:
                self._stats.end_phase("data")
            activity.now(Phase.TRAIN, number + 1)
            self._between_steps = False
            self._step.begin(batches, self.loss_fn)
            results = self._training_step(self, batches, timeline)
            if len(results) != len(batches):
                raise ConfigError(
                    f"training_step returned {len(results)} results for {len(batches)} batches: "
                    "return the result of train_step for each batch"
                )
            if timeline:
                self._stats.record(results)
                self._stats.end_phase("pipeline")
            norm = self._step.finish(results)
            if timeline:
                self._stats.end_phase("optimizer")
        except BaseException:
            if self.step == number:  # a checkpoint, or another fit, continues with this step
                self.train.position = start
            raise
        samples = tokens = 0
        for batch in batches:
            samples += batch.total
            tokens += batch.tokens
        self.samples += samples
        self.throughput.tick(samples, tokens)
        self._tell_in_step("on_step", samples)
        if timeline:
            self._stats.end_phase("host")
        return norm

    def _log(self, rates: dict[str, float], norm: torch.Tensor) -> None:
        speed = self.throughput.read()
        values = {
            "train/loss": self._step.mean_loss(),
            "train/lr": next(iter(rates.values())),
            "train/samples_per_second": speed.samples_per_second,
            **({"train/tokens_per_second": each} if (each := speed.tokens_per_second) else {}),
            "train/step_ms": speed.step_ms,
            # whole epochs if their length is unknown
            "train/epoch": self.epoch + self.batch / (self.train.batches_per_epoch or math.inf),
            "train/grad_norm": float(norm),
        }
        for name in ("skipped_steps", "empty_steps"):
            if count := self._finite.counts()[name]:
                values[f"train/{name}"] = count
        if len(set(rates.values())) > 1:
            values |= rates
        if self.scaler.is_enabled():
            values["train/loss_scale"] = self.scaler.get_scale()
        values |= self._stats.read(self.optimizer)
        self._tell("on_log", values)

    @property
    def _may_save_or_evaluate(self) -> bool:
        """Whether something may be due after the last step besides a request and the end."""
        options, step = self.options, self._step.number
        for every in (options.checkpoint_every_steps, options.eval_every):
            if every is not None and not step % every:
                return True
        epochs = options.checkpoint_every_epochs or options.eval_every_epochs
        return bool(epochs) and self.batch == 0

    def _save_and_evaluate_if_due(self, save: bool = False, first: bool = False) -> None:
        """Saves before evaluating, so that a failing evaluation does not lose the step.

        A run resumed from that checkpoint repeats the evaluation, which is not recorded in it. At
        the start of a `fit` (`first`), the evaluation ignores `max_time` and is saved; otherwise
        every restart with a `max_time` shorter than an evaluation would restart the evaluation.
        """
        step = self._step.number
        if step > 0:
            save |= self._is_due(self.options.checkpoint_every_steps, step)
            save |= self._ended_epoch(self.options.checkpoint_every_epochs)
        evaluates = self._evaluation_is_due()
        if save or evaluates or self._ended:
            self._step.await_device_verdict()
        self._save_in_run(save)
        if not evaluates:
            return
        is_new = self._evaluated[0] != self.step
        with self.throughput.pause(), self._interruptions.time_limit(applies=not first):
            save = self._evaluate_in_run()
        wanted = self._wanted() if first and not self._ended else frozenset()
        if "stop" in wanted:
            self._stop(again=is_new)  # saves again to record the evaluation
        # saves again at the end of a run to record that it is complete
        save |= self._ended or "save" in wanted
        self._save_in_run(save, again=self._ended and is_new)

    def _evaluation_is_due(self) -> bool:
        step, result = self._evaluated
        if self.evaluation is None or (step == self.step and not (self._ended and result is None)):
            return False
        if self.step == 0:
            return self.options.eval_first
        every, every_epochs = self.options.eval_every, self.options.eval_every_epochs
        return self._is_due(every, self.step) or self._ended_epoch(every_epochs)

    def _save_in_run(self, save: bool, again: bool = False) -> None:
        if not save:
            return
        last, best = self._ended, self._best.step == self.step
        # no periodic saves until a step succeeds
        if last or best or not self._finite.skipping:
            with self.throughput.pause():  # a periodic save may fail for lack of space
                self._save(required=last, again=again)

    def _save_finished_step(self, error: Exception) -> None:
        """Saves the last complete step before an error, such as a callback's, ends the run.

        Only in a single-process run, since other processes would not take part in the save.
        """
        expected = isinstance(error, CheckpointError | DivergedError | Interrupted)
        learnt = self.step > self._finite.empty and not self._finite.skipping
        if self.world.size > 1 or expected or not learnt or not self._between_steps:
            return
        try:
            self._save(required=False)
        except Exception as another:  # must not replace the run's own error
            _log.warning("could not save step %d after the error: %s", self.step, another)

    def _try_evaluation(self) -> None:
        """Evaluates one batch to find errors before the first step, and discards the result.

        Training is not affected. Skipped if the run begins with a full evaluation.
        """
        if self.evaluation is None or self._ended or self._evaluation_is_due():
            return
        activity.now(Phase.EVALUATE, self.step)
        draws = default_generators()
        with self._evaluation_context():
            result = evaluate(
                self.model, self.evaluation, self.loss_fn, self.metrics, one_batch=True
            )
        activity.forget(Phase.EVALUATE)
        self._check_compared(result)
        for metric in self.metrics.values():
            metric.reset()
        rewind(draws)

    def _check_compared(self, result: Mapping[str, float]) -> None:
        """Checks that an evaluation has all compared values; a collective call.

        Only the first result shows how many values a metric has.
        """

        def check() -> None:
            for value in sorted(self.compared):
                check_reported(value, ["loss", *self.metrics], result)

        self.world.on_main(check)  # rank 0 has all callbacks

    def _evaluate_in_run(self) -> bool:
        """Evaluates and reports, unless a stop is requested; returns whether to save."""
        assert self.evaluation is not None
        activity.now(Phase.EVALUATE, self.step)
        share = getattr(self.evaluation, "samples", None)
        with self._evaluation_context():
            result = evaluate(
                self.model,
                self.evaluation,
                self.loss_fn,
                self.metrics,
                stop=self._interruptions.watch_for_stop(),
                on_batch=lambda done: self._tell("on_evaluation_batch", done, share),
            )
            # bitwise equal on all ranks, which must agree on whether it is the best
            result = self.world.broadcast(result)
            if self._evaluated[1] is None:
                self._check_compared(result)
            wanted = self._wanted()
            if "stop" not in wanted:  # otherwise the result may cover only some samples
                self._evaluated = self.step, result
                self._tell("on_evaluate", result)
        if "stop" in wanted:
            self._stop()
        return self._best.improves(self.step, result) or "save" in wanted

    def _wanted(self) -> frozenset[str]:
        """Returns the current requests of all processes; a collective call."""
        self._interruptions.begin_step()
        return self._interruptions.end_step()

    def _stop(self, again: bool = False) -> NoReturn:
        with self.throughput.pause():
            self._save(required=True, again=again)
        path = self.world.broadcast(self._checkpoints.path)
        saved = "nothing was saved, because the run has no checkpoints"
        if self.store is not None:
            saved = f"saved {path}; rerun the same command to continue"
        raise Interrupted(
            f"interrupted at step {self.step} of {self.total_steps} by "
            f"{self._interruptions.stop_reason}: {saved}"
        )

    def _ways_out(self) -> str:
        """Returns suggestions for a diverged run; a collective call."""
        good_step = self._finite.last_good_step
        path = self.world.from_main(
            lambda: self._checkpoints.on_disk(self, self.step if good_step is None else good_step)
        )
        good = f"The last good checkpoint is {path}" if path else "No checkpoint was saved"
        return (
            f"{good}. Lower the learning rate, set {argument('clip_norm')}, or inspect that "
            "step's data"
        )
