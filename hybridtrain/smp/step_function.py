"""Facts of a step's function that its code shows before it runs."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hybridtrain.errors import UserError


def names_backward(function: Callable[..., Any]) -> bool:
    """Returns whether `function`, or one that it calls, names an attribute `backward`.

    Functions are found by their global or enclosed names, and in modules with such a name.
    """
    return any("backward" in code.co_names for code in _codes(function, set()))


def check_globals(function: Callable[..., Any], net: nn.Module) -> None:
    """Refuses a step that sets a global variable which a module's forward reads.

    The first halves of all micro-batches run before the first forward, and stages may be in other
    processes: they would not see the value of their micro-batch.

    Raises:
        UserError: names the variable and the module.
    """
    stored = {
        instruction.argval
        for code in _codes(function, set(), depth=0)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    own = getattr(function, "__globals__", None)
    for module in net.modules() if stored else ():
        forward = type(module).forward
        if getattr(forward, "__globals__", None) is not own:
            continue
        if read := stored & {name for code in _codes(forward, set()) for name in code.co_names}:
            raise UserError(
                f"{function.__name__} sets the global variable {min(read)}, which "
                f"{type(module).__name__}.forward reads: stages run several micro-batches at a "
                f"time, also in other processes. Set it outside of the step, or pass it to the "
                f"model as an argument"
            )


def plain_attributes(net: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the numbers, flags and texts that the modules of `net` have as attributes."""
    return {
        (name, key): value
        for name, module in net.named_modules()
        for key, value in vars(module).items()
        if type(value) in (bool, int, float, str)
    }


def check_attributes(name: str, before: dict[tuple[str, str], Any], net: nn.Module) -> None:
    """Refuses a step that has changed an attribute of a module.

    Raises:
        UserError: names it.
    """
    for place, value in plain_attributes(net).items():
        if before.get(place) != value:
            attribute = ".".join(filter(None, place))
            raise UserError(
                f"{name} changes {attribute} of the model from {before.get(place)!r} to {value!r}: "
                f"stages run several micro-batches at a time, also in other processes. Change it "
                f"outside of the step, or pass it to the model as an argument"
            )


def _codes(function: Any, seen: set[int], depth: int = 4) -> Iterator[types.CodeType]:
    function = getattr(function, "__wrapped__", function)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    names: set[str] = set()
    for code in _nested(function.__code__):
        names |= set(code.co_names)
        yield code
    if not depth:
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in cells:
        try:
            known[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for value in known.values():
        yield from _codes(value, seen, depth - 1)
        if isinstance(value, types.ModuleType | type) or hasattr(value, "__dict__"):
            owner = value if isinstance(value, types.ModuleType | type) else type(value)
            if getattr(owner, "__name__", "").partition(".")[0] in ("torch", "numpy"):
                continue
            for name in names:
                yield from _codes(getattr(owner, name, None), seen, depth - 1)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
