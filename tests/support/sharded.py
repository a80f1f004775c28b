"""Training with `shard=none` and with another value, to be compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrain import HybridModel, ShardedOptimizer, World
from hybridtrain.step import MuonAdamW

from .compare import assert_same
from .schedule_free import ScheduleFree

STEPS = 3
# The samples of each replica's batch in each step: other numbers of micro-batches, and ragged ones.
ROWS = [(7, 3), (5, 8), (1, 6)]


class Relative(Optimizer):
    """Not elementwise: the step is scaled by the norms of the whole parameter and gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                parameter -= group["lr"] * mean * parameter.norm() / (mean.norm() + 1e-6)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "relative": Relative,
    "muon": lambda params: MuonAdamW(params, lr=0.02),
}


def adamw8bit(params: Any) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit  # takes seconds

    made: Optimizer = AdamW8bit(params, lr=0.02, min_8bit_size=32)
    return made


if find_spec("bitsandbytes") is not None:
    OPTIMIZERS["adamw8bit"] = adamw8bit


def make_optimizer(model: HybridModel, name: str) -> Optimizer:
    make = {**OPTIMIZERS, "schedule-free": ScheduleFree}[name]
    if model.options.shard == "optimizer":
        return ShardedOptimizer(model, make)
    return make(model.parameters())


def values(tensors: Any) -> dict[str, Tensor]:
    """Copies of the tensors, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors if tensor is not None}


def history(
    net: nn.Module,
    world: World,
    shard: str,
    batch: Callable[[int, int], Any],
    loss: Any,
    optimizer: str = "adamw",
    clip: float | None = None,
    accumulate: int = 1,
    before_step: Callable[[int, HybridModel, Optimizer], object] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """What a training has computed: losses, gradients, norms, weights, buffers, outputs.

    Args:
        net: is copied.
        batch: `batch(rows, seed)`; the seed is another one in each step, batch and replica.
        before_step: called with the number of each step.
    """
    torch.manual_seed(world.rank)
    model = HybridModel(copy.deepcopy(net), world, shard=shard, **{"chunks": 4, **options})
    trained = make_optimizer(model, optimizer)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        if before_step is not None:
            before_step(step, model, trained)
        for part in range(accumulate):
            rows = ROWS[(step + part) % len(ROWS)][world.data_parallel_rank]
            inputs, targets = batch(rows, 100 * step + 10 * part + world.data_parallel_rank)
            out = model.train_step(inputs, targets, loss, sync=part + 1 == accumulate)
            found[f"{step}.{part} loss"] = out.loss
        gradients = ((name, p.grad) for name, p in model.named_parameters())
        found |= {f"{step} gradient {k}": v for k, v in values(gradients).items()}
        found[f"{step} norm"] = model.grad_norm()
        if clip is not None:
            found[f"{step} clipped norm"] = model.clip_grad_norm_(clip)
        trained.step()
        trained.zero_grad()
        found |= {f"{step} {k}": v for k, v in values(model.named_parameters()).items()}
        found |= {f"{step} {k}": v for k, v in values(model.named_buffers()).items()}
        if step == 1:
            model.eval()
            output = model(batch(4, 7 + world.data_parallel_rank)[0])
            found |= {} if output is None else {"evaluated": output}
            model.train()
    found |= {f"state {name}": value for name, value in model.state_dict().items()}
    return {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}


def check_same(net: nn.Module, world: World, shard: str, **settings: Any) -> None:
    """Compares a training with `shard` and one without."""
    expected = history(net, world, "none", **settings)
    # a loss may be NaN where another process has the last stage
    nan = {name for name, value in expected.items() if bool(value.isnan().any())}
    assert all("loss" in name for name in nan)
    found = history(net, world, shard, **settings)
    assert_same(
        {name: value for name, value in found.items() if name not in nan},
        {name: value for name, value in expected.items() if name not in nan},
        shard,
    )
    moved = [n for n in expected if f"0 {n}" in expected or n.startswith("0 gradient")]
    assert moved
