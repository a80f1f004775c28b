"""A call of a model, cut into micro-batches.

The arguments are bound to the names of the forward's parameters. Tensors with the batch in dim 0
are cut, tensors with one row are shared by all micro-batches, and anything else that cannot be cut
is refused, because a micro-batch would silently get the wrong samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

from hybridtrain._base.microbatch import (
    as_containers,
    batch_size,
    chunk_sizes,
    cut_without_tensors,
    shared,
    split,
    uncut,
)
from hybridtrain._base.values import is_constant, is_flat, leaves_of
from hybridtrain.errors import BatchError
from hybridtrain.graph import signature_of

# The number of items that the loss of a transformers model is divided by. It changes in every step.
ITEMS = "num_items_in_batch"


@dataclass(frozen=True)
class Call:
    """The arguments of a call.

    Attributes:
        inputs: the arguments by name, with values that all micro-batches share marked; or the only
            argument, if it is a tensor.
        sizes: the number of samples of each micro-batch.
        kind: what decisions about a call depend on, such as names, dtypes and constants, but not
            on sizes.
        entering: the tensors among the arguments that require a gradient.
    """

    inputs: Any
    sizes: Sequence[int]
    kind: Hashable
    entering: Sequence[Tensor]

    @property
    def samples(self) -> int:
        """The number of samples of the batch."""
        return sum(self.sizes)

    def cut(self, sizes: Sequence[int] | None = None) -> list[Any]:
        """Returns the inputs of each micro-batch; without a graph, see `with_leaves`."""
        sizes = self.sizes if sizes is None else sizes
        inputs = tree_map_only(Tensor, _detached, self.inputs) if self.entering else self.inputs
        return [uncut(inputs)] if len(sizes) == 1 else split(inputs, sizes)

    def argument(self, name: str) -> Any:
        """Returns the argument of this name; None if the call has none."""
        return self.inputs.get(name) if isinstance(self.inputs, dict) else None

    def with_leaves(self, parts: Sequence[Any]) -> tuple[list[Any], list[list[Tensor]]]:
        """Makes leaves of the arguments that require a gradient.

        Args:
            parts: the inputs of each micro-batch.

        Returns:
            the inputs with these leaves, and for each of `entering` its leaf in each micro-batch.
        """
        if not self.entering:
            return list(parts), []
        tensors = [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        numbers = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
        cut: list[Any] = []
        leaves: list[list[Tensor]] = [[] for _ in numbers]
        for part in parts:
            values, spec = tree_flatten(part)
            places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
            for of_tensor, number in zip(leaves, numbers, strict=True):
                leaf = values[places[number]].detach().requires_grad_()
                values[places[number]] = leaf
                of_tensor.append(leaf)
            cut.append(tree_unflatten(values, spec))
        return cut, leaves

    def joined_gradients(self, leaves: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
        """Returns the gradient of each of `entering` from those of its leaves."""
        joined: list[Tensor | None] = []
        for tensor, parts in zip(self.entering, leaves, strict=True):
            if all(part.grad is None for part in parts):
                joined.append(None)
                continue
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
            is_cut = sum(len(part) for part in parts) == len(tensor) if tensor.dim() else False
            joined.append(torch.cat(gradients) if is_cut else torch.stack(gradients).sum(0))
        return joined


def call_of(
    net: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chunks: int,
    without_cache: bool,
) -> Call:
    """Returns a call of `forward(*args, **kwargs)` in at most `chunks` micro-batches.

    Args:
        net: the model.
        forward: its forward, as it is now.
        args: the arguments by position.
        kwargs: the arguments by name.
        chunks: the maximum number of micro-batches.
        without_cache: tell a transformers model not to return its keys and values.

    Raises:
        TypeError: the forward does not take these arguments.
        BatchError: a tensor has a different number of samples than others.
    """
    values: Any = _bound(forward, args, kwargs)
    if isinstance(values, dict) and without_cache and takes_cache(net):
        values.setdefault("use_cache", False)
    has_depth = not is_flat(values)
    if has_depth:
        leaves_of(values)  # registers dataclasses
        values = as_containers(values)
    leaves = tree_leaves(values) if has_depth else list(values.values())
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    samples = 1 if first is None else len(first)
    sizes, kind = [samples], _kind(values, leaves)
    if has_depth:
        kind = kind, cut_without_tensors(values, samples)
    others = [t for t in tensors if t.dim() and len(t) != samples]
    if chunks > 1 and samples > 1:
        if any(len(tensor) == 1 for tensor in others):
            values = _with_shared_rows(values, samples)
        if others or has_depth:
            batch_size(values)  # or the error that names the tensor
        sizes = chunk_sizes(samples, chunks)
    elif others:
        values = tree_map_only(Tensor, shared, values)  # such as the lengths of packed sequences
    if not has_depth and len(values) == 1 and type(only := next(iter(values.values()))) is Tensor:
        values = only
    entering = [tensor for tensor in tensors if tensor.requires_grad]
    return Call(values, sizes, (kind, len(sizes) > 1), entering)


def asks_for_cache(kwargs: dict[str, Any]) -> bool:
    """Returns whether a call passes keys and values of earlier calls, or wants those of this one.

    They belong to the whole batch, so the call is not cut.
    """
    given = (kwargs.get(name) for name in ("past_key_values", "cache"))
    return bool(kwargs.get("use_cache")) or any(value is not None for value in given)


def takes_cache(net: nn.Module) -> bool:
    """Returns whether the forward of a model, or of the model in an adapter, has `use_cache`.

    Models of images and text pass it on to their language model, with all keyword arguments.
    """
    base = getattr(net, "get_base_model", None)
    inner: Any = base() if callable(base) else net
    signature = signature_of(inner.forward)
    if "use_cache" in signature.names:
        return True
    config = getattr(inner, "config", None)
    return (
        signature.takes_more
        and _text_config(config) is not config
        and wants_cache_by_default(inner)
    )


def wants_cache_by_default(net: nn.Module) -> bool:
    """Returns whether the config of a model says that it returns keys and values."""
    return bool(getattr(_text_config(getattr(net, "config", None)), "use_cache", False))


def _text_config(config: Any) -> Any:
    of_text = getattr(config, "get_text_config", None)
    return of_text() if callable(of_text) else config


def _bound(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | tuple[Any, ...]:
    """Returns the arguments by name, without those of None that are None by default.

    Those of a forward that takes `*args` have no names, and are returned as they are.
    """
    signature = signature_of(forward)
    if args and signature.takes_args:
        if kwargs:
            raise BatchError(
                f"the forward {signature.of_forward} takes *args, so its arguments have no names: "
                "pass all of them by keyword, or all by position"
            )
        return args
    nones = signature.nones
    return {
        name: value
        for name, value in signature.bound(args, kwargs).items()
        if value is not None or name not in nones
    }


def _with_shared_rows(values: Any, samples: int) -> Any:
    """Marks tensors with one row, such as position ids, as shared by all samples."""
    return tree_map_only(
        Tensor, lambda t: shared(t) if t.dim() and len(t) == 1 != samples else t, values
    )


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _kind(values: Any, leaves: Sequence[Any]) -> Hashable:
    items = values.get(ITEMS) if isinstance(values, dict) else None
    described: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((leaf.dtype, leaf.dim(), leaf.requires_grad))
        elif leaf is items or type(leaf) is float or not is_constant(leaf):
            # A float, such as a factor that grows, rarely chooses code.
            described.append(str(type(leaf)))
        else:
            described.append((str(type(leaf)), repr(leaf)))
    is_flat = isinstance(values, dict) and len(values) == len(leaves)
    structure = tuple(values) if is_flat else str(tree_structure(values))
    return structure, tuple(described)
