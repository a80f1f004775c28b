"""The names of smp 1.x that are not here: each gives one error that says so."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybridtrain.errors import ConfigError, UserError
from hybridtrain.smp.bodies import current_body

_TENSOR = "tensor parallelism is not supported: leave it out, or write the layer in plain PyTorch"
_APEX = "the optimizers of apex are not there: use torch.optim, with fused=True on GPUs"

NAMES = {
    "tensor_parallelism": _TENSOR,
    "set_tensor_parallelism": _TENSOR,
    "tp_register": _TENSOR,
    "tp_register_with_module": _TENSOR,
    "nn": f"smp.nn is for tensor parallelism, and apex's layer norm: {_TENSOR}; torch.nn.LayerNorm",
    "optimizers": _APEX,
    "fp16": "FP16_Module and FP16_Optimizer are made by fp16=true in the configuration",
    "sharded_data_parallel": "sharded data parallelism is not supported",
}
"""The refused names of `smp`, each with what to do."""

_refuses = False


def refuse(name: str) -> NoReturn:
    """Raises the error of a refused name."""
    raise ConfigError(f"smp.{name}: {NAMES[name]}")


def refuse_optimizer_steps_in_bodies() -> None:
    """Has `optimizer.step()` raise a UserError in a step, where it would run per micro-batch."""
    global _refuses
    if not _refuses:
        _refuses = True
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if current_body() is not None:
        raise UserError(
            "optimizer.step() in a step would run for every micro-batch, before its backward: call "
            "it after the step, when the gradients of all micro-batches are there"
        )
