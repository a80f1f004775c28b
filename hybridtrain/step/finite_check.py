"""The handling of losses, gradients and weights that are not finite.

All processes skip a step with a loss or gradient that is not finite. They agree without
communication, because the gradients are averaged over the replicas, so their norm is the same
everywhere, and a loss that is not finite makes its gradients non-finite too (see
`HybridModel.train_step`). Processes exchange further messages only when a step is skipped. Too many
consecutive skipped steps end the run, and so do weights that are not finite when they are about to
be saved. A step in which no target counts is skipped as well.
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

# An adaptive loss scale halves at each overflow. Below this value, a float16 gradient that still
# overflows exceeds 65,504 itself, so the scale is not the cause.
_SMALLEST_SCALE = 1.0


class FiniteCheck:
    """Decides after each backward whether the optimizer may step.

    Args:
        model: the model.
        scaler: the loss scaler, for fp16. Its own skips, which adapt the scale, have their own
            count.
        max_skipped: see `TrainerOptions`.
        adaptive_scale: whether the scaler adapts its scale.

    Attributes:
        scaler: the loss scaler.
        scales: whether it is enabled.
        skipped: the number of steps skipped since the run began because of a non-finite value.
        empty: the number of steps skipped because no target counted.
        overflows: the number of steps skipped because scaled fp16 gradients overflowed.
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
        self.use_scaler(scaler)
        self._max_skipped = max_skipped
        self._adaptive_scale = adaptive_scale
        self._buffers = BufferSnapshot(model.net)
        self._consecutive = 0
        self._began: tuple[int, str] = 0, ""  # the first of the consecutive skipped steps

    def use_scaler(self, scaler: GradScaler) -> None:
        """Sets the loss scaler."""
        self.scaler, self.scales = scaler, scaler.is_enabled()

    @property
    def skipping(self) -> bool:
        """True if the last step was skipped."""
        return self._consecutive > 0

    @property
    def last_good_step(self) -> int | None:
        """The step before the current series of skipped steps; None if the last was not skipped."""
        return self._began[0] - 1 if self.skipping else None

    def begin_step(self) -> None:
        """Saves the buffers, which a skipped step must not change."""
        self._buffers.take()

    def restore_where_not_finite(self, norm: Tensor) -> None:
        """Restores the buffers on their devices if `norm` is not finite, without a host sync."""
        self._buffers.restore_where(~norm.isfinite())

    def allows_step(self, trained: StepInProgress, norm: float, undone: bool = False) -> bool:
        """Returns whether the optimizer may step; if not, counts the step and undoes it.

        Args:
            trained: the step in progress.
            norm: the norm of its gradients, unscaled and not clipped.
            undone: True if the devices have already skipped the step; gradients are a later step's.

        Raises:
            DivergedError: too many consecutive steps were skipped.
        """
        if math.isfinite(norm):
            self._consecutive = 0
            return True
        # finite gradients with overflowing squares: clipping would make them 0, and Adam's moments
        # would stay infinite forever
        too_large = not undone and not self._any_gradient_is_bad()
        finite_loss = self._loss_is_finite(trained.results)
        overflow = finite_loss and not too_large and self.scaler.is_enabled()
        if overflow:
            self.overflows += 1
            # a scaler of `hybridtrain.smp` declares whether it adapts
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
                    "skipping step %d because its %s is not finite; origin: %s",
                    trained.number, what, where,
                )  # fmt: skip
        if self._max_skipped is not None and self._consecutive >= self._max_skipped:
            raise DivergedError(
                f"the run has diverged: {self._consecutive} consecutive steps, up to step "
                f"{trained.number}, had a loss or gradients that are not finite "
                f"({setting('max_skipped', self._max_skipped)}). Origin in step {self._began[0]}: "
                f"{self._began[1]}"
            )
        return False

    def skip_empty(self, step: int) -> None:
        """Counts a step without counted targets, which is not a sign of divergence."""
        self._buffers.restore()
        self.empty += 1
        if self.empty == 1 and self._model.world.is_main:
            _log.warning(
                "skipping step %d because none of its targets counts for the loss. If that is not "
                "intended, compare %s with the labels. Further ones are counted as empty_steps",
                step,
                argument("ignore_index"),
            )

    def check_not_all_empty(self, steps: int) -> None:
        """Checks at the end of a run that at least one of its `steps` had counted targets.

        Raises:
            DataError: no target of any step counted for the loss.
        """
        if self.empty >= steps > 0:
            raise DataError(
                f"nothing was learned: in all {steps} steps no target counted for the loss. Check "
                f"whether all labels equal {argument('ignore_index')} or are marked as padding"
            )

    def check_weights(self, step: int, optimizer: Optimizer) -> None:
        """Checks that the state to save is finite; a collective call.

        It checks everything that training changes: trained parameters, running statistics and
        optimizer state. Other buffers of the model may be infinite on purpose, such as the -inf of
        a mask.

        Args:
            step: the number of completed optimizer steps.
            optimizer: the optimizer with the state.

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
        names_here = non_finite_names(changing)
        names_by_rank = [names for names in self._model.world.gather(names_here) if names]
        if names_by_rank:
            more = (
                f" and {len(names_by_rank[0]) - 1} more tensors are"
                if len(names_by_rank[0]) > 1
                else " is"
            )
            raise DivergedError(
                f"the run has diverged: {names_by_rank[0][0]}{more} not finite at step {step}, "
                f"so no checkpoint was saved"
            )

    def _any_gradient_is_bad(self) -> bool:
        """Returns whether a gradient of any stage is not finite; a collective call."""
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        return any(self._model.world.gather(bool(non_finite_names(gradients))))

    def _loss_is_finite(self, results: Sequence[TrainStepResult]) -> bool:
        # in a process without the last stage the loss is NaN, so exclude it from the sum
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
        """Returns the counts, and the number of consecutive skipped steps, as JSON types."""
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
