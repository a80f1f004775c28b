"""One optimizer step: gradients, their norm, whether the optimizer may step, the update.

        begin        [1] computes the batches' weights in the step's mean; saves the buffers
        train_step   [2] forward, loss and backward of each batch; the last averages over replicas
        norm         [3] drops gradients without an optimizer, unscales the others; their norm
        take         [4] if it is finite, the update; otherwise restores the buffers
        end          [5] counts the step, adapts the loss scale

`Trainer`, `Session`, `hybridtrain.smp` and custom loops all use it. So every API skips and reports
a step that is not finite, and detects in the first step an optimizer that does not match the
current model (`OptimizerCheck`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hybridtrain._base.accelerator import PendingNumbers, accelerator_of
from hybridtrain.data import Batch, in_order_of_replicas
from hybridtrain.errors import BatchError, CheckpointError, ConfigError, setting
from hybridtrain.launch import Phase, activity
from hybridtrain.loss import BatchWeight, LossFn, StepWeights, resolve
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.pipeline import check_replicas
from hybridtrain.step.finite_check import FiniteCheck
from hybridtrain.step.in_progress import StepInProgress
from hybridtrain.step.loss_mean import LossMean
from hybridtrain.step.param_groups import (
    CombinedOptimizer,
    check_optimizer,
    inner_optimizers,
    show_weights,
    take_step,
)

log = logging.getLogger(__name__)


_FIRST_SCALE = 2.0**16  # the initial loss scale for fp16; PyTorch's default


def check_lr_schedule(lr_schedule: LRScheduler | None) -> None:
    """Refuses a schedule that depends on more than the step.

    Raises:
        ConfigError: it is a ReduceLROnPlateau.
    """
    if isinstance(lr_schedule, ReduceLROnPlateau):
        raise ConfigError(
            "lr_schedule: ReduceLROnPlateau depends on a metric, but a run can be resumed at any "
            "step only if its schedule depends on the step alone; use the callback Plateau"
        )


def steps_taken(lr_schedule: LRScheduler) -> int:
    """Returns how many steps a learning-rate schedule has taken; 0 if it does not count them."""
    steps = getattr(lr_schedule, "last_epoch", None)
    if steps is None:  # as in a ChainedScheduler
        inner = getattr(lr_schedule, "_schedulers", ())
        steps = max((steps_taken(schedule) for schedule in inner), default=0)
    return max(0, steps)


def check_not_past(lr_schedule: LRScheduler | None, step: int) -> None:
    """Checks that a schedule can be stepped to a step of a checkpoint.

    Raises:
        CheckpointError: it is past that step.
    """
    if lr_schedule is not None and steps_taken(lr_schedule) > step:
        raise CheckpointError(
            f"{type(lr_schedule).__name__} is at step {steps_taken(lr_schedule)}, past step {step} "
            "of the checkpoint, and cannot step back: create the schedule and its optimizer again, "
            "and with them the Trainer or OptimizerStep that resumes"
        )


_groups, _parameters = attrgetter("param_groups"), itemgetter("params")


class OptimizerCheck:
    """Checks optimizers against their model in the first step, and after every change of either."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self._seen: tuple[int, ...] | None = None
        self._left_out: list[Parameter] = []

    def drop_gradients_left_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Drops the gradients of parameters that none of `optimizers` holds.

        They must not count in the gradient norm, because no optimizer updates or zeroes them.

        Raises:
            ConfigError: see `check_optimizers`.
        """
        groups = chain.from_iterable(map(_groups, optimizers))
        now = self._model.changes, *map(len, map(_parameters, groups))
        if now != self._seen and len(now) > 1:
            groups = chain.from_iterable(map(_groups, optimizers))
            self._left_out = check_optimizers(self._model, list(groups))
            self._seen = now
        for parameter in self._left_out:
            parameter.grad = None


def check_optimizers(model: HybridModel, groups: Sequence[Mapping[str, Any]]) -> list[Parameter]:
    """Warns about trainable parameters that are not in the groups, and returns them.

    Drops the remaining gradients of frozen parameters outside the groups.

    Args:
        model: the model.
        groups: the parameter groups of all optimizers.

    Raises:
        ConfigError: the model has parameters that the groups lack, and vice versa, because the
            model was changed after the optimizer was created.
    """
    # without placeholders for groups that are empty in this process
    held = {id(p) for group in groups for p in group["params"] if p.numel()}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    left_out = [name for name, parameter in trainable.items() if id(parameter) not in held]
    if left_out:
        named = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        foreign = held - {id(parameter) for parameter in model.parameters()}
        if foreign:
            raise ConfigError(
                f"optimizer= holds {len(foreign)} parameters that the model does not have, but not "
                f"{named}: the model was changed after the optimizer was created; create it again"
            )
        if model.world.data_parallel_rank == 0:
            log.warning(
                "optimizer= leaves out %d of %d trainable parameters: %s. If that is intended, "
                "requires_grad_(False) avoids computing their gradients",
                len(left_out),
                len(trainable),
                named,
            )
    for parameter in model.parameters():
        if not parameter.requires_grad and id(parameter) not in held:
            parameter.grad = None
    return [trainable[name] for name in left_out]


_NO_BATCHES = (
    "a step takes a list of Batch, as yielded by loader.batches(), not {}a {}: write `for batch in "
    "loader.batches(): step.run([batch], loss_fn)`, or create each with hybridtrain.data.Batch("
    "inputs, targets, samples=len(inputs), total=len(inputs) * world.data_parallel_size)"
)


def _check_batches(batches: Any) -> None:
    """Checks the batches of a step.

    Raises:
        BatchError: they are not a list of `Batch`.
    """
    is_one = not isinstance(batches, Sequence)
    candidates = [batches] if is_one else batches
    wrong = [batch for batch in candidates if not isinstance(batch, Batch)]
    if is_one or wrong:
        kind = type((wrong or candidates)[0]).__name__
        raise BatchError(_NO_BATCHES.format("" if is_one else "a list with ", kind))


class StepResult(NamedTuple):
    """Result of `OptimizerStep.run`.

    Attributes:
        norm: the norm of the gradients before clipping, a 0-dim tensor.
        results: the results of `HybridModel.train_step` for each batch.
    """

    norm: Tensor
    results: list[TrainStepResult]


class OptimizerStep:
    """Takes optimizer steps on all processes; skips and reports steps that are not finite.

        step = OptimizerStep(model, optimizer, clip_norm=1.0)
        for batch in loader.batches():
            step.run([batch], loss_fn)

    The gradients are those of the mean over all samples (or elements that the loss counts) of all
    batches and replicas of a step, whatever their sizes.

    Args:
        model: the model.
        optimizers: one or several optimizers of its parameters.
        lr_schedule: stepped once per step, including skipped ones.
        scaler: scales the loss, for fp16; None: created according to the model's `precision`.
        loss_scale: a fixed scale; None: the scaler adapts it.
        clip_norm: the maximum norm of the gradients over all stages, for `run` and `finish`.
        max_skipped: the number of consecutive steps that may be skipped; None: no limit.
        on_gradients: called when the gradients are complete: averaged, unscaled, not clipped.
        holds_all: True if the optimizers must hold all trained parameters. Gradients of others are
            then dropped with a warning; False: other code trains them.

    Attributes:
        in_progress: the most recent step.
        number: the number of steps done, including skipped ones.
        losses: the mean of the losses of the steps that were not skipped.
        finite: decides whether an optimizer may step, and counts skipped steps.

    Raises:
        ConfigError: the schedule depends on more than the step, or an optimizer needs a closure.
    """

    def __init__(
        self,
        model: HybridModel,
        *optimizers: Optimizer,
        lr_schedule: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        loss_scale: float | None = None,
        clip_norm: float | None = None,
        max_skipped: int | None = 10,
        on_gradients: Callable[[], None] = lambda: None,
        holds_all: bool = True,
    ) -> None:
        check_lr_schedule(lr_schedule)
        # the scaler takes any number that is not a float for a tensor
        loss_scale = None if loss_scale is None else float(loss_scale)
        self.model = model
        for optimizer in optimizers:
            check_optimizer(optimizer, f"optimizer={type(optimizer).__name__}")
        self.optimizers = list(optimizers)
        self._trains = False  # True while the parameters have the values to train on
        self.lr_schedule = lr_schedule
        if scaler is None:
            fp16, device = model.options.precision == "fp16", model.world.devices[0].type
            scaler = GradScaler(device, init_scale=loss_scale or _FIRST_SCALE, enabled=fp16)
        self.number = 0
        self.losses = LossMean(model)
        self.finite = FiniteCheck(model, scaler, max_skipped, adaptive_scale=loss_scale is None)
        self._loss_scale = loss_scale
        self._clip_norm = clip_norm
        self._on_gradients = on_gradients
        self._check = OptimizerCheck(model) if holds_all else None
        self.in_progress = StepInProgress(1, [], None, 0)
        self._undecided: StepInProgress | None = None  # a device has decided, the host not yet
        self._updates = 0
        self._all_take_found_inf: bool | None = None

    @property
    def scaler(self) -> GradScaler:
        """The loss scaler."""
        return self.finite.scaler

    def add(self, optimizer: Optimizer, scaler: GradScaler | None = None) -> None:
        """Adds an optimizer; the first one with a scaler sets it for all."""
        self.optimizers.append(optimizer)
        self._all_take_found_inf = None
        if scaler is not None and not self.scaler.is_enabled():
            self.finite.use_scaler(scaler)

    # --- a whole step

    def run(self, batches: Sequence[Batch], loss_fn: LossFn) -> StepResult:
        """Takes the next step on this replica's `batches`; all processes call it together.

        Raises:
            DivergedError: too many consecutive steps were skipped.
            Exception: see `HybridModel.train_step`.
        """
        if isinstance(batches, Sequence) and all(isinstance(item, Batch) for item in batches):
            batches = in_order_of_replicas(batches)
        self.begin(batches, loss_fn)
        results = [self.train_step(batch.inputs, batch.targets) for batch in batches]
        return StepResult(self.finish(), results)

    def finish(self, results: Sequence[TrainStepResult] | None = None) -> Tensor:
        """Completes a step from its gradients; returns their norm before clipping.

        Args:
            results: the results of the batches, instead of those of `train_step`.

        Raises:
            DivergedError: see `run`.
        """
        step = self.in_progress
        if results is not None and list(map(id, results)) != list(map(id, step.results)):
            self.losses.drop(step.results)
            step.results = list(results)
            self.losses.add(results)
        norm = self.norm()
        if self._clip_norm is not None:
            self.clip(self._clip_norm)
        for optimizer in self.optimizers:
            self.take(optimizer)
        self.end()
        if self.lr_schedule is not None:
            self.lr_schedule.step()  # also for a skipped step: a function of the step
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return norm

    # --- the parts of a step, in order

    def begin(self, batches: Sequence[Batch], loss_fn: LossFn) -> StepInProgress:
        """Begins a step on `batches`, and returns it; all processes call it together."""
        if type(batches) is not list or set(map(type, batches)) != {Batch}:
            _check_batches(batches)
        pairs: list[tuple[Any, Any]] = []
        samples: list[int] = []
        total = 0
        for batch in batches:
            pairs.append((batch.inputs, batch.targets))
            samples.append(batch.samples)
            total += batch.total
        weights = self.model.step_weights(pairs, loss_fn, samples=samples, total=total)  # [1]
        return self._begin(pairs, loss_fn, weights)

    def begin_microbatches(self, inputs: Sequence[Any]) -> None:
        """Begins a step in which the caller weights and runs the micro-batches of `inputs`."""
        self._begin([(inputs, None)], None, None, by_microbatch=True)

    def _begin(
        self,
        batches: Sequence[tuple[Any, Any]],
        loss_fn: LossFn | None,
        weights: StepWeights | None,
        by_microbatch: bool = False,
    ) -> StepInProgress:
        before = self.in_progress
        if before.is_unscaled:  # but neither taken nor ended
            self._update_scale()
        self.losses.fold(1000, but=self._undecided.results if self._undecided else ())
        self.show_weights(training=True)
        # not if gradients are accumulated on top of a step that no optimizer has taken yet
        was_taken = self.number >= before.number
        if was_taken or all(parameter.grad is None for parameter in self.model.parameters()):
            self.finite.begin_step()
        self.in_progress = StepInProgress(
            self.number + 1, batches, loss_fn, self.model.rng.step, by_microbatch, weights
        )
        return self.in_progress

    def train_step(
        self,
        inputs: Any,
        targets: Any,
        *,
        loss_fn: LossFn | None = None,
        index: int | None = None,
        timeline: bool = False,
    ) -> TrainStepResult:
        """Runs forward, loss and backward of the next batch; see `HybridModel.train_step`.

        Args:
            inputs: the inputs of the batch.
            targets: the targets of the batch.
            loss_fn: another loss than the one passed to `begin`, which counts the same in the
                batch.
            index: the index of the batch in the step, if an earlier one was left out. The last one
                averages the gradients over the replicas.
            timeline: record the timeline.

        Raises:
            BatchError: the step has no such batch, or `loss_fn` counts something else.
        """
        step, weights = self.in_progress, self.in_progress.weights
        index = len(step.results) if index is None else index
        if weights is None or step.loss_fn is None or index >= len(weights):
            raise BatchError("call train_step() once for each batch passed to begin()")
        is_last = index + 1 == len(weights)
        function = step.loss_fn if loss_fn is None else loss_fn
        if function != step.loss_fn:  # two accesses to a method are equal
            self._check_counts_alike(function, weights[index], inputs, targets)
        result = self.model.train_step(  # [2]
            inputs,
            targets,
            function,
            weight=weights[index],
            sync=is_last,
            scale_loss=self.finite.scaler.scale if self.finite.scales else None,
            timeline=timeline,
        )
        step.is_trained = is_last
        step.results.append(result)
        self.losses.add([result])
        return result

    def _check_counts_alike(
        self, loss_fn: LossFn, weight: BatchWeight, inputs: Any, targets: Any
    ) -> None:
        loss = resolve(loss_fn, self.model.net)
        if not weight.is_of(loss, (inputs, targets), self.model.options.chunks):
            raise BatchError(
                f"{setting('loss_fn', loss.name)} averages over something else than the first loss "
                "of this step, so the batches cannot be weighted: use losses that count the same, "
                "such as samples, in all batches of a step, or add the losses up in one function"
            )

    def norm(self) -> Tensor:
        """Returns the norm of the complete, unscaled gradients of all stages.

        All processes call it together. Drops gradients of parameters that no optimizer holds.

        Raises:
            ConfigError: the optimizer has parameters of another model.
        """
        step = self.in_progress
        if step.norm is None:
            before, self._updates = self._updates, self._updates + 1
            if not before & self._updates:  # updates 1, 2, 4, 8 and so on
                self._compare_over_ranks()
            if self._check is not None:
                self._check.drop_gradients_left_out(self.optimizers)  # [3]
            if self.finite.scales:
                for optimizer in self.optimizers:
                    self.model.unscale_(self.finite.scaler, optimizer)
                step.is_unscaled = True
            self._on_gradients()
            step.norm = self.model.pipeline.grad_norm()
        return step.norm

    def _compare_over_ranks(self) -> None:
        unsharded = [getattr(optimizer, "inner", optimizer) for optimizer in self.optimizers]
        self.model.compare_optimizers(
            [inner for optimizer in unsharded for inner in inner_optimizers(optimizer)]
        )

    def clip(self, max_norm: float) -> Tensor:
        """Clips the gradients to `max_norm` if they are finite; returns the norm before
        clipping."""
        norm = self.norm()
        if self._decides_on_device() or self._is_allowed():
            self.model.pipeline.clip_grads_with_norm_(max_norm, norm)
            # the new norm; inf and NaN stay
            self.in_progress.norm = norm * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def take(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` step, unless the step must be skipped; all processes together.

        Raises:
            DivergedError: too many consecutive steps were skipped.
        """
        step = self.in_progress
        if step.taken and any(optimizer is other for other in step.taken):  # without `begin`
            self.in_progress = self._without_batches(self.number + 1)
            self.in_progress.weights = step.weights
            step = self.in_progress
        step.taken.append(optimizer)
        norm = self.norm() if step.norm is None else step.norm
        before = activity.work
        activity.now(Phase.OPTIMIZER, step.number)
        try:
            if self._decides_on_device():  # [4]
                self._take_on_device(optimizer, norm)
            elif self._is_allowed():
                scaler, scales = self.finite.scaler, self.finite.scales
                take_step(optimizer, partial(scaler.step, optimizer) if scales else optimizer.step)
        finally:
            activity.work = before

    def end(self) -> None:
        """Counts the step, once for several optimizers, and adapts the scale after the last one."""
        step = self.in_progress
        if self.number < step.number:
            self.number += 1  # [5]
        if step.is_unscaled and len(step.taken) >= len(self.optimizers):
            self._update_scale()

    # --- the decision

    def _is_allowed(self) -> bool:
        """Returns whether the optimizers may step; the first call in a step waits for a device."""
        step = self.in_progress
        if step.may_step is None:
            if self._undecided is not None:
                self.await_device_verdict()
            norm = self.norm() if step.norm is None else step.norm
            if step.is_empty:
                self.finite.skip_empty(step.number)
                step.may_step = False
            else:
                # The only wait for a device in a step, unless the device decides (see
                # `_decides_on_device`): the host decides whether an optimizer steps, and a step
                # with NaN cannot be undone. fp16's GradScaler works the same way.
                step.may_step = self.finite.allows_step(step, norm.item())
            if not step.may_step:
                self.losses.drop(step.results)
        return step.may_step

    def _decides_on_device(self) -> bool:
        """Returns whether the optimizers of this step can skip it on the device."""
        step = self.in_progress
        if self._all_take_found_inf is False or step.may_step is not None or step.norm is None:
            return False
        if step.is_empty or self.finite.scales:
            return False
        if self._all_take_found_inf is None:
            if accelerator_of(step.norm.device) is None:
                self._all_take_found_inf = False
            else:
                # the same in all processes, because they search for the origin together
                supported = all(map(takes_found_inf, self.optimizers))
                self._all_take_found_inf = all(self.model.world.gather(supported))
        return self._all_take_found_inf

    def _take_on_device(self, optimizer: Any, norm: Tensor) -> None:
        """Makes `optimizer` step if `norm` is finite, without a host sync.

        The host learns the result one step later, and logs and counts it then: see
        `await_device_verdict`.
        """
        if self._undecided is not self.in_progress:
            # the previous step: it is done by now, and its batches can be run again
            self.await_device_verdict()
            self._undecided = self.in_progress
            self._undecided.pending = PendingNumbers([norm])
            self.finite.restore_where_not_finite(norm)
        # as GradScaler does for these optimizers: a fused kernel does nothing if this is 1
        optimizer.found_inf = (~norm.isfinite()).float()
        optimizer.grad_scale = None
        try:
            take_step(optimizer, optimizer.step)
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def await_device_verdict(self) -> None:
        """Waits for a device's decision about the last step, and counts it; all together.

        Raises:
            DivergedError: too many consecutive steps were skipped.
        """
        step, self._undecided = self._undecided, None
        if step is not None and step.pending is not None:
            (norm,) = step.pending.numbers()
            if not self.finite.allows_step(step, norm, undone=True):
                self.losses.drop(step.results)

    def _without_batches(self, number: int) -> StepInProgress:
        return StepInProgress(number, [], None, self.model.rng.step)

    def _update_scale(self) -> None:
        if self.in_progress.is_unscaled:
            self.in_progress.is_unscaled = False
            self.scaler.update(self._loss_scale)

    # --- evaluating and resuming

    def show_weights(self, training: bool) -> None:
        """Sets the parameters to the values for training, or to the ones to evaluate and save.

        These differ for schedule-free optimizers, which have methods `train` and `eval`. A step
        starts with the values for training.
        """
        self._trains = training
        for optimizer in self.optimizers:
            show_weights(optimizer, training)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Sets the parameters to the values to evaluate and save, inside the block.

        with step.evaluation_weights():
            evaluate(model, loader, loss_fn, metrics)
        """
        self.await_device_verdict()
        before = self._trains
        self.show_weights(training=False)
        try:
            yield
        finally:
            if before:
                self.show_weights(training=True)

    def mean_loss(self) -> float:
        """Returns the mean loss over all replicas since the last call; a collective call.

        It covers the steps that were not skipped; NaN if there were none.
        """
        self.await_device_verdict()
        return self.losses.read()

    def state_dict(self) -> dict[str, Any]:
        """Returns the step number, the loss scale, counts and losses, as JSON types."""
        return {
            "step": self.number,
            "scaler": self.scaler.state_dict() or None,
            **self.losses.state_dict(),
            **self.finite.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`.

        Raises:
            CheckpointError: the learning-rate schedule is past the step.
        """
        check_not_past(self.lr_schedule, state_dict["step"])
        self._undecided = None  # belongs to an abandoned step
        self._update_scale()
        self.number = state_dict["step"]
        self.in_progress = self._without_batches(self.number)
        if state_dict["scaler"] is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        self.losses.load_state_dict(state_dict)
        self.finite.load_state_dict(state_dict)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, or all of them combined, for a checkpoint.

        Raises:
            ConfigError: there is no optimizer.
        """
        if not self.optimizers:
            raise ConfigError("there is no optimizer yet, but a checkpoint stores its state")
        return (
            self.optimizers[0] if len(self.optimizers) == 1 else CombinedOptimizer(self.optimizers)
        )

    def check_savable(self) -> None:
        """Checks that the state can be saved, and gathers losses; a collective call.

        Raises:
            DivergedError: weights or optimizer state are not finite.
            UserError: the replicas' weights have diverged.
        """
        self.await_device_verdict()
        self.finite.check_weights(self.number, self.optimizer)
        check_replicas(self.model.net, self.model.world)
        self.losses.gather()


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer` skips a step on the device if its `found_inf` is 1.

    Optimizers with a fused kernel do, and declare it for GradScaler. SGD is excluded: in a
    parameter's first step, its kernel would leave the momentum uninitialized.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(
        optimizer, SGD
    )
