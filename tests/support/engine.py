"""Layers that fail, overflow or report, and the trainer that their tests need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.loop import Run, Tracker
from support.compare import cpu_world
from support.nets import WIDTH, regression

PATIENCE_S = 20


def in_time(action: Callable[[], Any]) -> dict[str, Any]:
    """Runs `action` in another thread; returns its "value" or "error", and fails if it hangs."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = action()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the step hangs"
    return outcome


class Faulty(nn.Module):
    """Passes its input on, and raises in the forward or backward of one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.never()

    def never(self) -> None:
        self.fail_at("", 0)

    def fail_at(self, kind: str, microbatch: int) -> None:
        """`kind` is "forward" or "backward"; counts the micro-batches from here on."""
        self._where, self._calls = (kind, microbatch), 0

    def forward(self, x: Tensor) -> Tensor:
        microbatch = self._calls
        self._calls += 1
        if self._where == ("forward", microbatch):
            raise ArithmeticError("boom")
        if self._where == ("backward", microbatch):
            x.register_hook(self._raise)
        return x

    @staticmethod
    def _raise(grad: Tensor) -> None:
        raise ArithmeticError("boom")


class Overflow(nn.Module):
    """A linear layer that multiplies its gradient with infinity at the steps in `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.at: Sequence[int] = ()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.step in self.at and y.requires_grad:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


class Steps(Tracker):
    """Keeps weights and values of every step, on each rank, and counts steps for `Overflow`."""

    main_only = False

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.weights = {0: self._copy()}
        self.values: dict[int, Mapping[str, float]] = {}

    def on_start(self, run: Run) -> None:
        self._count(run.step)

    def on_step(self, run: Run, samples: int) -> None:
        self.weights[run.step] = self._copy()
        self._count(run.step)

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        self.values[run.step] = values

    def of(self, key: str) -> list[float]:
        """The logged values of `key`, by step."""
        return [self.values[step][key] for step in sorted(self.values) if key in self.values[step]]

    def moved(self, step: int) -> set[str]:
        """The names of the parameters that `step` changed."""
        before, after = self.weights[step - 1], self.weights[step]
        return {name for name, value in after.items() if not torch.equal(value, before[name])}

    def _copy(self) -> dict[str, Tensor]:
        own = self.net.named_parameters()
        return {name: p.detach().clone() for name, p in own if not p.is_meta}

    def _count(self, step: int) -> None:
        for layer in self.net.modules():
            if isinstance(layer, Overflow):
                layer.step = step + 1


LOSS_SCALE = 2.0**10


def fp16_trainer(
    nb_part: int = 2,
    at: Sequence[int] = (),
    layer: int = 2,
    steps: int = 6,
    scale: float = LOSS_SCALE,
    growth: int = 1000,
    world: World | None = None,
    fused: bool | None = None,
    **options: Any,
) -> Any:
    """A trainer in fp16 of four `Overflow` layers, of which `layer` overflows at the steps `at`."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Overflow() for _ in range(4)])
    net[layer].at = at
    world = world or cpu_world(nb_part)
    model = HybridModel(net, world, chunks=2, precision="fp16")
    recorder = Steps(net)
    trainer: Any = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused),
        float_mse,
        TrainLoader(TensorDataset(*regression(24)), 4, model.world, seed=1),
        steps=steps,
        scaler=GradScaler("cpu", init_scale=scale, growth_interval=growth),
        log_every=1,
        callbacks=[recorder],
        **options,
    )
    trainer.recorder = recorder
    return trainer


def float_mse(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output.float(), targets)
