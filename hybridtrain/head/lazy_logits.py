"""The outputs of a model's head as a value that knows hidden states and weight, and no outputs.

    hidden ── head ──> LazyLogits ── .float() ──> LazyLogits ── [..., :-1, :] ──> LazyLogits
                                                                                     │
                                                     cross_entropy: the loss without logits
                                                     argmax: in chunks
                                                     anything else: makes the logits, once

A `LazyLogits` is a tensor of the right shape and dtype without memory. Operations on tokens alone
(slices, views, transposes) are applied to the hidden states; scales, a tanh, casts, and the sum of
two heads, as of a LoRA layer, are noted. All other operations get the logits, as the operations so
far make them of the head's output. So each result is the right one, and only needs more memory.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain.errors import UserError, setting
from hybridtrain.head.chunked_loss import Loss, Term, largest_classes, token_losses

# The class of the logits does not matter for these: they describe the wrapper.
_tensor: Any = Tensor
_DESCRIBING = frozenset(
    (
        *(_tensor.shape.__get__, _tensor.dtype.__get__, _tensor.ndim.__get__),
        *(_tensor.device.__get__, _tensor.layout.__get__, _tensor.requires_grad.__get__),
        *(_tensor.is_leaf.__get__, _tensor.grad_fn.__get__, _tensor._version.__get__),
        *(_tensor.is_cuda.__get__, _tensor.is_cpu.__get__, _tensor.is_meta.__get__),
        *(_tensor.is_sparse.__get__, _tensor.is_quantized.__get__, _tensor.is_nested.__get__),
        *(_tensor.itemsize.__get__, _tensor.nbytes.__get__, _tensor.output_nr.__get__),
        *(_tensor._backward_hooks.__get__, _tensor.retains_grad.__get__),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.element_size),
        *(Tensor.is_inference, Tensor.get_device, Tensor._is_view, Tensor.is_signed),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
    )
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# What these change or see is the object: all that was derived from it must be made before.
_OF_OBJECT = frozenset(
    (
        *("__setitem__", "__set__", "__delete__", "backward", "register_hook", "retain_grad"),
        "register_post_accumulate_grad_hook",
    )
)


_Versions = tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True)
class _Recipe:
    """The logits as a function of hidden states.

    Attributes:
        terms: the linear layers; their hidden states have the shape of the logits, except for the
            dimension of the classes.
        softcap: whether their sum passes through a tanh.
        factor: multiplies it after the tanh.
        class_dim: the dimension of the classes.
        dtype: the dtype of the logits.
        versions: tensors that must not change, and their version counters.
        attached: whether a function gets the gradient of the logits, see `with_backward`.
    """

    terms: tuple[Term, ...]
    softcap: bool
    factor: float
    class_dim: int
    dtype: torch.dtype
    versions: _Versions
    attached: bool = False

    @property
    def shape(self) -> list[int]:
        """The shape of the logits."""
        sizes = list(self.terms[0].hidden.shape)
        sizes[self.class_dim] = self.classes
        return sizes

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.terms[0].weight.shape[0]

    @property
    def is_last(self) -> bool:
        """Whether the dimension of the classes is the last one."""
        return self.class_dim == self.terms[0].hidden.dim() - 1

    def with_hidden(self, function: Callable[[Tensor], Tensor], class_dim: int) -> _Recipe:
        """Returns a recipe with other hidden states."""
        terms = tuple(replace(term, hidden=function(term.hidden)) for term in self.terms)
        return replace(self, terms=terms, class_dim=class_dim)

    def of_tokens(self) -> list[Term]:
        """Returns the terms with hidden states of shape (tokens, width)."""
        return [
            replace(term, hidden=rows.reshape(-1, rows.shape[-1]))
            for term in self.terms
            for rows in (term.hidden.movedim(self.class_dim, -1),)
        ]

    def without_graph(self) -> _Recipe:
        """Returns the recipe with tensors that hold no graph, and share the version counters."""
        terms = tuple(
            Term(
                term.hidden.detach(),
                term.weight.detach(),
                None if term.bias is None else term.bias.detach(),
                term.factor,
            )
            for term in self.terms
        )
        versions = tuple((tensor.detach(), version) for tensor, version in self.versions)
        return replace(self, terms=terms, versions=versions, attached=False)

    def check_unchanged(self) -> None:
        """Raises a UserError if a tensor that the logits depend on was changed in place."""
        _check_unchanged(self.versions)


def _check_unchanged(versions: _Versions) -> None:
    if any(tensor._version != version for tensor, version in versions):
        raise UserError(
            "the logits are used after the weight of the head, or the hidden states, have been "
            f"changed in place, but {setting('head', 'fused')} computes them when they are "
            "used: use them before (such as before optimizer.step()), or set "
            f"{setting('head', 'plain')}"
        )


class _Origin:
    """How the logits are made: a call, in the modes of the moment at which it was noted.

    Attributes:
        value: the logits, once something has asked for them.
        is_changed: whether they may no longer be what the recipe says, as after a change in place.
        families: all values that were derived from the same heads, by `id`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        families: Sequence[weakref.WeakValueDictionary[int, LazyLogits]],
    ) -> None:
        self.value: Tensor | None = None
        self.is_changed = False
        self.families = families
        self._call: tuple[Callable[..., Any], Any, dict[str, Any]] | None = function, args, kwargs
        # The logits are made later, perhaps in other modes and in another thread.
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kind = next(leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)).device.type
        self._autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def make(self) -> Tensor:
        """Returns the logits."""
        # Once, for all that ask: the product is what the laziness saves.
        if self.value is None:
            self.value = self._made(made)
            self._call = None  # holds the values on the way
        return self.value

    def copy(self) -> Tensor:
        """Returns the logits without a graph, where autograd does not see what makes them."""
        return self._made(_copy) if self.value is None else self.value

    def without_graph(self) -> _Origin:
        """Returns how to make the same logits without a gradient, from tensors without a graph."""
        origin = copy.copy(self)
        origin.families, origin._grad = [weakref.WeakValueDictionary()], False
        if self.value is not None:
            origin.value = self.value.detach()
        else:
            origin._call = tree_map_only(Tensor, _without_graph, self._call)
        return origin

    def _made(self, of_parent: Callable[[LazyLogits], Tensor]) -> Tensor:
        assert self._call is not None
        function, args, kwargs = self._call
        args, kwargs = tree_map_only(LazyLogits, of_parent, (args, kwargs))
        with self._modes():
            logits: Tensor = function(*args, **kwargs)
        return logits

    def _modes(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if torch.is_inference_mode_enabled() != self._inference:
            stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        kind, enabled, dtype = self._autocast
        if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype):
            cache = torch.is_autocast_cache_enabled()
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
        return stack


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


