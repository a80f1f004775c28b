"""The API of smp in plain PyTorch, as far as scripts of AWS's examples use it: the reference.

Each process has the whole model. A step is a loop over the micro-batches, which adds gradients up;
an optimizer's step averages them over all processes first.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtrain.smp import nn as smp_nn
from hybridtrain.smp.step import collected

_Optimizer = torch.optim.Optimizer


class _Wrapped:
    """`model.module`, as with DistributedDataParallel in between."""

    def __init__(self, net: nn.Module) -> None:
        self.module = net


def module(microbatches: int, replica: int, replicas: int, rank: int, dp_group: Any, start: Any):
    """Returns a module for `smdistributed.modelparallel.torch`.

    Args:
        microbatches: of a step.
        replica: whose data this process has.
        replicas: how many there are.
        rank: by which a script seeds and divides files: of the pipeline's first process.
        dp_group: one process of each replica.
        start: the state that the model begins with; None: its own.
    """
    smp: Any = types.ModuleType("smp_plain")
    smp.models = []

    class DistributedModel(nn.Module):
        def __init__(self, net: nn.Module, **options: Any) -> None:
            super().__init__()
            self.net = net
            if start is not None:
                net.load_state_dict(start)
            smp.models.append(net)

        module = property(lambda self: _Wrapped(self.net))

        def get_module(self) -> nn.Module:
            return self.net

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.net(*args, **kwargs)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return self.net.named_parameters(*args, **kwargs)

        def backward(self, loss: Tensor) -> None:
            (loss / microbatches).backward()

        def local_state_dict(self) -> dict[str, Any]:
            return self.net.state_dict()

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return self.net.state_dict()

        def register_post_partition_hook(self, hook: Any) -> None:
            pass

    def step(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            whole = next(a for a in args if isinstance(a, Tensor))
            values = []
            for index in range(microbatches):
                cut = [a.chunk(microbatches)[index] if isinstance(a, Tensor) else a for a in args]
                value = function(*cut)
                if hasattr(value, "to_tuple"):
                    value = dict(value)
                values.append(
                    torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value)
                )
            return collected(values, [len(whole) // microbatches] * microbatches)

        return run

    def average(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups if replicas > 1 else ():
            for p in group["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()

    def distributed_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer.register_step_pre_hook(average)
        optimizer.overflow = False
        optimizer.local_state_dict = lambda **_: optimizer.state_dict()
        return optimizer

    @contextlib.contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Any:
        yield

    smp.DistributedModel, smp.DistributedOptimizer, smp.step = (
        DistributedModel,
        distributed_optimizer,
        step,
    )
    for name in ("model_creation", "tensor_parallelism", "delay_param_initialization"):
        setattr(smp, name, nothing)
    for name in (
        *("init", "barrier", "set_partition", "set_activation_checkpointing", "save"),
        "save_checkpoint",
    ):
        setattr(smp, name, lambda *args, **kwargs: None)
    sizes = {"dp": replicas, "rdp": replicas, "pp": 1, "mp": 1, "tp": 1}
    for name, size in sizes.items():
        own = replica if size > 1 else 0
        setattr(smp, f"{name}_size", lambda size=size: size)
        setattr(smp, f"{name}_rank", lambda own=own: own)
    smp.rank = lambda: replica
    smp.local_rank = lambda: rank
    smp.get_dp_process_group = lambda: dp_group
    smp.nn, smp.__version__ = smp_nn, "plain"
    smp.__path__ = []  # a package: scripts import its submodule nn
    from timm.optim import Lamb  # imports all of timm's models, which few tests need

    smp.optimizers = types.SimpleNamespace(FusedLAMB=Lamb)
    smp.amp = types.SimpleNamespace(GradScaler=lambda: None)
    return smp
