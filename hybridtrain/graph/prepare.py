"""Readies a model for being looked at: wrappers are refused, and lazy modules get their shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from hybridtrain._torch_private import compiled_module
from hybridtrain.errors import ConfigError
from hybridtrain.graph.call_signature import CallSignature


def check_unwrapped(net: nn.Module) -> None:
    """Makes sure that `net` is a model, and not wrapped by something that runs it its own way.

    Raises:
        ConfigError: it is; says what to pass instead.
    """
    if isinstance(net, DataParallel | DistributedDataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(net).__name__}, and HybridModel is data parallel "
            f"itself: pass the module inside, net.module"
        )
    if compiled_module(net) is not None:
        raise ConfigError(
            "the model is compiled as a whole, and cannot be cut: pass the module that was given "
            "to torch.compile, and compile=true to compile its stages"
        )


def initialize_lazy(net: nn.Module, example_inputs: Any) -> None:
    """Gives parameters without a shape their shapes, by a forward in evaluation mode.

    Raises:
        ConfigError: there are some, and no `example_inputs`, or this forward does not use them.
    """
    if not _uninitialized(net):
        return
    if example_inputs is not None:
        signature, values = CallSignature.of_inputs(net, example_inputs)
        args, kwargs = signature.split(values)
        modes = {part: part.training for part in net.modules()}
        net.eval()
        try:
            with torch.no_grad():
                net(*args, **kwargs)
        finally:
            for part, mode in modes.items():
                part.training = mode
    if names := _uninitialized(net):
        raise ConfigError(
            f"{names[0]} is lazy, and has no shape yet: pass example_inputs=<the inputs of a "
            f"batch>, or call the model with a batch before"
        )


def _uninitialized(net: nn.Module) -> list[str]:
    tensors = (*net.named_parameters(), *net.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]
