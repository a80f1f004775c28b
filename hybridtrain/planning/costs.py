"""The costs of a model's layers: time, memory, and bytes that cross a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._torch_private import hooks_of
from hybridtrain.construction import default_generators, rewind
from hybridtrain.errors import ConfigError
from hybridtrain.graph import Layer, Segment, works_in_place
from hybridtrain.memory import storage_id
from hybridtrain.skip import popped_by, skip_scope, stashed_by


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, for one micro-batch; times are in milliseconds.

    Attributes:
        parameters: elements of its parameters.
        weight_bytes: its parameters and buffers, and the gradients and the optimizer's state of
            those parameters that are trained.
        activation_bytes: what it makes that autograd keeps for a backward, its own or a later
            layer's. The first layer has the model's inputs too.
        crossing_bytes: what would cross a cut right after it: its own output, and every value of
            an earlier layer that a later one needs.
        crossing_ms: the time to bring that to another device; 0 where it stays.
    """

    name: str
    parameters: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    weight_bytes: int = 0
    activation_bytes: int = 0
    crossing_bytes: int = 0
    crossing_ms: float = 0.0


def count(layers: Sequence[Layer], optimizer_tensors_per_param: int = 2) -> list[LayerCost]:
    """Returns the costs that need no run: parameters and bytes of the weights, on any device.

    What several layers share counts in the first of them. The optimizer keeps so many tensors of a
    parameter's size for it; AdamW keeps 2.
    """
    seen: set[int] = set()
    costs = []
    for layer in layers:
        parameters = [p for p in layer.module.parameters() if id(p) not in seen]
        buffers = [b for b in layer.module.buffers() if id(b) not in seen]
        seen.update(map(id, [*parameters, *buffers]))
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        weight_bytes = sum(tensor.nbytes for tensor in [*parameters, *buffers])
        weight_bytes += trained * (1 + optimizer_tensors_per_param)
        elements = sum(p.numel() for p in parameters)
        costs.append(LayerCost(layer.name, parameters=elements, weight_bytes=weight_bytes))
    return costs


# Runs a function and returns its result and how long it took, in milliseconds.
Clock = Callable[[Callable[[], Any]], tuple[Any, float]]

# The input of a layer in the chain: the value before it, and the skip values that it pops.
Given = tuple[Any, dict[str, Any]]


class LayerRun(NamedTuple):
    """One forward and backward of a layer; `backward_ms` is 0 where there is no backward.

    `handed_on` is the output and the skip values that the layer stashes, without their graph;
    `gradients` are those of its inputs and trained parameters.
    """

    handed_on: tuple[Any, dict[str, Any]]
    gradients: Sequence[Tensor | None]
    forward_ms: float
    backward_ms: float


