"""The costs of a model's layers: time, memory, and bytes that cross a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain.graph.layer import Layer, works_in_place
from hybridtrain.memory import storage_id
from hybridtrain.skip import popped_by, skip_scope, stashed_by


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, for one micro-batch.

    Attributes:
        name: the layer's.
        parameters: elements of its parameters.
        forward_ms: milliseconds of its forward.
        backward_ms: milliseconds of its backward.
        weight_bytes: its parameters and buffers, and the gradients and the optimizer's state of
            those parameters that are trained.
        activation_bytes: what it makes that autograd keeps for a backward, its own or a later
            layer's. The first layer has the model's inputs too.
        crossing_bytes: what would cross a cut right after it: its own output, and every value of
            an earlier layer that a later one needs.
        crossing_ms: milliseconds to bring that to another device; 0 where it stays.
    """

    name: str
    parameters: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    weight_bytes: int = 0
    activation_bytes: int = 0
    crossing_bytes: int = 0
    crossing_ms: float = 0.0


def count(layers: Sequence[Layer], *, optimizer_tensors_per_param: int = 2) -> list[LayerCost]:
    """Returns the costs that need no run: parameters and bytes of the weights, on any device.

    Args:
        layers: the chain. What several layers share counts in the first of them.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it;
            AdamW keeps 2.
    """
    seen: set[int] = set()
    costs = []
    for layer in layers:
        parameters = [p for p in layer.module.parameters() if id(p) not in seen]
        buffers = [b for b in layer.module.buffers() if id(b) not in seen]
        seen.update(map(id, [*parameters, *buffers]))
        copies = [1 + (1 + optimizer_tensors_per_param) * p.requires_grad for p in parameters]
        weight_bytes = sum(p.nbytes * n for p, n in zip(parameters, copies, strict=True))
        costs.append(
            LayerCost(
                layer.name,
                parameters=sum(p.numel() for p in parameters),
                weight_bytes=weight_bytes + sum(b.nbytes for b in buffers),
            )
        )
    return costs


# Runs a function and returns its result and how long it took, in milliseconds.
Clock = Callable[[Callable[[], Any]], tuple[Any, float]]

# The input of a layer in the chain: the value before it, and the skip values that it pops.
Given = tuple[Any, dict[str, Any]]


class LayerRun(NamedTuple):
    """One forward and backward of a layer.

    Attributes:
        handed_on: the layer's output and the skip values that it stashes, without their graph.
        gradients: those of its inputs and trained parameters.
        forward_ms: milliseconds of the forward.
        backward_ms: milliseconds of the backward; 0 without one.
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
    *,
    call: Callable[[Any], Any] | None = None,
    parameters: Sequence[Tensor] | None = None,
) -> LayerRun:
    """Runs `module` alone, as a stage would: its inputs begin a separate graph.

    There is a backward where gradients are enabled and an output requires one.

    Args:
        module: the layer.
        given: its input.
        precision: the context that the forward runs in.
        clock: times the forward and the backward.
        call: calls the layer in place of `module`.
        parameters: its parameters in place of the module's.
    """
    leaves = [p for p in parameters or module.parameters() if p.requires_grad]
    copy = works_in_place(module)

    def enter(tensor: Tensor) -> Tensor:
        leaf = _detached(tensor)
        if leaf.requires_grad:
            leaves.append(leaf)
        return leaf.clone() if copy else leaf

    value, popped = tree_map_only(Tensor, enter, given)

    def forward() -> tuple[Any, dict[str, Any]]:
        with precision(), skip_scope(popped) as values:
            return (call or module)(value), values

    (output, values), forward_ms = clock(forward)
    handed_on = output, {name: values[name] for name in stashed_by(module)}
    roots = [tensor for tensor in tensors_of(handed_on) if tensor.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    backward_ms = 0.0
    if torch.is_grad_enabled() and roots:
        ones = [torch.ones_like(root) for root in roots]
        gradients, backward_ms = clock(
            lambda: torch.autograd.grad(roots, leaves, ones, allow_unused=True)
        )
    return LayerRun(tree_map_only(Tensor, _detached, handed_on), gradients, forward_ms, backward_ms)


def run_chain(
    layers: Sequence[Layer],
    inputs: Any,
    run: Callable[[Layer, Given], tuple[LayerRun, Mapping[int, int]]],
    *,
    optimizer_tensors_per_param: int = 2,
) -> list[LayerCost]:
    """Runs a micro-batch through the chain, and returns the costs of this one run.

    Args:
        layers: the chain.
        inputs: the micro-batch.
        run: runs a layer on what it is given; also returns the bytes of each storage that autograd
            keeps for its backward, by `storage_id`.
        optimizer_tensors_per_param: as for `count`.
    """
    maker = {storage_id(tensor): 0 for tensor in tensors_of(inputs)}  # the layer that made it
    counted = set[int]()
    stashes: dict[str, Any] = {}
    last_pop = {name: i for i, layer in enumerate(layers) for name in popped_by(layer.module)}
    activations = [0] * len(layers)
    costs = []
    kept: list[Any] = []  # so that no storage gets the id of an earlier one
    value = inputs
    weights = count(layers, optimizer_tensors_per_param=optimizer_tensors_per_param)
    for index, (layer, cost) in enumerate(zip(layers, weights, strict=True)):
        popped = {name: stashes[name] for name in popped_by(layer.module) if name in stashes}
        ran, saved = run(layer, (value, popped))
        kept.append((value, popped))
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
        costs.append(
            replace(
                cost,
                forward_ms=ran.forward_ms,
                backward_ms=ran.backward_ms,
                crossing_bytes=sum(tensor.nbytes for tensor in crossing),
            )
        )
    pairs = zip(costs, activations, strict=True)
    return [replace(cost, activation_bytes=nbytes) for cost, nbytes in pairs]


@contextmanager
def undisturbed(layers: Sequence[Layer], device: torch.device) -> Iterator[None]:
    """Restores the default generators; gradients are on if some module is in training mode."""
    trains = any(part.training for layer in layers for part in layer.module.modules())
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.set_grad_enabled(trains):
        yield


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _detached(tensor: Tensor) -> Tensor:
    """Returns the same values, with `requires_grad` as in training but no graph behind them."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
