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
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from hybridtrain.graph.traced_graph import Untraceable, user_line

_CALL = "_hybridtrain_stretch"
_LISTS = ("body", "orelse", "finalbody", "handlers", "cases")
# Objects that do not change in themselves, or whose changes are looked after elsewhere.
_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, type, ModuleType, FunctionType, MethodType,
    BuiltinFunctionType, nn.Module, torch.dtype, torch.device,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
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
        _, stores = _names(tree.body)
        lines = {each.lineno for each in _reads(tree, "", frozenset(stores))} - set(self._reasons)
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
        blocks = _Blocks(tree, set(self._reasons))
        while True:
            self.stretches = [self._compile(tree, block, k) for k, block in enumerate(blocks.found)]
            touching = self._names_that_touch(self.changes)
            lines = {n.lineno for n in _reads(tree, own[0].arg, touching)}
            if not blocks.add(lines):
                break
        for number, block in reversed(list(enumerate(blocks.found))):
            block.replace_by(_call(self.stretches[number], number, block.first))
        function = _build(self._forward, tree, runner)
        self._codes.add(function.__code__)
        return function

    def _compile(self, tree: ast.FunctionDef, block: _Block, number: int) -> StretchCode:
        """Returns the function of `block`."""
        assert self._forward is not None
        own = (tree.args.posonlyargs + tree.args.args)[0].arg
        variables = {*self._forward.__code__.co_varnames, *self._forward.__code__.co_cellvars}
        tensors = self._module._parameters.keys() | self._module._buffers.keys()
        statements = [
            _Tensors(own, tensors).visit(copy.deepcopy(each)) for each in block.statements
        ]
        read = {f"{own}_{name}": name for name in sorted(tensors)}
        loads, stores = _names(statements)
        after = {n for each in ast.walk(tree) if each not in block.nodes for n in _loaded(each)}
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
        uses_self_whole = _passes_self(statements, own)
        used, changes = self._reach(function.__code__)
        called, _ = self._reach(function.__code__, only_called=True)
        changes |= (set(_given_away(statements, own)) | called) & self._mutable()
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
            _may_work_in_place(statements),
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


@dataclass
class _Block:
    """Consecutive statements of one list of the forward."""

    siblings: list[ast.stmt]
    start: int
    end: int
    returns: bool

    @property
    def statements(self) -> list[ast.stmt]:
        return self.siblings[self.start : self.end]

    @property
    def first(self) -> ast.stmt:
        return self.siblings[self.start]

    @property
    def nodes(self) -> set[ast.AST]:
        return {node for each in self.statements for node in ast.walk(each)}

    @property
    def lines(self) -> tuple[int, int]:
        last = self.siblings[self.end - 1]
        return self.first.lineno, last.end_lineno or last.lineno

    def replace_by(self, statement: ast.stmt) -> None:
        self.siblings[self.start : self.end] = [statement]


class _Blocks:
    """The smallest blocks that hold some lines and can be taken out."""

    def __init__(self, tree: ast.FunctionDef, lines: set[int]) -> None:
        self._tree = tree
        self.found: list[_Block] = []
        self.add(lines)

    def add(self, lines: set[int]) -> bool:
        """Adds the blocks of `lines`; returns whether there is a new one."""
        before = [block.lines for block in self.found]
        for line in sorted(lines):
            if not any(first <= line <= last for first, last in (b.lines for b in self.found)):
                block = self._block(line)
                first, last = block.lines
                self.found = [b for b in self.found if not (first <= b.lines[0] <= last)] + [block]
        self.found.sort(key=lambda block: block.lines)
        return [block.lines for block in self.found] != before

    def _block(self, line: int) -> _Block:
        path = list(_path(self._tree, line))
        if not path:
            raise Untraceable(f"line {line} is not in a statement of the forward")
        for depth in range(len(path) - 1, -1, -1):
            statements, index, parent = path[depth]
            around = [each for _, _, each in path[: depth + 1]]
            if any(isinstance(each, ast.Try | ast.ExceptHandler | ast.Match) for each in around):
                continue
            leaves = _leaves(statements[index])
            if not leaves:
                return _Block(statements, index, index + 1, False)
            if parent is self._tree and leaves == {ast.Return}:
                return _Block(statements, index, len(statements), True)
        raise Untraceable("a statement that cannot be taken out of the forward")


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


