"""The statements of a function's source: which to take out, and which names they use."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain.graph.traced_graph import Untraceable

_LISTS = ("body", "orelse", "finalbody", "handlers", "cases")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass
class Block:
    """Consecutive statements of one list of the forward."""

    siblings: list[ast.stmt]
    start: int
    end: int
    returns: bool

    @property
    def statements(self) -> list[ast.stmt]:
        """The statements."""
        return self.siblings[self.start : self.end]

    @property
    def first(self) -> ast.stmt:
        """The first statement."""
        return self.siblings[self.start]

    @property
    def nodes(self) -> set[ast.AST]:
        """All nodes of their syntax trees."""
        return {node for each in self.statements for node in ast.walk(each)}

    @property
    def lines(self) -> tuple[int, int]:
        """The numbers of the first line and of the last."""
        last = self.siblings[self.end - 1]
        return self.first.lineno, last.end_lineno or last.lineno

    def replace_by(self, statement: ast.stmt) -> None:
        """Puts `statement` in their place."""
        self.siblings[self.start : self.end] = [statement]


class Blocks:
    """The smallest blocks that hold some lines and can be taken out."""

    def __init__(self, tree: ast.FunctionDef, lines: set[int]) -> None:
        self._tree = tree
        self.found: list[Block] = []
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

    def _block(self, line: int) -> Block:
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
                return Block(statements, index, index + 1, False)
            if parent is self._tree and leaves == {ast.Return}:
                return Block(statements, index, len(statements), True)
        raise Untraceable("a statement that cannot be taken out of the forward")


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
        body = node.body if isinstance(node, ast.For | ast.While) else []  # without its `else`
        for child in ast.iter_child_nodes(node):
            visit(child, in_loop or child in body)

    visit(statement, False)
    return found


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def names_in(statements: Sequence[ast.AST]) -> tuple[set[str], set[str]]:
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


def reads(tree: ast.FunctionDef, own: str, names: frozenset[str]) -> Iterator[ast.expr]:
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


def given_away(statements: Sequence[ast.stmt], own: str) -> Iterator[str]:
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


def passes_self(statements: Sequence[ast.stmt], own: str) -> bool:
    """Returns whether the module itself is given to other code."""
    nodes = [node for each in statements for node in ast.walk(each)]
    bases = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    return any(isinstance(n, ast.Name) and n.id == own and n not in bases for n in nodes)


def may_work_in_place(statements: Sequence[ast.stmt]) -> bool:
    """Returns whether the statements may change a tensor in place."""
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


class TensorReader(ast.NodeTransformer):
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
