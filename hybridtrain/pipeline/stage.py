"""A stage: some consecutive layers on one device, and what it keeps between F and B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.checkpoint import checkpoint

from hybridtrain.errors import UserError
from hybridtrain.partition.layers import Layer
from hybridtrain.pipeline.memory import count_saved
from hybridtrain.pipeline.random_state import Draws
from hybridtrain.pipeline.replica import Replica

# What the last stage does with a micro-batch's output: `head(microbatch, output)` returns the
# scalar that the backward starts from or, in a forward-only pass, what the caller wants.
Head = Callable[[int, Any], Any]


class Stage:
    """Runs its layers on micro-batches and keeps, for each, what its backward needs.

    Values come in as another stage sent them: detached, with `requires_grad` as at the sender.
    They begin a graph of this stage's own, so that its backward is a call of its own too.

    Attributes:
        index: its place in the pipeline.
        layers: what it runs.
        device: where.
        module: its layers under one root, for what wants a module (placement, DDP).
        parameter_names: the user's names of the parameters of `module`, in its order.
        replica: its part in data parallelism, if there is any.
        saved_bytes: what autograd keeps of one micro-batch; None before the first.
    """

    def __init__(
        self, index: int, layers: Sequence[Layer], first: int, device: torch.device, draws: Draws
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device
        self.replica: Replica | None = None
        self.module = nn.ModuleList(layer.module for layer in layers).to(device)
        self.parameter_names = [
            f"{layer.name}.{name}" if layer.name else name
            for layer in layers
            for name, _ in layer.module.named_parameters()
        ]
        self.saved_bytes: int | None = None
        self._first = first
        self._draws = draws
        self._changes_its_input = any(
            getattr(module, "inplace", False) for module in self.module.modules()
        )
        self._held: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def __str__(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return f"stage {self.index} ({first if first == last else f'{first} to {last}'})"

    def forward(
        self, microbatch: int, value: Any, head: Head | None = None, recompute: bool = False
    ) -> Any:
        """Runs the layers on one micro-batch and returns what the next stage is to get.

        With `recompute`, the backward computes the activations once more instead of keeping them.
        """
        value, leaves = self._receive(value)
        if self.saved_bytes is None and torch.is_grad_enabled():
            with count_saved(self.module) as saved:
                output = self._layers(microbatch, value, recompute)
            self.saved_bytes = saved.bytes
        else:
            output = self._layers(microbatch, value, recompute)
        if head is not None:
            output = head(microbatch, output)
        if not torch.is_grad_enabled():
            return output
        roots = _requiring_grad(output)
        if head is not None and not roots:
            raise UserError("the loss depends on no trainable parameter: there is nothing to train")
        self._held[microbatch] = roots, leaves
        return _detach(output)

    def backward(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, reduce: bool
    ) -> list[Tensor | None]:
        """Runs the backward of one micro-batch and returns the gradients of its inputs.

        Args:
            microbatch: which one.
            grads: for each tensor that went to the next stage and requires grad, its gradient;
                None where the backward begins.
            reduce: whether the stage's gradients are complete with this micro-batch, so that
                they are averaged over the replicas as they come.
        """
        roots, leaves = self._held.pop(microbatch)
        if grads is not None:
            used = [
                (root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None
            ]
            roots = [root for root, _ in used]
            grads = [_move(grad, self.device) for _, grad in used]
        replica = self.replica if reduce else None
        if replica is not None:
            replica.arm(roots)
        if roots:
            torch.autograd.backward(roots, grads)
        if replica is not None:
            replica.check_reduced(self.parameter_names)
        return [leaf.grad for leaf in leaves]

    def clear(self) -> None:
        """Forgets all micro-batches, after a step that failed."""
        self._held.clear()
        if self.replica is not None:
            self.replica.disarm()

    def _layers(self, microbatch: int, value: Any, recompute: bool) -> Any:
        if not recompute:
            return self._run(microbatch, value)
        # non-reentrant: a reentrant one runs a backward of its own inside the backward, which DDP
        # takes for a second gradient; the draws are seeded, so there is no state to preserve
        return checkpoint(
            self._run_on_copy, microbatch, value, use_reentrant=False, preserve_rng_state=False
        )

    def _run_on_copy(self, microbatch: int, value: Any) -> Any:
        """`_run`, without a change to `value`, which is needed once more to recompute."""
        # a copy of a batch's view is aligned otherwise, which may change last bits: only if need be
        first = self.module if self.index else self.module[0]
        if self._changes_its_input and any(getattr(m, "inplace", False) for m in first.modules()):
            value = tree_map_only(Tensor, torch.clone, value)
        return self._run(microbatch, value)

    def _run(self, microbatch: int, value: Any) -> Any:
        draws = self._draws
        index = self._first
        try:
            for layer in self.layers:
                if draws.guards(index):
                    with draws.guard(index, microbatch):
                        value = layer.module(value)
                else:
                    value = layer.module(value)
                index += 1
        except Exception as error:
            name = self.layers[index - self._first].name
            error.add_note(f"in layer {name!r}, which was given {describe(value)}")
            raise
        return value

    def _receive(self, value: Any) -> tuple[Any, list[Tensor]]:
        """The value on this device, and those of its tensors that are to get a gradient."""
        leaves: list[Tensor] = []

        def enter(tensor: Tensor) -> Tensor:
            tensor = _move(tensor, self.device)
            if tensor.requires_grad:
                leaves.append(tensor)
                if self._changes_its_input:
                    return _NotALeaf.apply(tensor)  # type: ignore[no-any-return]
            return tensor

        if type(value) is Tensor:
            return enter(value), leaves
        return tree_map_only(Tensor, enter, value), leaves


class _NotALeaf(torch.autograd.Function):
    """The same values, but no leaf of the graph: a layer may change them in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device, non_blocking=True)
    return moved.requires_grad_() if tensor.requires_grad else moved


def _requiring_grad(value: Any) -> list[Tensor]:
    leaves = [value] if type(value) is Tensor else tree_flatten(value)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _detach(value: Any) -> Any:
    if type(value) is Tensor:
        return value.detach().requires_grad_(value.requires_grad)
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


def describe(value: Any) -> str:
    """The shapes and types in a pytree, for an error message."""
    leaves = tree_flatten(value)[0]
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