def run_layer(
    module: nn.Module,
    given: Given,
    precision: Callable[[], AbstractContextManager[object]],
    clock: Clock,
) -> LayerRun:
    """Runs `module`, a copy of a layer's, alone, as a stage would: its inputs begin a graph.

    The forward runs in the context `precision`. There is a backward where gradients are enabled and
    an output requires one; it leaves no gradients.
    """
    leaves: list[Tensor] = [tensor for tensor in module.parameters() if tensor.requires_grad]
    copy = works_in_place(module)

    def enter(tensor: Tensor) -> Tensor:
        leaf = _detached(tensor)
        if leaf.requires_grad:
            leaves.append(leaf)
        return leaf.clone() if copy else leaf

    value, popped = tree_map_only(Tensor, enter, given)

    def forward() -> tuple[Any, dict[str, Any]]:
        with precision(), skip_scope(popped) as values:
            return module(value), values

    (output, values), forward_ms = clock(forward)
    handed_on = output, {name: values[name] for name in stashed_by(module)}
    roots = [tensor for tensor in tensors_of(handed_on) if tensor.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    backward_ms = 0.0
    if torch.is_grad_enabled() and roots:
        ones = [torch.ones_like(root) for root in roots]
        # not autograd.grad, in which a reentrant checkpoint in the layer could not run
        _, backward_ms = clock(lambda: torch.autograd.backward(roots, ones))
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    return LayerRun(tree_map_only(Tensor, _detached, handed_on), gradients, forward_ms, backward_ms)


# Runs a layer; also returns the bytes of each storage that autograd keeps for its backward, by
# `storage_id`.
RunLayer = Callable[[Layer, Given], tuple[LayerRun, Mapping[int, int]]]


def run_chain(
    layers: Sequence[Layer], inputs: Any, run: RunLayer, optimizer_tensors_per_param: int = 2
) -> list[LayerCost]:
    """Runs a micro-batch through the chain, and returns the costs of this one run."""
    maker = {storage_id(tensor): 0 for tensor in tensors_of(inputs)}  # the layer that made it
    counted = set[int]()
    stashes: dict[str, Any] = {}
    last_pop = {name: i for i, layer in enumerate(layers) for name in popped_by(layer.module)}
    costs = count(layers, optimizer_tensors_per_param)
    activations = [0] * len(layers)
    kept: list[Given] = []  # so that no storage gets the id of an earlier one
    value = inputs
    for index, layer in enumerate(layers):
        popped = {name: stashes[name] for name in popped_by(layer.module) if name in stashes}
        kept.append((value, popped))
        ran, saved = run(layer, kept[-1])
        value, stashed = ran.handed_on
        stashes = {k: v for k, v in (stashes | stashed).items() if last_pop.get(k, 0) > index}
        for storage, nbytes in saved.items():
            activations[maker.get(storage, index)] += nbytes * (storage not in counted)
        counted.update(maker.keys() & saved)
        crossing = tensors_of((value, stashes))
        for tensor in crossing:
            if storage_id(tensor) not in maker:
                maker[storage_id(tensor)] = index
                counted |= {storage_id(tensor)} & saved.keys()
        costs[index] = replace(
            costs[index],
            forward_ms=ran.forward_ms,
            backward_ms=ran.backward_ms,
            crossing_bytes=sum(tensor.nbytes for tensor in crossing),
        )
    pairs = zip(costs, activations, strict=True)
    return [replace(cost, activation_bytes=nbytes) for cost, nbytes in pairs]


def copy_of(layer: Layer, own: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a layer's module, whose runs leave no trace in the model.

    `own` returns what stands in it for a parameter, a buffer or another tensor. Hooks do not run in
    it, and synchronised batch norms normalise by themselves: other processes do not take part.

    Raises:
        ConfigError: the module cannot be copied.
    """
    known: dict[int, Any] = {}
    for part in layer.module.modules():
        if isinstance(part, Segment):
            known |= part.surroundings()
        for leaf in tree_leaves(dict(vars(part))):  # of its parameters and buffers, too
            if isinstance(leaf, torch.Generator):
                known[id(leaf)] = leaf.clone_state()
            elif isinstance(leaf, Tensor) and id(leaf) not in known:
                ours = own(leaf).requires_grad_(leaf.requires_grad)
                is_parameter = isinstance(leaf, nn.Parameter)
                known[id(leaf)] = nn.Parameter(ours, ours.requires_grad) if is_parameter else ours
    try:
        module = deepcopy(layer.module, known)
    except Exception as error:
        raise ConfigError(
            f"layer {layer.name!r} is measured on a copy, and cannot be copied ({error}): choose a "
            f"split that is not measured, such as split=uniform or split=size"
        ) from error
    for part in module.modules():
        for hooks in hooks_of(part):
            hooks.clear()
        if isinstance(part, nn.SyncBatchNorm):
            part.forward = MethodType(_BatchNorm.forward, part)  # type: ignore[method-assign]
    return module


@contextmanager
def undisturbed(layers: Sequence[Layer], device: torch.device) -> Iterator[None]:
    """Restores the default generators; gradients are on if some module is in training mode."""
    trains = any(part.training for layer in layers for part in layer.module.modules())
    gpus = [device] if device.type == "cuda" else []
    before = default_generators()
    try:
        with torch.random.fork_rng(gpus), torch.set_grad_enabled(trains):
            yield
    finally:
        rewind(before)


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _detached(tensor: Tensor) -> Tensor:
    """Returns the same values, with `requires_grad` as in training but no graph behind them."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
