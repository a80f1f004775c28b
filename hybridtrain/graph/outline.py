"""Takes statements out of a forward, so that the rest of it can be traced.

A statement whose course depends on data, or that changes the model, cannot be recorded. It becomes
a separate function, a *stretch*, which a graph calls as it calls a submodule:

    def forward(self, x):                 def forward(self, x):
        x = self.first(x)                     x = self.first(x)
        if x.sum() > 0:           ->          (x,) = stretch(0, locals())
            x = x * 2
        return self.second(x)                 return self.second(x)

A statement that leaves the forward (`return`) takes all that follow it along; one that leaves a
loop, the loop.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from hybridtrain.graph.statements import (
    Block,
    Blocks,
    TensorReader,
    given_away,
    may_work_in_place,
    names_in,
    passes_self,
    reads,
)
from hybridtrain.graph.traced_graph import Untraceable, user_line

_CALL = "_hybridtrain_stretch"
# Objects that do not change in themselves, or whose changes are looked after elsewhere.
_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, type, ModuleType, FunctionType, MethodType,
    BuiltinFunctionType, nn.Module, torch.dtype, torch.device,
)  # fmt: skip
# How a stretch may reach submodules that its code does not name.
_REACHES_ALL = {
    "getattr", "modules", "children", "parameters", "buffers", "named_modules", "named_children",
    "named_parameters", "named_buffers", "get_submodule", "get_parameter", "_modules", "__dict__",
    "vars",
}  # fmt: skip


@dataclass(frozen=True)
class StretchCode:
    """Statements of a forward as a function.

    Attributes:
        function: takes the module and `inputs`; returns `outputs` as a tuple, or the forward's own
            result if `returns`.
        name: for the layer that it becomes.
        reason: why it was taken out; "" if because of another one.
        inputs: the local variables that it reads.
        tensors: those of them that stand for parameters and buffers of the module: its own name of
            each, by the local one.
        outputs: the local variables that it sets and the rest of the forward reads.
        returns: whether it ends the forward.
        modules: the names of the module's own children that it may call.
        changes: the names of the attributes and globals that it may set.
        uses: the names of those that it may read.
        in_place: whether it may change a tensor in place.
    """

    function: FunctionType
    name: str
    reason: str
    inputs: tuple[str, ...]
    tensors: dict[str, str]
    outputs: tuple[str, ...]
    returns: bool
    modules: frozenset[str]
    changes: frozenset[str]
    uses: frozenset[str]
    in_place: bool

    @property
    def results(self) -> tuple[str, ...]:
        """The variables that the function returns: outputs, and inputs, which may have changed."""
        return tuple(dict.fromkeys([*self.outputs, *self.inputs]))


# Runs a stretch: (its number, the local variables) -> its results.
Runner = Callable[[int, dict[str, Any]], Any]


class Outline:
    """The forward of a module, with the statements at some lines taken out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward = _function(module)
        self._reasons: dict[int, str] = {}  # by the line
        self._codes = {self._forward.__code__} if self._forward else set()
        self.stretches: list[StretchCode] = []

    def line_of(self, error: BaseException) -> int | None:
        """Returns the line of this forward where `error` comes from, if it does."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in self._codes:
                return trace.tb_lineno
            trace = trace.tb_next
        return None

    def take_out(self, error: BaseException) -> bool:
        """Takes out the statement that `error` comes from; returns whether it is here, and new."""
        line = self.line_of(error)
        if self._forward is None or line is None or line in self._reasons:
            return False
        self._reasons[line] = user_line(error)
        return True

    def take_out_globals(self) -> bool:
        """Takes out the statements that use a global that the forward sets; False if none is new.

        A line that uses a global set elsewhere cannot be helped: what sets it would be traced.
        """
        if self._forward is None or not self._forward.__code__.co_names:
            return False
        tree = _parse(self._forward)
        _, stores = names_in(tree.body)
        lines = {each.lineno for each in reads(tree, "", frozenset(stores))} - set(self._reasons)
        self._reasons |= dict.fromkeys(lines, "uses a global that the forward sets")
        return bool(lines)

    @property
    def changes(self) -> frozenset[str]:
        """The names of the attributes that the stretches may set."""
        return frozenset(name for stretch in self.stretches for name in stretch.changes)

    def forward(self, runner: Runner) -> FunctionType | None:
        """Returns the forward as a function of the module and its arguments; None if unchanged.

        Raises:
            Untraceable: a statement cannot be taken out.
        """
        if self._forward is None or not self._reasons:
            return None
        tree = _parse(self._forward)
        own = tree.args.posonlyargs + tree.args.args
        if not own:
            raise Untraceable("a forward without self cannot be taken apart")
        blocks = Blocks(tree, set(self._reasons))
        while True:
            self.stretches = [self._compile(tree, block, k) for k, block in enumerate(blocks.found)]
            touching = self._names_that_touch(self.changes)
            lines = {n.lineno for n in reads(tree, own[0].arg, touching)}
            if not blocks.add(lines):
                break
        for number, block in reversed(list(enumerate(blocks.found))):
            block.replace_by(_call(self.stretches[number], number, block.first))
        function = _build(self._forward, tree, runner)
        self._codes.add(function.__code__)
        return function

    def _compile(self, tree: ast.FunctionDef, block: Block, number: int) -> StretchCode:
        """Returns the function of `block`."""
        assert self._forward is not None
        own = (tree.args.posonlyargs + tree.args.args)[0].arg
        variables = {*self._forward.__code__.co_varnames, *self._forward.__code__.co_cellvars}
        tensors = self._module._parameters.keys() | self._module._buffers.keys()
        statements = [
            TensorReader(own, tensors).visit(copy.deepcopy(each)) for each in block.statements
        ]
        read = {f"{own}_{name}": name for name in sorted(tensors)}
        loads, stores = names_in(statements)
        loops = {n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)} - block.nodes
        again = {node for loop in loops for node in ast.walk(loop)}  # runs after the block, too
        elsewhere = set(ast.walk(tree)) - (block.nodes - again)
        after, _ = names_in([each for each in elsewhere if isinstance(each, ast.Name)])
        inputs = sorted((loads & variables) - {own} - read.keys())
        outputs = () if block.returns else tuple(sorted(stores & variables & after))
        held = {local: name for local, name in read.items() if local in loads}
        names = dict.fromkeys([*inputs, *held, *sorted(stores & variables)])
        names.pop(own, None)
        declared = [n for n in ast.walk(tree) if isinstance(n, ast.Global | ast.Nonlocal)]
        if any(isinstance(each, ast.Nonlocal) for each in declared):
            raise Untraceable("a forward with nonlocal variables cannot be taken apart")
        end = [] if block.returns else [_return(dict.fromkeys([*outputs, *inputs]))]
        definition = ast.parse(f"def _stretch({own}, {', '.join(f'{n}=None' for n in names)}): ...")
        stretch = definition.body[0]
        assert isinstance(stretch, ast.FunctionDef)
        stretch.body = [*map(copy.deepcopy, declared), *statements, *end]
        ast.copy_location(stretch, block.first)
        function = _build(self._forward, stretch, None, defaults=(None,) * len(names))
        first, last = block.lines
        uses_self_whole = passes_self(statements, own)
        used, changes = self._reach(function.__code__)
        called, _ = self._reach(function.__code__, only_called=True)
        changes |= (set(given_away(statements, own)) | called) & self._mutable()
        used_tensors = used & tensors
        if uses_self_whole or used & _REACHES_ALL:
            used |= self._module._modules.keys()
            used_tensors = set(tensors)
        if used_tensors:
            raise Untraceable(
                f"statements that use {min(used_tensors)!r} of their module cannot be taken out"
            )
        changes |= {name for each in declared for name in each.names} & stores
        return StretchCode(
            function,
            f"line{block.first.lineno}",
            next((why for line, why in self._reasons.items() if first <= line <= last), ""),
            tuple(inputs),
            held,
            outputs,
            block.returns,
            frozenset(used & self._module._modules.keys()),
            frozenset(changes),
            frozenset(used),
            may_work_in_place(statements),
        )

    def _mutable(self) -> set[str]:
        """Returns the names of attributes and globals whose objects may change in themselves."""
        assert self._forward is not None
        held = self._forward.__globals__
        names = {name for name in self._forward.__code__.co_names if name in held}
        values = {name: held[name] for name in names} | vars(self._module)
        return {name for name, value in values.items() if not isinstance(value, _IMMUTABLE)}

    def _reach(self, code: CodeType, only_called: bool = False) -> tuple[set[str], set[str]]:
        """Returns the names that `code` and what it calls use, and those that they set.

        What it calls are methods of the module and functions among the globals. With `only_called`,
        `code` itself is left out.
        """
        assert self._forward is not None
        used: set[str] = set()
        changes: set[str] = set()
        todo, seen = [(code, self._forward.__globals__)], {code}
        while todo:
            current, held = todo.pop()
            if not (only_called and current is code):
                used |= set(current.co_names)
            changes |= {
                str(each.argval)
                for each in dis.get_instructions(current)
                if each.opname in ("STORE_ATTR", "STORE_GLOBAL")
            }
            called = [getattr(type(self._module), name, None) for name in current.co_names]
            called += [held.get(name) for name in current.co_names]
            found = [
                (each.__code__, each.__globals__) for each in map(_user_function, called) if each
            ]
            found += [(each, held) for each in current.co_consts if isinstance(each, CodeType)]
            todo += [each for each in found if each[0] not in seen]
            seen |= {each for each, _ in found}
        return used, changes

    def _names_that_touch(self, names: frozenset[str]) -> frozenset[str]:
        """Returns `names`, and the methods, properties and functions that use one of them."""
        assert self._forward is not None
        touching = set(names)
        kind, held = type(self._module), self._forward.__globals__
        for name in (*dir(kind), *self._forward.__code__.co_names) if names else ():
            value = inspect.getattr_static(kind, name, held.get(name))
            function = _user_function(value.fget if isinstance(value, property) else value)
            if function and name != "forward" and self._reach(function.__code__)[0] & names:
                touching.add(name)
        return frozenset(touching)


def _function(module: nn.Module) -> FunctionType | None:
    """Returns the forward of a module's class, if its source can be taken apart."""
    forward = getattr(type(module), "forward", None)
    if "forward" in vars(module) or not isinstance(forward, FunctionType):
        return None
    if hasattr(forward, "__wrapped__") or forward.__module__.startswith("torch."):
        return None
    return forward