class LazyLogits(Tensor):
    """See the module.

    Attributes:
        exist: whether there have been any, so that otherwise nobody looks for them.
    """

    exist: ClassVar[bool] = False
    recipe: _Recipe
    origin: _Origin

    @staticmethod
    def of(recipe: _Recipe, origin: _Origin) -> LazyLogits:
        """Returns the logits that both describe."""
        tensors = (t for term in recipe.terms for t in (term.hidden, term.weight, term.bias))
        requires_grad = torch.is_grad_enabled() and (
            recipe.attached or any(t is not None and t.requires_grad for t in tensors)
        )
        logits: LazyLogits = Tensor._make_wrapper_subclass(
            LazyLogits,
            recipe.shape,
            dtype=recipe.dtype,
            device=recipe.terms[0].hidden.device,
            requires_grad=requires_grad,
        )
        LazyLogits.exist = True
        logits.recipe, logits.origin = recipe, origin
        # Weak: a value that nobody holds need not be made when a relative changes in place.
        for family in origin.families:
            family[id(logits)] = logits
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes an operation, or makes the logits for it."""
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and args and _is_lazy(args[0]):
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
        # After a change in place the wrapper's description may be wrong, such as its version.
        if func in _DESCRIBING and not leaves[0].origin.is_changed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        if in_place or name in _OF_OBJECT or "out" in kwargs:
            # Views share memory in plain PyTorch: once one changes, the recipes of all relatives
            # are wrong.
            for leaf in leaves:
                for family in leaf.origin.families:
                    for relative in list(family.values()):
                        made(relative)
                        relative.origin.is_changed = True
        args, kwargs = tree_map_only(LazyLogits, made, (args, kwargs))
        result = func(*args, **kwargs)
        for leaf in leaves:  # an operation in place returns the object
            if result is leaf.origin.value:
                return leaf
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gets the operations that `__torch_function__` does not see, too late for a gradient."""
        if (
            func is not torch.ops.aten.detach.default
            and torch.is_grad_enabled()
            and any(
                leaf.requires_grad
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, LazyLogits)
            )
        ):
            raise UserError(
                f"{func} is called on the logits without __torch_function__, for example by C++ "
                f"code, so they cannot be replaced: set {setting('head', 'plain')}"
            )
        args, kwargs = tree_map_only(LazyLogits, _copy, (args, kwargs or {}))
        return func(*args, **kwargs)


