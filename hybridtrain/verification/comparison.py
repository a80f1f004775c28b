"""The difference between two results of the same computation, tensor by tensor.

Two tensors are equal if all their entries are equal; NaN equals NaN. Otherwise the difference is
relative to the largest entry of that tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from hybridtrain._base.accelerator import put
from hybridtrain._base.module_call import watch_calls
from hybridtrain._base.torch_private import without_torch_function
from hybridtrain._base.values import leaves_of


class Difference(NamedTuple):
    """Two unequal values of the same result.

    Attributes:
        name: the name of the result.
        size: the largest difference of an entry, relative to the largest entry of its tensor;
            infinite if shapes, types, structures, strings or NaNs differ.
        first, second: the two values.
    """

    name: str
    size: float
    first: Any
    second: Any

    def __str__(self) -> str:
        if not math.isinf(self.size):
            return f"{self.name} differs by {self.size:.1e} of its largest entry"
        first, second = map(_described, (self.first, self.second))
        if first == second:
            return f"{self.name} is computed differently"
        return f"{self.name} is {first} instead of {second}"


def differences(
    *results: tuple[str, Any, Any], not_compared: set[str] | None = None
) -> Iterator[Difference]:
    """Yields the unequal pairs among `results`; each is a name and two pytrees.

    Types of values that cannot be compared are added to `not_compared`.
    """
    for name, first, second in results:
        kinds: set[str] = set()
        if size := difference(first, second, not_compared=kinds):
            yield Difference(name, size, first, second)
        if not_compared is not None:
            not_compared |= {f"{kind} in {name}" for kind in kinds}


def difference(
    first: Any, second: Any, scale: float = 0.0, not_compared: set[str] | None = None
) -> float:
    """Returns the largest relative difference between the tensors of two pytrees.

    0 if all leaves are equal, infinite if structures, types or shapes differ. Leaves that cannot be
    compared count as equal: an object without attributes and `__eq__`, such as an iterator or a
    lock, and one whose `__eq__` raises an error.

    Args:
        first, second: the pytrees.
        scale: a lower bound for the largest entry, the base of relative differences.
        not_compared: receives the type names of leaves that cannot be compared.
    """
    return _Comparison(scale, set() if not_compared is None else not_compared).of(first, second)


class _Comparison:
    """Compares two pytrees; see `difference`."""

    def __init__(self, scale: float, not_compared: set[str]) -> None:
        self._scale = scale
        self._not_compared = not_compared
        self._entered: set[tuple[int, int]] = set()  # an object may hold itself

    def of(self, first: Any, second: Any) -> float:
        """Returns the difference of two pytrees."""
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return _of_tensors(first, second, self._scale)
        leaves_of(first), leaves_of(second)  # registers dataclasses
        (leaves, spec), (other_leaves, other_spec) = tree_flatten(first), tree_flatten(second)
        if spec != other_spec:
            return math.inf
        return max(map(self._of_leaves, leaves, other_leaves), default=0.0)

    def _of_leaves(self, first: Any, second: Any) -> float:
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return _of_tensors(first, second, self._scale)
        if first is second:
            return 0.0
        if type(first) is not type(second):
            return math.inf
        # an object with the default __eq__ is compared by its attributes
        by_identity = getattr(type(first), "__eq__", None) is object.__eq__
        if by_identity or isinstance(first, SimpleNamespace):
            return self._of_objects(first, second)
        try:
            if getattr(first, "shape", None) != getattr(second, "shape", None):
                return math.inf  # arrays, for which == raises an error then
            equal = first == second
            is_equal = bool(equal.all()) if hasattr(equal, "all") else bool(equal)
        except Exception:  # raised by a user-defined __eq__
            return self._cannot(first)
        is_nan = isinstance(first, float) and math.isnan(first) and math.isnan(second)
        return 0.0 if is_equal or is_nan else math.inf

    def _of_objects(self, first: Any, second: Any) -> float:
        states = _attributes_of(first), _attributes_of(second)
        if isinstance(first, FunctionType) or None in states:
            return self._cannot(first)
        if (id(first), id(second)) in self._entered:
            return 0.0
        self._entered.add((id(first), id(second)))
        return self.of(*states)

    def _cannot(self, leaf: Any) -> float:
        self._not_compared.add(type(leaf).__name__)
        return 0.0


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object; None if its class is implemented in C."""
    slots = [
        name
        for base in type(value).__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    ]
    attributes = getattr(value, "__dict__", None)
    if not slots and attributes is None:
        return None
    return {**(attributes or {}), **{name: getattr(value, name) for name in slots}}


def _of_tensors(first: Tensor, second: Tensor, scale: float) -> float:
    first, second = first.detach(), second.detach()
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return math.inf
    if first.layout != torch.strided:
        first, second = first.to_dense(), second.to_dense()
    first, second = first.as_subclass(Tensor), put(second.as_subclass(Tensor), first.device)
    # The common case, without temporary tensors.
    if torch.equal(first, second):
        return 0.0
    differs = ~((first == second) | ((first != first) & (second != second)))
    if not bool(differs.any()):
        return 0.0
    first_entries, second_entries = first[differs], second[differs]
    if not bool((torch.isfinite(first_entries) & torch.isfinite(second_entries)).all()):
        return math.inf
    # The difference of two neighbors in half precision is not representable in it.
    exact = torch.complex128 if first.is_complex() else torch.float64
    entries = [tensor[torch.isfinite(tensor)].to(exact).abs() for tensor in (first, second)]
    largest = max(float(entry.max()) for entry in entries)
    return float((first_entries.to(exact) - second_entries.to(exact)).abs().max()) / max(
        largest, scale
    )


class Calls:
    """The inputs and outputs of modules: by name, a list with one entry per call."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Any]] = {}
        self.outputs: dict[str, list[Any]] = {}

    @contextmanager
    def watching(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        noted: Callable[[Any], Any] = lambda tree: tree_map_only(Tensor, _copied, tree),
    ) -> Iterator[None]:
        """Records the calls of modules in the block.

        Args:
            modules: pairs of a name, under which the calls are recorded, and a module.
            noted: returns the copy of a pytree to record.
        """
        self._noted = noted
        with ExitStack() as ends:
            # Each module once: one with two names would be recorded twice per call.
            for name, module in {id(module): (name, module) for name, module in modules}.values():
                note_inputs = partial(self._note, self.inputs, name)
                ends.callback(watch_calls(module, note_inputs, partial(self._note_output, name)))
            yield

    def _note(self, into: dict[str, list[Any]], name: str, _: nn.Module, *values: Any) -> None:
        into.setdefault(name, []).append(self._noted(values))

    def _note_output(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        self._note(self.outputs, name, module, output)


def _copied(tensor: Tensor) -> Tensor:
    with without_torch_function():  # a pipeline's mode must not take this for the model's code
        return tensor.detach().clone()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return kind if bool(torch.isfinite(value).all()) else f"{kind} with NaN or infinity"
    return f"a {type(value).__name__}" if value is not None else "None"
