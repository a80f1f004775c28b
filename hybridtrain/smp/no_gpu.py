"""A machine without GPUs: `cuda` means the CPU there, so that scripts need no change.

Scripts of smp 1.x name the device: `torch.cuda.set_device(smp.local_rank())`, `data.to("cuda")`.
`smp.init()` replaces these few functions where PyTorch sees no GPU, and nowhere else. Tensors that
are made on a device, `torch.zeros(3, device="cuda")`, still fail: use `smp.device()`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

log = logging.getLogger("hybridtrain")

_CPU = torch.device("cpu")
_replaced = False


def let_cuda_mean_cpu() -> None:
    """Lets `.to("cuda")`, `.cuda()` and `torch.cuda.set_device` work without a GPU."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    log.info("there is no GPU here: cuda means the CPU in this script")
    owners: tuple[Any, ...] = (torch.Tensor, nn.Module)
    for owner in owners:
        owner.to = _on_cpu(owner.to)
        owner.cuda = _answering(owner.cuda, lambda self, *args, **kwargs: self)
    cuda: Any = torch.cuda
    # one function for each, since torch.compile has a table of them
    cuda.set_device = _answering(cuda.set_device, lambda *args, **kwargs: None)
    cuda.synchronize = _answering(cuda.synchronize, lambda *args, **kwargs: None)
    cuda.current_device = _answering(cuda.current_device, lambda: _CPU)


def _answering(function: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(answer)


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        return method(self, *args, **kwargs)

    return to


def _device(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return _CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return _CPU if type(value) is int else value