def _user_function(value: Any) -> FunctionType | None:
    """Returns `value` if it is a function, and not PyTorch's or Python's."""
    function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
    if not isinstance(function, FunctionType):
        return None
    package = (function.__module__ or "").partition(".")[0]
    return None if package == "torch" or package in sys.stdlib_module_names else function


def _parse(forward: FunctionType) -> ast.FunctionDef:
    try:
        lines, start = inspect.getsourcelines(forward)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError, TypeError) as error:
        raise Untraceable(f"the source of {forward.__qualname__} cannot be read") from error
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise Untraceable(f"{forward.__qualname__} is not a plain function")
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if name.startswith("__") and not name.endswith("__"):
            raise Untraceable(f"{forward.__qualname__} uses the private name {name}")
    ast.increment_lineno(tree, start - 1)
    return tree


def _build(
    forward: FunctionType,
    tree: ast.FunctionDef,
    runner: Runner | None,
    defaults: tuple[Any, ...] | None = None,
) -> FunctionType:
    """Returns `tree` as a function with the globals and the closure of `forward`."""
    free = [*forward.__code__.co_freevars, _CALL]
    factory = ast.parse(f"def _factory({', '.join(free)}): ...")
    outer = factory.body[0]
    assert isinstance(outer, ast.FunctionDef)
    for each in (*tree.args.args, *tree.args.kwonlyargs, *tree.args.posonlyargs):
        each.annotation = None
    outer.body = [tree]
    ast.fix_missing_locations(factory)
    code = compile(factory, forward.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("_factory", tree.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    cells[_CALL] = CellType(runner)
    function = FunctionType(
        code,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__ if defaults is None else defaults,
        tuple(cells[name] for name in code.co_freevars),
    )
    function.__kwdefaults__ = forward.__kwdefaults__ if defaults is None else None
    return function


def _call(stretch: StretchCode, number: int, at: ast.stmt) -> ast.stmt:
    """Returns the statement that runs a stretch in the forward."""
    call = f"{_CALL}({number}, locals())"
    targets = "".join(f"{name}, " for name in stretch.results)
    text = f"return {call}" if stretch.returns else f"{targets} = {call}" if targets else call
    statement = ast.parse(text.lstrip()).body[0]
    for node in ast.walk(statement):
        ast.copy_location(node, at)
    return statement


def _return(names: Iterable[str]) -> ast.stmt:
    return ast.parse(f"return ({''.join(f'{name}, ' for name in names)})").body[0]