def _copy(logits: LazyLogits) -> Tensor:
    return logits.origin.copy()


def made(logits: LazyLogits) -> Tensor:
    """Returns the logits as a plain tensor."""
    return logits.origin.make()


def _without_graph(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LazyLogits):
        return tensor.detach()
    with torch.no_grad():
        return LazyLogits.of(tensor.recipe.without_graph(), tensor.origin.without_graph())


def without_graph(tree: Any) -> Any:
    """Returns a pytree with lazy logits that hold hidden states and weight, but no graph."""
    return tree_map_only(LazyLogits, _without_graph, tree) if LazyLogits.exist else tree


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Returns `torch.cat(parts)`, lazily if all are lazy logits of the same head, without a graph.

    Args:
        parts: the logits of micro-batches.
    """
    recipes = [part.recipe for part in parts if isinstance(part, LazyLogits) and _is_lazy(part)]
    kinds = {(r.softcap, r.factor, r.class_dim, r.dtype, len(r.terms)) for r in recipes}
    # Samples are joined along dimension 0, so the classes must be in another dimension.
    if len(recipes) < len(parts) or len(kinds) > 1 or not recipes[0].class_dim:
        return torch.cat(without_lazy(list(parts)))
    terms = tuple(
        replace(term, hidden=torch.cat([recipe.terms[number].hidden for recipe in recipes]))
        for number, term in enumerate(recipes[0].terms)
    )
    versions = tuple(pair for recipe in recipes for pair in recipe.versions)
    origin = _Origin(torch.cat, (list(parts),), {}, [weakref.WeakValueDictionary()])
    return LazyLogits.of(replace(recipes[0], terms=terms, versions=versions), origin)


def with_backward(logits: LazyLogits, attach: Callable[[Tensor], Tensor]) -> LazyLogits:
    """Returns the same logits, which are `attach(logits)` as soon as their values are needed.

    Args:
        logits: logits without a graph.
        attach: returns a tensor with the same values and a graph, to which their gradient goes.
    """
    origin = _Origin(attach, (logits,), {}, [weakref.WeakValueDictionary()])
    return LazyLogits.of(replace(logits.recipe, attached=True), origin)


def made_from(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors with a gradient that lazy logits are made from; others as they are."""
    if not isinstance(tensor, LazyLogits):
        return [tensor]
    terms = tensor.recipe.terms
    sources = [t for term in terms for t in (term.hidden, term.weight, term.bias)]
    return [source for source in sources if source is not None and source.requires_grad]


def hidden_states(tree: Any) -> Any:
    """Returns a pytree with the hidden states in the place of lazy logits."""
    return tree_map_only(LazyLogits, lambda logits: [t.hidden for t in logits.recipe.terms], tree)