def _path(parent: Any, line: int) -> Iterator[tuple[list[ast.stmt], int, Any]]:
    """Yields where the statement at `line` is, from the outside: list, index, its owner."""
    for field in _LISTS:
        for index, each in enumerate(getattr(parent, field, ())):
            first = getattr(each, "lineno", None) or min(
                (n.lineno for n in ast.walk(each) if hasattr(n, "lineno")), default=0
            )
            last = max((getattr(n, "end_lineno", 0) or 0 for n in ast.walk(each)), default=0)
            if first <= line <= last:
                if isinstance(each, ast.stmt):
                    yield getattr(parent, field), index, parent
                # the line of an `if` is not that of what it holds, though that may be on it
                if not isinstance(each, _FUNCTIONS) and line > first:
                    yield from _path(each, line)
                return


def _leaves(statement: ast.stmt) -> set[type]:
    """Returns how a statement may leave its place: Return, Break, Continue, Yield, Await."""
    found: set[type] = set()

    def visit(node: ast.AST, in_loop: bool) -> None:
        if isinstance(node, _FUNCTIONS):
            return
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Await):
            found.add(type(node))
        if isinstance(node, ast.Break | ast.Continue) and not in_loop:
            found.add(type(node))
        for child in ast.iter_child_nodes(node):
            visit(child, in_loop or isinstance(node, ast.For | ast.While))

    visit(statement, False)
    return found


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _loaded(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id


def _names(statements: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Returns the names that the statements read, and those that they set."""
    loads: set[str] = set()
    stores: set[str] = set()
    for node in (node for each in statements for node in ast.walk(each)):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            loads.add(node.target.id)
        if isinstance(node, ast.Name):
            (loads if isinstance(node.ctx, ast.Load) else stores).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            stores.add(node.name)
        elif isinstance(node, ast.alias):
            stores.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            stores.add(node.name)
    return loads, stores


def _reads(tree: ast.FunctionDef, own: str, names: frozenset[str]) -> Iterator[ast.expr]:
    """Yields where the forward uses one of `names` as an attribute of its module or as a global."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in names:
            if node.id in declared or node.id not in stored:
                yield node
        elif isinstance(node, ast.Attribute) and node.attr in names and _is(node.value, own):
            yield node


def _given_away(statements: Sequence[ast.stmt], own: str) -> Iterator[str]:
    """Yields the attributes and globals that are called, given to a call, or set something of."""

    def root(node: ast.AST) -> Iterator[str]:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
            if isinstance(node, ast.Attribute) and _is(node.value, own):
                yield node.attr
            node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Name):
            yield node.id

    for node in (node for each in statements for node in ast.walk(each)):
        if isinstance(node, ast.Call):
            for each in (node.func, *node.args, *(word.value for word in node.keywords)):
                yield from root(each)
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield from root(node)


def _passes_self(statements: Sequence[ast.stmt], own: str) -> bool:
    """Returns whether the module itself is given to other code."""
    nodes = [node for each in statements for node in ast.walk(each)]
    bases = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    return any(isinstance(n, ast.Name) and n.id == own and n not in bases for n in nodes)


def _may_work_in_place(statements: Sequence[ast.stmt]) -> bool:
    for node in (node for each in statements for node in ast.walk(each)):
        if isinstance(node, ast.AugAssign | ast.Delete):
            return True
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.keyword) and node.arg in ("out", "inplace"):
            return True
        if isinstance(node, ast.Attribute) and node.attr.endswith("_"):
            return True
    return False


class _Tensors(ast.NodeTransformer):
    """Replaces `self.weight` by the local variable `self_weight`."""

    def __init__(self, own: str, names: set[str]) -> None:
        self._own = own
        self._names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replaces one."""
        self.generic_visit(node)
        if not _is(node.value, self._own) or node.attr not in self._names:
            return node
        if not isinstance(node.ctx, ast.Load):
            raise Untraceable(f"sets its attribute {node.attr!r}, which a graph would not")
        name = ast.Name(f"{self._own}_{node.attr}", ast.Load())
        return ast.copy_location(name, node)
