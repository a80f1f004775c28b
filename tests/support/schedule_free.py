"""Optimizers with modes, and with a closure, as other packages have them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """SGD whose parameters are y while it trains, and the average x while it evaluates.

    Its steps are counted in the groups. A step in the wrong mode is an error.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": False})

    def _show(self, training: bool) -> None:
        for group in self.param_groups:
            if group["trains"] is training:
                continue
            group["trains"] = training
            beta = group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    with torch.no_grad():
                        p.lerp_(self.state[p]["z"], 1 - beta if training else 1 - 1 / beta)

    def train(self) -> None:
        self._show(True)

    def eval(self) -> None:
        self._show(False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["trains"], "not in train mode"
            weight = 1 / (group["k"] + 1)
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class AsksForClosure(torch.optim.SGD):
    """Its closure is an optional argument, and needed, as those of sharpness-aware optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
