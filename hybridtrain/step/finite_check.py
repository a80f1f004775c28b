"""The handling of losses, gradients and weights that are not finite.

A step whose loss or gradient is not finite is skipped, on all processes alike: the gradients are
the mean over the replicas, equal everywhere, so that their norm alone decides, and a loss that is
not finite makes its own gradients so (see `HybridModel.train_step`). Apart from the norm
itself, processes talk about it only where a step is skipped. Too many one after the other end the
run, and so do weights that are not finite when they are about to be saved. A step in which no
target counts is left out as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hybridtrain.errors import DataError, DivergedError, argument, setting
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.step.in_progress import StepInProgress
from hybridtrain.step.non_finite import (
    BufferSnapshot,
    find_origin,
    largest_gradient,
    non_finite_names,
)

_log = logging.getLogger(__name__)

# An adaptive scale of the loss halves itself at each overflow. Down here a float16 gradient that
# still overflows is larger than 65,504 by itself: the scale is not to blame any more.
_SMALLEST_SCALE = 1.0


class FiniteCheck:
    """Decides after each backward whether the optimizer may step.

    Args:
        model: the model.
        scaler: of the loss, for fp16. Its own skips, which adapt the scale, are counted apart.
        max_skipped: see `TrainerOptions`.
        adaptive_scale: whether the scaler adapts its scale.

    Attributes:
        scaler: see above.
        skipped: steps skipped since the run began, because a value was not finite.
        empty: steps skipped because no target counted.
        overflows: steps skipped because the scaled gradients of fp16 overflowed.
    """

    def __init__(
        self,
        model: HybridModel,
        scaler: GradScaler,
        max_skipped: int | None,
        adaptive_scale: bool,
    ) -> None:
        self.skipped = self.overflows = self.empty = 0
        self._model = model
        self.scaler = scaler
        self._max_skipped = max_skipped
        self._adaptive_scale = adaptive_scale
        self._buffers = BufferSnapshot(model.net)
        self._consecutive = 0
        self._began: tuple[int, str] = 0, ""  # the first of the consecutive ones

    @property
    def skipping(self) -> bool:
        """True if the last step was skipped."""
        return self._consecutive > 0

    @property
    def last_good_step(self) -> int | None:
        """The step before the first of those that are being skipped; None if none are."""
        return self._began[0] - 1 if self.skipping else None

    def begin_step(self) -> None:
        """Remembers the buffers, which a step that is skipped must not change."""
        self._buffers.take()

    def restore_where_not_finite(self, norm: Tensor) -> None:
        """Puts the buffers back on their devices, if `norm` is not finite; no host waits for it."""
        self._buffers.restore_where(~norm.isfinite())

    def allows_step(self, trained: StepInProgress, norm: float, undone: bool = False) -> bool:
        """Returns whether the optimizer may step; if not, the step is counted and undone.

        Args:
            trained: what the step was trained on.
            norm: of its gradients, unscaled and not clipped yet.
            undone: the devices have left the step out already, and gradients are of a later one.

        Raises:
            DivergedError: too many consecutive steps were skipped.
        """
        if math.isfinite(norm):
            self._consecutive = 0
            return True
        # finite gradients whose squares overflow: clipping would make them 0, and Adam's moments
        # would be infinite for ever
        too_large = not undone and not self._any_gradient_is_bad()
        finite_loss = self._loss_is_finite(trained.results)
        overflow = finite_loss and not too_large and self.scaler.is_enabled()
        if overflow:
            self.overflows += 1
            # a scaler of `hybridtrain.smp` says itself whether it adapts
            adapts = self._adaptive_scale and getattr(self.scaler, "adapts", True)
            if adapts and self.scaler.get_scale() > _SMALLEST_SCALE:
                return False
        else:
            if not undone:
                self._buffers.restore()
            self.skipped += 1
        self._consecutive += 1
        if self._consecutive == 1:
            if too_large:
                where = f"{largest_gradient(self._model)}: finite, but the norm overflows"
            else:
                loss_fn = None if finite_loss else trained.loss_fn
                where = find_origin(self._model, trained, loss_fn, gradients=not undone)
            self._began = trained.number, where
            if self._model.world.is_main:
                what = "gradient's norm" if too_large else "gradient" if finite_loss else "loss"
                _log.warning(
                    "step %d is skipped, its %s is not finite; it began in %s",
                    trained.number, what, where,
                )  # fmt: skip
        if self._max_skipped is not None and self._consecutive >= self._max_skipped:
            raise DivergedError(
                f"the run has diverged: {self._consecutive} consecutive steps, up to step "
                f"{trained.number}, had a loss or gradients that are not finite "
                f"({setting('max_skipped', self._max_skipped)}). At step {self._began[0]} it "
                f"began in {self._began[1]}"
            )
        return False

    def skip_empty(self, step: int) -> None:
        """Counts a step without anything to learn from; it says nothing of the run's health."""
        self._buffers.restore()
        self.empty += 1
        if self.empty == 1 and self._model.world.is_main:
            _log.warning(
                "step %d is skipped: none of its targets counts for the loss. If that is not "
                "meant, compare %s with the labels. Later ones are counted as empty_steps",
                step,
                argument("ignore_index"),
            )

    def check_not_all_empty(self, steps: int) -> None:
        """Makes sure, at the end of a run, that something was learnt in its `steps`.

        Raises:
            DataError: no target of any step counted for the loss.
        """
        if self.empty >= steps > 0:
            raise DataError(
                f"nothing was learnt: in all {steps} steps no target counted for the loss. Are all "
                f"labels equal to {argument('ignore_index')}, or all marked as padding?"
            )

    def check_weights(self, step: int, optimizer: Optimizer) -> None:
        """Makes sure that what is about to be saved is finite; a collective call.

        That is what training changes: trained parameters, running statistics and moments. What a
        model keeps beside them, such as the -inf of a mask, is meant to be there.

        Args:
            step: the optimizer steps done.
            optimizer: of the moments.

        Raises:
            DivergedError: names the tensor.
        """
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        changing: dict[str, Tensor] = dict(trained)
        changing |= {
            f"{prefix}.{key}".lstrip("."): buffer
            for prefix, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            for key, buffer in module.named_buffers()
        }
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        changing |= {
            f"the optimizer's {key} of {names.get(id(parameter), 'a parameter')}": value
            for parameter, entry in optimizer.state.items()
            if isinstance(entry, Mapping)
            for key, value in entry.items()
        }
        own = non_finite_names(changing)
        found = [names for names in self._model.world.gather(own) if names]
        if found:
            more = f" and {len(found[0]) - 1} more tensors are" if len(found[0]) > 1 else " is"
            raise DivergedError(
                f"the run has diverged: {found[0][0]}{more} not finite at step {step}, which is "
                f"not saved"
            )

    def _any_gradient_is_bad(self) -> bool:
        """Returns whether a gradient of any stage is not finite; a collective call."""
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        return any(self._model.world.gather(bool(non_finite_names(gradients))))

    def _loss_is_finite(self, results: Sequence[TrainStepResult]) -> bool:
        # without the last stage the loss is NaN: such a process is left out of the sum
        bad = any(not math.isfinite(float(result.loss)) for result in results)
        return not self._model.reduce_loss(torch.tensor([float(bad)])).item()

    def counts(self) -> dict[str, int]:
        """Returns the counts by name."""
        return {
            "skipped_steps": self.skipped,
            "overflow_steps": self.overflows,
            "empty_steps": self.empty,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts, and the consecutive skipped steps, in JSON's types."""
        step, where = self._began
        skipping = {"steps": self._consecutive, "first": step, "origin": where}
        return {**self.counts(), "skipping": skipping if self.skipping else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self.skipped = state["skipped_steps"]
        self.overflows = state["overflow_steps"]
        self.empty = state["empty_steps"]
        skipping = state["skipping"] or {"steps": 0, "first": 0, "origin": ""}
        self._consecutive = skipping["steps"]
        self._began = skipping["first"], skipping["origin"]