def without_lazy(tree: Any) -> Any:
    """Returns a pytree with plain tensors in the place of lazy ones."""
    if LazyLogits.exist and any(isinstance(leaf, LazyLogits) for leaf in tree_leaves(tree)):
        return tree_map_only(LazyLogits, made, tree)
    return tree


def lazy_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the outputs of a linear layer, lazily if they can be.

    A torch function: modes see it as they see `F.linear`, and may replace its arguments.
    """
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    if has_torch_function(tensors):
        logits: Tensor = handle_torch_function(lazy_linear, tensors, hidden, weight, bias)
        return logits
    dtype = _dtype_of_product(hidden, weight, bias)
    if dtype is None:
        return F.linear(hidden, weight, bias)
    kind = hidden.device.type
    # The cast is explicit, in the dtype that autocast would choose for a linear layer.
    with torch.autocast(kind, enabled=False):
        term = Term(hidden.to(dtype), weight, bias)
    # The cast copy as well as its source: either may be changed before the logits are made.
    versions = tuple((t, t._version) for t in (*tensors, term.hidden) if not t.is_inference())
    recipe = _Recipe((term,), False, 1.0, hidden.dim() - 1, dtype, versions)
    args = versions, hidden, weight, bias
    return LazyLogits.of(recipe, _Origin(_product, args, {}, [weakref.WeakValueDictionary()]))


def _product(versions: _Versions, *tensors: Any) -> Tensor:
    # At the time of use: a plain layer would have computed with the old values.
    _check_unchanged(versions)
    return F.linear(*tensors)


def _dtype_of_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Returns the dtype of the outputs of a linear layer; None if they cannot be lazy."""
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if (
        any(t.dtype not in _FLOATS or t.layout != torch.strided or t.is_nested for t in tensors)
        or any(t.device != hidden.device for t in tensors)
        or (hidden.dim(), weight.dim()) < (1, 2)
        or hidden.shape[-1] != weight.shape[-1]
        or torch._C._functorch.maybe_current_level() is not None
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
    ):
        return None
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype if all(t.dtype == hidden.dtype for t in tensors) else None


# --- operations on lazy logits; each returns NotImplemented if it needs the logits

_RULES: dict[Any, Callable[[Any, Any, dict[str, Any]], Any]] = {}


def _is_lazy(value: Any) -> bool:
    """Returns whether a value is logits that are what their recipe says.

    Also if they have been made: a look at them must not change the bits of what follows.
    """
    return isinstance(value, LazyLogits) and not value.origin.is_changed


def _rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what is done for some functions, as `rule(func, args, kwargs)`."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def _derived(recipe: _Recipe, func: Any, args: Any, kwargs: dict[str, Any]) -> LazyLogits:
    """Returns logits that an operation makes of others, which are among its arguments."""
    parents = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
    families = {id(family): family for parent in parents for family in parent.origin.families}
    return LazyLogits.of(recipe, _Origin(func, args, kwargs, list(families.values())))


def _scaled(recipe: _Recipe, number: float) -> _Recipe:
    # A factor after the tanh cannot move into the terms before it.
    if recipe.softcap:
        return replace(recipe, factor=recipe.factor * number)
    terms = tuple(replace(term, factor=term.factor * number) for term in recipe.terms)
    return replace(recipe, terms=terms)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


