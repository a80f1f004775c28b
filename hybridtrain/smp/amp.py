"""Gradient scaling for stages in several processes: smp 1.x's `smp.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from hybridtrain.pipeline import unscale_
from hybridtrain.smp.bodies import refuse_in_body
from hybridtrain.smp.runtime import current


class GradScaler(TorchGradScaler):
    """`torch.amp.GradScaler`, with one decision for all stages: any overflow skips the step.

    All processes of a pipeline must call `step`, `unscale_` and `update` together, as scripts do
    anyway; inside a step they raise a UserError.

    Args:
        device: the device type; None: this process's. A number, as the first argument of
            `torch.cuda.amp.GradScaler`, is the initial scale.
        init_scale: as in `torch.amp.GradScaler`.
        growth_factor: as in `torch.amp.GradScaler`.
        backoff_factor: as in `torch.amp.GradScaler`.
        growth_interval: as in `torch.amp.GradScaler`.
        enabled: as in `torch.amp.GradScaler`.
        min_scale: a lower limit of the scale.
        adapts: False to keep the scale constant.
    """

    def __init__(
        self,
        device: str | float | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        adapts: bool = True,
    ) -> None:
        if device is not None and not isinstance(device, str):
            init_scale, device = float(device), None
        super().__init__(
            device or current().world.devices[0].type,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )
        self._min_scale = min_scale
        self.adapts = adapts
        self._unscales = False

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale, and agrees on overflows."""
        refuse_in_body("scaler.unscale_()", "after")
        if self._unscales:
            super().unscale_(optimizer)
            return
        self._unscales = True
        try:
            unscale_(self, optimizer, current().world)
        finally:
            self._unscales = False

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Calls `optimizer.step` unless a gradient of any stage has overflowed."""
        refuse_in_body("scaler.step()", "after")
        self._make_scale()
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale after a step."""
        refuse_in_body("scaler.update()", "after")
        self._make_scale()
        if not self.adapts and new_scale is None:
            new_scale = self.get_scale()
        super().update(new_scale)
        if self._min_scale and self.get_scale() < self._min_scale:
            super().update(self._min_scale)

    def load_scale(self, state: Mapping[str, Any]) -> None:
        """Loads only the scale of a `state_dict`; a constant scale stays."""
        if self.adapts and state:
            names = ("scale", "_growth_tracker")
            self.load_state_dict({**self.state_dict(), **{name: state[name] for name in names}})

    def _make_scale(self) -> None:
        if self.is_enabled():  # without the last stage, no loss creates the scale
            self.scale(torch.zeros((), device=current().world.devices[0]))
