"""The bytes of optimizer state that each parameter of a model needs, from a step on small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from hybridtrain._base.tensors import byte_size
from hybridtrain.step.param_groups import show_weights, take_step

# Elements of a small parameter: more than the 4,096 from which on bitsandbytes uses 8 bits.
_ELEMENTS = 1 << 13


def state_bytes(
    net: nn.Module, make: Callable[[Mapping[str, Parameter]], Optimizer], key: str | None = None
) -> dict[str, int]:
    """Returns the bytes of optimizer state of each trained parameter of `net`, by name.

        def make(parameters):
            return AdamW8bit(parameters.values())

        options = {"optimizer_tensors_per_param": partial(state_bytes, make=make)}
        model = HybridModel(net, world, split="memory", **options)

    The optimizer steps once on parameters of the same number of dimensions with up to 16,384
    elements, and the sizes of its state are extrapolated: by the dimensions that a tensor shares
    with its parameter, or by the number of elements.

    Args:
        net: any module, also on the meta device.
        make: returns the optimizer for parameters, on the CPU, by name.
        key: see `take_step`.

    Raises:
        ConfigError: see `take_step`.
    """
    shapes = {n: tuple(p.shape) for n, p in net.named_parameters() if p.requires_grad}
    small = {
        name: Parameter(torch.empty(_smaller(parameter.shape), dtype=parameter.dtype))
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
    }
    optimizer = make(small)
    place = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    alike: dict[object, list[str]] = {}
    for name, parameter in small.items():
        kind = place.get(id(parameter)), parameter.shape, parameter.dtype
        alike.setdefault(kind, []).append(name)
    for names in alike.values():
        for name in names[:2]:  # two, to see what they share
            small[name].grad = torch.zeros_like(small[name].data.zero_())
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = False  # valid only for parameters on a GPU
    show_weights(optimizer, training=True)
    take_step(optimizer, optimizer.step, key)
    shared = _shared_storages(optimizer, small)
    sizes = {}
    for names in alike.values():
        parameter = small[names[0]]
        tensors = [v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor)]
        for name in names:
            sizes[name] = sum(
                byte_size(tensor)
                if tensor.untyped_storage().data_ptr() in shared
                else round(byte_size(tensor) * _growth(tensor, parameter, shapes[name]))
                for tensor in tensors
            )
    return sizes


def _smaller(shape: torch.Size) -> list[int]:
    """Returns the shape with its largest dimensions halved, down to at least `_ELEMENTS`."""
    sizes = list(shape)
    while prod(sizes) >= 2 * _ELEMENTS:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return sizes


def _growth(tensor: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> float:
    """Returns how many times larger `tensor` is for a parameter of `shape`."""
    if tensor.numel() <= 1:
        return 1.0
    growth = [whole / max(1, size) for whole, size in zip(shape, parameter.shape, strict=True)]
    same = [a == b for a, b in zip(tensor.shape, parameter.shape, strict=False)]
    is_alike = tensor.dim() == parameter.dim() and all(
        equal or size == 1 for equal, size in zip(same, tensor.shape, strict=True)
    )
    if not is_alike:  # such as one number per block
        return prod(growth)
    return prod(factor for factor, equal in zip(growth, same, strict=True) if equal)


def _shared_storages(optimizer: Optimizer, small: Mapping[str, Parameter]) -> set[int]:
    """Returns the storages in the state of several parameters, such as tables of code points."""
    counts: dict[int, int] = {}
    for parameter in small.values():
        entries = optimizer.state.get(parameter, {}).values()
        storages = {v.untyped_storage().data_ptr() for v in entries if isinstance(v, Tensor)}
        for storage in storages:
            counts[storage] = counts.get(storage, 0) + 1
    return {storage for storage, count in counts.items() if count > 1 and storage}
