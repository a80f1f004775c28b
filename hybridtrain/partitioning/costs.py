"""The costs of a model's layers for one micro-batch: time, memory, and bytes that cross a cut.

The bytes of weights are counted (`count`). The other costs need a run of the model's forward and
backward on a copy (`layer_watch`): timed on the device (`measurements`), or on fake tensors with
counters (`estimates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.patched_forwards import let_functions_call_copies
from hybridtrain._base.tensors import byte_size, is_quantized_parameter, packed_weight
from hybridtrain._base.torch_private import deepcopy_of_modules, hooks_of
from hybridtrain.errors import ConfigError, setting
from hybridtrain.graph import Layer
from hybridtrain.options import OptimizerState

StateOf = Callable[[nn.Parameter], int]
"""Returns the bytes of optimizer state of a parameter."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, for one micro-batch; times are in milliseconds.

    Attributes:
        parameters: the number of elements of its parameters.
        weight_bytes: its parameters and buffers, and the gradients and optimizer state of its
            trained parameters.
        activation_bytes: the tensors it makes that autograd saves for its backward or a later
            layer's; for the first layer also the model's inputs.
        temporary_bytes: the peak of further memory during its forward or backward: intermediate
            values, gradients, and an input that no backward needs; 0 if unknown.
        crossing_bytes: the values that cross a cut right after it: its output, and values of
            earlier layers that later layers need.
        crossing_ms: the time to send these values to another device; 0 on the same device.
        later_bytes: the part of `activation_bytes` that only later layers save. If the next layer
            is in another stage, that stage holds it, as its input.
        kept_bytes: what is kept of it if the layer is recomputed: the values that it makes for
            later layers, from which their recomputations start; for the first layer also the
            model's inputs, and for the last one what the loss saves. 0 if unknown.
    """

    name: str
    parameters: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    weight_bytes: int = 0
    activation_bytes: int = 0
    temporary_bytes: int = 0
    crossing_bytes: int = 0
    crossing_ms: float = 0.0
    later_bytes: int = 0
    kept_bytes: int = 0

    def recomputed(self) -> LayerCost:
        """Returns the cost of the layer if its activations are recomputed in its backward."""
        kept = self.kept_bytes or min(self.activation_bytes, self.crossing_bytes)
        return replace(
            self,
            backward_ms=self.backward_ms + self.forward_ms,
            activation_bytes=kept,
            temporary_bytes=max(0, self.temporary_bytes + self.activation_bytes - kept),
            later_bytes=min(kept, self.crossing_bytes),
        )


@dataclass(frozen=True)
class LayerSize:
    """The bytes of a layer's parameters and buffers, and of the parameters that are trained.

    Attributes:
        weights: bytes of all parameters and buffers.
        trained: bytes of the trained parameters.
        parameters: the number of elements of the parameters.
        frozen: bytes of the parameters that are not trained.
        state: bytes of the optimizer's state; None: unknown.
    """

    weights: int
    trained: int
    parameters: int = 0
    frozen: int = 0
    state: int | None = None


def most_temporary(costs: Sequence[LayerCost]) -> int:
    """Returns by how much a stage exceeds its activations, while one of its layers runs.

    While a layer runs, the later layers of the stage hold no activations: in the forward they have
    not run yet, and in the backward they have freed them.
    """
    most = behind = 0
    for cost in reversed(costs):
        most = max(most, cost.temporary_bytes - behind)
        behind += cost.activation_bytes
    return most


class CalledLayers(list[Layer]):
    """Layers that are calls of submodules in a model's own forward.

    Attributes:
        net: the model.
        first_uses: for each parameter, by name, the index of the layer in which, or behind which,
            the forward first uses it.
    """

    def __init__(
        self, layers: Iterable[Layer], net: nn.Module, first_uses: Mapping[str, int]
    ) -> None:
        super().__init__(layers)
        self.net = net
        self.first_uses = first_uses

    def outside(self) -> dict[int, list[Tensor]]:
        """Returns the parameters and buffers outside of all layers, by the layer that has them."""
        inside = {
            id(tensor)
            for layer in self
            for tensor in (*layer.module.parameters(), *layer.module.buffers())
        }
        outside: dict[int, list[Tensor]] = {}
        for name, tensor in (*self.net.named_parameters(), *self.net.named_buffers()):
            if id(tensor) not in inside:
                outside.setdefault(self.first_uses.get(name, 0), []).append(tensor)
        return outside


def state_of(state: OptimizerState, net: nn.Module) -> StateOf:
    """Returns a function that returns the bytes of optimizer state of a parameter of `net`."""
    if not callable(state):
        tensors = state
        return lambda parameter: round(tensors * byte_size(parameter))
    by_name = state(net)
    by_id = {id(p): by_name.get(name, 0) for name, p in net.named_parameters()}
    return lambda parameter: by_id.get(id(parameter), 0)


def layer_sizes(layers: Sequence[Layer], state: StateOf | None = None) -> list[LayerSize]:
    """Returns the size of each layer; a shared parameter counts in the first layer that has it.

    Args:
        layers: the layers.
        state: returns the bytes of optimizer state of a trained parameter; None: unknown.
    """
    counted: set[int] = set()
    outside = layers.outside() if isinstance(layers, CalledLayers) else {}
    sizes = []
    for index, layer in enumerate(layers):
        tensors = [*layer.module.parameters(), *layer.module.buffers(), *outside.get(index, ())]
        tensors = [tensor for tensor in tensors if id(tensor) not in counted]
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        buffers = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        counted.update(map(id, tensors))
        weights = sum(map(byte_size, [*parameters, *buffers]))
        trained = [p for p in parameters if p.requires_grad]
        trained_bytes = sum(map(byte_size, trained))
        sizes.append(
            LayerSize(
                weights,
                trained_bytes,
                sum(p.numel() for p in parameters),
                frozen=sum(map(byte_size, parameters)) - trained_bytes,
                state=None if state is None else sum(map(state, trained)),
            )
        )
    return sizes


def count(
    layers: Sequence[Layer], optimizer_tensors_per_param: float | StateOf = 2
) -> list[LayerCost]:
    """Returns the costs that need no run: the parameters and bytes of the weights.

    Args:
        layers: the layers of the chain, on any device.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it,
            2 for AdamW; or a function that returns the bytes for a parameter, see `state_of`.
    """
    state = optimizer_tensors_per_param
    sizes = layer_sizes(layers, state if callable(state) else state_of(state, nn.Module()))
    return [
        LayerCost(
            layer.name,
            parameters=size.parameters,
            weight_bytes=size.weights + size.trained + (size.state or 0),
        )
        for layer, size in zip(layers, sizes, strict=True)
    ]


def copy_of(layer: Layer, replacement: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a layer's module that can run without side effects on the model.

    Hooks do not run in the copy, and synchronised batch norms normalise locally, because other
    processes do not take part.

    Args:
        layer: the layer.
        replacement: returns the copy's tensor for a parameter, a buffer or another tensor.

    Raises:
        ConfigError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        for part in layer.module.modules():
            for leaf in tree_leaves(dict(vars(part))):  # includes its parameters and buffers
                if isinstance(leaf, torch.Generator):
                    memo[id(leaf)] = leaf.clone_state()
                elif isinstance(leaf, Tensor) and id(leaf) not in memo:
                    value = replacement(leaf).requires_grad_(leaf.requires_grad)
                    if isinstance(leaf, nn.Parameter) and not isinstance(value, nn.Parameter):
                        value = nn.Parameter(value, value.requires_grad)
                    memo[id(leaf)] = value
        module = deepcopy_of_modules(layer.module, memo, nn.Module.modules)
        let_functions_call_copies(zip(layer.module.modules(), module.modules(), strict=False), memo)
    except Exception as error:
        raise ConfigError(
            f"layer {layer.name!r} cannot be copied to measure its cost ({error}): choose a "
            f"split without measurements, such as {setting('split', 'uniform')} or "
            f"{setting('split', 'size')}"
        ) from error
    for part in module.modules():
        for hooks in hooks_of(part):
            hooks.clear()
        # says that transformers has set its hooks for `output_hidden_states`; it sets them again
        vars(part).pop("_output_capturing_hooks_installed", None)
        if isinstance(part, nn.SyncBatchNorm):
            part.forward = MethodType(_BatchNorm.forward, part)  # type: ignore[method-assign]
    return module


def let_run_on_cpu(copy: nn.Module) -> None:
    """Replaces what has kernels for GPUs alone in a copy of a model that runs on the CPU.

    The calls of submodules and the shapes of their outputs stay the same: flash attention of
    transformers becomes PyTorch's attention, and a layer of packed weights a linear layer of zeros.
    """
    for part in copy.modules():
        config = getattr(part, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str) and "flash" in attention:
            config._attn_implementation = "sdpa"  # type: ignore[union-attr]
        rows, columns = getattr(part, "out_features", None), getattr(part, "in_features", None)
        if packed_weight(part) is not None and isinstance(rows, int) and isinstance(columns, int):
            part.forward = partial(_linear_of_zeros, rows, columns)


def _linear_of_zeros(rows: int, columns: int, x: Tensor) -> Tensor:
    return F.linear(x, x.new_zeros(()).expand(rows, columns))


def fake_like(tensor: Tensor) -> Tensor:
    """Returns a fake CPU tensor with the layout and dtype of `tensor`; call it in a fake mode."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def copy_on_cpu(tensor: Tensor) -> Tensor:
    """Returns a copy of `tensor` on the CPU, without its graph."""
    if is_quantized_parameter(tensor):
        return deepcopy(tensor).to("cpu")
    return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)


@contextmanager
def undisturbed(layers: Sequence[Layer], device: torch.device) -> Iterator[None]:
    """Enables gradients in the block, and restores the default generators after it.

    If the whole model is in evaluation mode, as `from_pretrained` returns it, it is in training
    mode in the block, because it will be trained. Otherwise modules keep their modes.

    Args:
        layers: all layers of the model.
        device: the device that they run on.
    """
    roots = [layer.module for layer in layers]
    if isinstance(layers, CalledLayers):
        roots = [layers.net]
    modes = {part: part.training for root in dict.fromkeys(roots) for part in root.modules()}
    gpus = [device] if device.type == "cuda" else []
    generator_states = default_generators()
    try:
        if not any(modes.values()):
            for part in modes:
                part.training = True
        with torch.random.fork_rng(gpus), torch.enable_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
        rewind(generator_states)


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
