"""Functions in attributes of modules, such as a patched `forward`, in a copy of the modules.

`copy.deepcopy` does not copy functions, so a patch that calls the old forward of its model would
run the original inside the copy:

    old = model.forward
    model.forward = lambda **inputs: old(**inputs).loss
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


def let_functions_call_copies(
    pairs: Iterable[tuple[nn.Module, nn.Module]], memo: Mapping[int, Any]
) -> None:
    """Replaces functions in attributes of copied modules that lead to the original modules.

    Args:
        pairs: modules and their copies.
        memo: the copies by the `id` of the original, as of `copy.deepcopy`.
    """
    for original, twin in pairs:
        for name, value in vars(original).items():
            if not isinstance(value, FunctionType | MethodType | partial):
                continue
            if (copied := _copied(value, memo)) is not value:
                vars(twin)[name] = copied


def _copied(value: Any, memo: Mapping[int, Any]) -> Any:
    """Returns a value that leads to copies; the value itself if it leads to no copied module."""
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        owner, function = _copied(value.__self__, memo), _copied(value.__func__, memo)
        is_same = owner is value.__self__ and function is value.__func__
        return value if is_same else MethodType(function, owner)
    if isinstance(value, partial):
        function = _copied(value.func, memo)
        args = [_copied(part, memo) for part in value.args]
        keywords = {name: _copied(part, memo) for name, part in value.keywords.items()}
        copied = partial(function, *args, **keywords)
        vars(copied).update(vars(value))
        return copied
    return _copied_function(value, memo) if isinstance(value, FunctionType) else value


def _copied_function(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    held = {name: cell.cell_contents for name, cell in _cells(function)}
    read = {
        name: function.__globals__[name]
        for name in _names(function.__code__)
        if name in function.__globals__
    }
    copies = {
        name: _copied(value, memo)
        for name, value in {**read, **held}.items()
        # only what a patch may hold: other functions of a file lead far away
        if isinstance(value, nn.Module | MethodType | partial) or name in held
        if value is not function
    }
    changed = {
        name: copy
        for name, copy in copies.items()
        if copy is not held.get(name, read.get(name, copy))
    }
    if not changed:
        return function
    cells = [
        CellType(changed[name]) if name in changed else cell
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
    ]
    # A copy of the namespace only where a global leads to a copied module; cells are replaced
    # without.
    globals_ = {**function.__globals__, **{k: v for k, v in changed.items() if k in read}}
    copy = FunctionType(
        function.__code__, globals_, function.__name__, function.__defaults__, tuple(cells)
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def _cells(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:  # not assigned yet
            continue
        yield name, cell


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function, and in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
