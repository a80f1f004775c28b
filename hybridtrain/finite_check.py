"""The handling of losses, gradients and weights that are not finite.

A step whose loss or gradient is not finite is skipped, on all processes alike: the gradients are
the mean over the replicas, equal everywhere, so that their norm alone decides, and a loss that is
not finite makes its own gradients so (see `HybridModel.train_step`). Only where a step is skipped
do processes talk about it. Too many one after the other end the run, and so do weights that are not
finite when they are about to be saved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from hybridtrain.buffer_snapshot import BufferSnapshot
from hybridtrain.data.loader import Batch
from hybridtrain.errors import DivergedError
from hybridtrain.losses import LossFn
from hybridtrain.model import HybridModel
from hybridtrain.non_finite import find_origin, non_finite_names

_log = logging.getLogger(__name__)

# An adaptive scale of the loss halves itself at each overflow. Down here a float16 gradient that
# still overflows is larger than 65,504 by itself: the scale is not to blame any more.
_SMALLEST_SCALE = 1.0


class FiniteCheck:
    """Decides after each backward whether the optimizer may step.

    Args:
        model: the model; what its state has of values that are not finite by now, such as the -inf
            of a mask, is meant to be there.
        scaler: of the loss, for fp16. Its own skips, which adapt the scale, are counted apart.
        max_skipped: see `TrainerOptions`.
        adaptive_scale: whether the scaler adapts its scale.

    Attributes:
        skipped: steps skipped since the run began.
        overflows: steps skipped because the scaled gradients of fp16 overflowed.
    """

    def __init__(
        self,
        model: HybridModel,
        scaler: GradScaler,
        max_skipped: int | None,
        adaptive_scale: bool,
    ) -> None:
        self.skipped = self.overflows = 0
        self._model = model
        self._scaler = scaler
        self._max_skipped = max_skipped
        self._adaptive_scale = adaptive_scale
        self._buffers = BufferSnapshot(model.net)
        self._meant = frozenset(non_finite_names(model.net.state_dict()))
        self._consecutive = 0
        self._began: tuple[int, str] = 0, ""  # the first of the consecutive ones

    @property
    def skipping(self) -> bool:
        """True if the last step was skipped."""
        return self._consecutive > 0

    def begin_step(self) -> None:
        """Remembers the buffers, which a step that is skipped must not change."""
        self._buffers.take()

    def allows_step(
        self,
        step: int,
        norm: Tensor,
        batches: Sequence[Batch],
        losses: Sequence[Tensor],
        loss_fn: LossFn,
    ) -> bool:
        """Returns whether the optimizer may step; if not, the step is counted and undone.

        Args:
            step: the number of this step.
            norm: of the gradients, unscaled and not clipped yet.
            batches: what the step was trained on.
            losses: the loss of each.
            loss_fn: what computed it.

        Raises:
            DivergedError: too many consecutive steps were skipped.
        """
        # The one wait for a GPU in a step: whether an optimizer steps is decided on the host, and
        # a step with NaN cannot be undone. fp16's GradScaler waits for the same reason.
        if math.isfinite(norm.item()):
            self._consecutive = 0
            return True
        if not self._any_gradient_is_bad():  # finite, but their squares overflow
            return True
        finite_loss = self._loss_is_finite(losses)
        overflow = finite_loss and self._scaler.is_enabled()
        if overflow:
            self.overflows += 1
            if self._adaptive_scale and self._scaler.get_scale() >= _SMALLEST_SCALE:
                return False
        else:
            self._buffers.restore()
            self.skipped += 1
        self._consecutive += 1
        if self._consecutive == 1:
            self._began = step, find_origin(self._model, batches, None if finite_loss else loss_fn)
            if self._model.world.is_main:
                what = "gradient" if finite_loss else "loss"
                _log.warning(
                    "step %d is skipped, its %s is not finite; it began in %s",
                    step, what, self._began[1],
                )  # fmt: skip
        if self._consecutive == self._max_skipped:
            raise DivergedError(
                f"the run has diverged: {self._consecutive} consecutive steps, up to step {step}, "
                f"had a loss or gradients that are not finite (max_skipped={self._max_skipped}). "
                f"At step {self._began[0]} it began in {self._began[1]}"
            )
        return False

    def skip_empty(self) -> None:
        """Counts a step without anything to learn from; it says nothing of the run's health."""
        self._buffers.restore()
        self.skipped += 1

    def check_weights(self, step: int) -> None:
        """Makes sure that what is about to be saved is finite; a collective call.

        Raises:
            DivergedError: names the tensor.
        """
        own = [n for n in non_finite_names(self._model.net.state_dict()) if n not in self._meant]
        found = [names for names in self._model.world.gather(own) if names]
        if found:
            more = f" and {len(found[0]) - 1} more tensors are" if len(found[0]) > 1 else " is"
            raise DivergedError(
                f"the run has diverged: {found[0][0]}{more} not finite at step {step}, which is "
                f"not saved"
            )

    def _any_gradient_is_bad(self) -> bool:
        """Returns whether a gradient is not finite; equal on all processes, as gradients are."""
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        return bool(non_finite_names(gradients))

    def _loss_is_finite(self, losses: Sequence[Tensor]) -> bool:
        bad = any(not math.isfinite(float(loss)) for loss in losses)
        return not self._model.reduce_loss(torch.tensor([float(bad)])).item()

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts, in JSON's types."""
        return {"skipped_steps": self.skipped, "overflow_steps": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`; checkpoints of earlier versions have no counts."""
        self.skipped = state.get("skipped_steps", 0)
        self.overflows = state.get("overflow_steps", 0)