@_rule(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
def _multiply(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not _is_number(args[1]):
        return NotImplemented
    return _derived(_scaled(args[0].recipe, float(args[1])), func, args, kwargs)


@_rule(torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide)
@_rule(Tensor.true_divide, Tensor.__truediv__, Tensor.__div__)
def _divide(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not _is_number(args[1]) or not args[1]:
        return NotImplemented
    return _derived(_scaled(args[0].recipe, 1 / args[1]), func, args, kwargs)


@_rule(torch.tanh, Tensor.tanh)
def _tanh(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    recipe = args[0].recipe
    if recipe.softcap:
        return NotImplemented
    return _derived(replace(recipe, softcap=True), func, args, kwargs)


@_rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _add(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not all(map(_is_lazy, args)):
        return NotImplemented
    first, second = args[0].recipe, args[1].recipe
    if (
        first.softcap
        or second.softcap
        or (first.shape, first.class_dim) != (second.shape, second.class_dim)
    ):
        return NotImplemented
    recipe = replace(
        first,
        terms=first.terms + second.terms,
        dtype=torch.promote_types(first.dtype, second.dtype),
        versions=first.versions + second.versions,
        attached=first.attached or second.attached,
    )
    return _derived(recipe, func, args, kwargs)


@_rule(Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type)
def _cast(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, *rest = args
    names = {Tensor.float: "float32", Tensor.half: "float16", Tensor.bfloat16: "bfloat16"}
    if func in names:
        if rest or kwargs:
            return NotImplemented
        dtype: Any = getattr(torch, names[func])
    elif func is Tensor.type:
        if len(rest) != 1 or kwargs or not isinstance(rest[0], torch.dtype):
            return NotImplemented
        dtype = rest[0]
    else:
        if rest and isinstance(rest[0], Tensor) and len(rest) == 1 and not kwargs:
            device, dtype = rest[0].device, rest[0].dtype
        else:
            if kwargs.keys() - {"device", "dtype", "non_blocking"}:
                return NotImplemented
            try:
                device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
            except (RuntimeError, TypeError):
                return NotImplemented
        if device is not None and torch.empty(0, device=device).device != logits.device:
            return NotImplemented
        dtype = dtype or logits.dtype
    if dtype not in _FLOATS:
        return NotImplemented
    if dtype == logits.dtype:
        return logits
    return _derived(replace(logits.recipe, dtype=dtype), func, args, kwargs)


@_rule(Tensor.contiguous, Tensor.clone, torch.clone)
def _same(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1:
        return NotImplemented
    return _derived(args[0].recipe, func, args, kwargs)


@_rule(Tensor.detach, torch.detach)
def _detach(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _derived(args[0].recipe.without_graph(), func, args, kwargs)


@_rule(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, *shape = args
    recipe = logits.recipe
    if kwargs or not shape or not recipe.is_last:
        return NotImplemented
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = list(shape[0])
    if not all(isinstance(size, int) for size in shape) or not shape:
        return NotImplemented
    count = logits.numel()
    if -1 in shape:
        given = math.prod(size for size in shape if size != -1)
        if not given or count % given:
            return NotImplemented
        shape[shape.index(-1)] = count // given
    if math.prod(shape) != count or shape[-1] != recipe.classes:
        return NotImplemented

    def reshaped(hidden: Tensor) -> Tensor:
        return hidden.reshape(*shape[:-1], hidden.shape[-1])

    return _derived(recipe.with_hidden(reshaped, len(shape) - 1), func, args, kwargs)


@_rule(Tensor.flatten, torch.flatten)
def _flatten(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, start, end = _bound(args, kwargs, ("start_dim", 0), ("end_dim", -1))
    recipe, dims = logits.recipe, logits.dim()
    if not all(isinstance(dim, int) and -dims <= dim < dims for dim in (start, end)):
        return NotImplemented
    start, end = start % dims, end % dims
    if not recipe.is_last or not start <= end < dims - 1:
        return NotImplemented
    flat = recipe.with_hidden(lambda hidden: hidden.flatten(start, end), dims - 1 - (end - start))
    return _derived(flat, func, args, kwargs)


def _bound(args: Any, kwargs: dict[str, Any], *names: tuple[str, Any]) -> list[Any]:
    """Returns the arguments in order, with the defaults of `names`."""
    first, *rest = args
    return [first, *rest, *(kwargs.get(name, default) for name, default in names[len(rest) :])]


@_rule(torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, torch.movedim)
@_rule(Tensor.movedim, torch.unsqueeze, Tensor.unsqueeze, torch.swapaxes, Tensor.swapaxes)
def _rearrange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, *rest = args
    recipe = logits.recipe
    # Only the classes have size 2, so the probe shows where that dimension goes.
    sizes = [2 if dim == recipe.class_dim else 1 for dim in range(logits.dim())]
    try:
        probe = func(torch.empty(sizes, device="meta"), *rest, **kwargs)
    except (IndexError, RuntimeError):  # the logits will raise it, too
        return NotImplemented
    class_dim = list(probe.shape).index(2)
    moved = recipe.with_hidden(lambda hidden: func(hidden, *rest, **kwargs), class_dim)
    return _derived(moved, func, args, kwargs)


@_rule(Tensor.__getitem__)
def _index(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, index = args
    recipe, items = logits.recipe, index if type(index) is tuple else (index,)
    if not recipe.is_last or not all(map(_is_index, items)):
        return NotImplemented
    used = sum(map(_dims_of_index, items))
    if any(item is Ellipsis for item in items):
        reaches_classes = items[-1] is not Ellipsis
    else:
        reaches_classes = used >= logits.dim()
    if used > logits.dim() or (reaches_classes and items[-1] != slice(None)):
        return NotImplemented
    indexed = recipe.with_hidden(lambda hidden: hidden[index], -1)
    class_dim = indexed.terms[0].hidden.dim() - 1
    return _derived(replace(indexed, class_dim=class_dim), func, args, kwargs)


def _is_index(item: Any) -> bool:
    if type(item) is Tensor:
        return item.dtype in (torch.bool, torch.int64)
    return item is None or item is Ellipsis or type(item) in (int, slice)


def _dims_of_index(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


@_rule(torch.argmax, Tensor.argmax)
def _argmax(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, dim, keepdim = _bound(args, kwargs, ("dim", None), ("keepdim", False))
    recipe = logits.recipe
    # If they exist, their argmax costs less than the products.
    if dim is None or dim % logits.dim() != recipe.class_dim or logits.origin.value is not None:
        return NotImplemented
    # Before the computation, which would take the present values.
    recipe.check_unchanged()
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        classes = largest_classes(recipe.of_tokens(), recipe.softcap, recipe.factor)
    others = [size for at, size in enumerate(recipe.shape) if at != recipe.class_dim]
    classes = classes.reshape(others)
    return classes.unsqueeze(recipe.class_dim) if keepdim else classes


@_rule(F.cross_entropy)
def _cross_entropy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits, target, weight, average, ignore_index, reduce, reduction, smoothing = _bound(
        args,
        kwargs,
        *(("target", None), ("weight", None), ("size_average", None), ("ignore_index", -100)),
        *(("reduce", None), ("reduction", "mean"), ("label_smoothing", 0.0)),
    )
    recipe = logits.recipe
    others = [size for at, size in enumerate(recipe.shape) if at != recipe.class_dim]
    if (
        not isinstance(target, Tensor)
        or isinstance(target, LazyLogits)
        or target.dtype != torch.int64
        or list(target.shape) != others
        or target.device != logits.device
        or recipe.class_dim != min(1, len(others))
        # A function waits for the gradient of the logits, which the chunks never form as a whole.
        or (recipe.attached and torch.is_grad_enabled())
        or (average, reduce) != (None, None)
        or reduction not in ("mean", "sum", "none")
        or not 0.0 <= smoothing <= 1.0
        or (weight is not None and (weight.shape != (recipe.classes,) or weight.requires_grad))
    ):
        return NotImplemented
    recipe.check_unchanged()
    kind = logits.device.type
    # The dtype that autocast gives a cross-entropy.
    dtype = torch.float32 if torch.is_autocast_enabled(kind) else recipe.dtype
    with torch.autocast(kind, enabled=False):
        loss = Loss(
            target.reshape(-1),
            recipe.softcap,
            recipe.factor,
            ignore_index,
            smoothing,
            None if weight is None else weight.float(),
        )
        losses = token_losses(recipe.of_tokens(), loss)
        if reduction == "none":
            return losses.reshape(target.shape).to(dtype)
        total = losses.sum()
        return (total if reduction == "sum" else total / loss.token_weights().sum()).to(dtype)
