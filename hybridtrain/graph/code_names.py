"""The names that a function's code looks up, assigns and imports.

Only `engine="distributed"` needs this file.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import resolve_name
from types import CodeType
from typing import Any, NamedTuple

_STRUCTURE = ("MATCH_SEQUENCE", "MATCH_MAPPING")


def instructions_with_lines(code: CodeType | None) -> Iterator[tuple[int, dis.Instruction]]:
    """Yields the instructions of `code`, with line numbers; nothing for None."""
    line = 0
    for instruction in dis.get_instructions(code) if code is not None else ():
        if instruction.positions is not None:
            line = instruction.positions.lineno or line
        yield line, instruction


class CodeNames(NamedTuple):
    """The names in a function's code.

    Attributes:
        globals: the globals that it reads or assigns.
        stored: the globals that it assigns or deletes.
        attributes: the attributes that it reads, and its string constants, which may name some.
        imports: the Python modules that it imports, with the level of a relative import.
        matches: whether it matches patterns of sequences or mappings.
    """

    globals: frozenset[str]
    stored: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[tuple[int, str]]
    matches: bool


@cache
def names_used(code: CodeType) -> CodeNames:
    """Returns the names in a function's code."""
    globals_, stored, attributes = set[str](), set[str](), set[str]()
    imports = set[tuple[int, str]]()
    previous: list[Any] = [None, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            globals_.add(str(instruction.argval))
            if not instruction.opname.startswith("LOAD"):
                stored.add(str(instruction.argval))
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
            attributes.add(str(instruction.argval))
        elif instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
            attributes.add(instruction.argval)  # getattr(type(self), "name")
        elif instruction.opname == "IMPORT_NAME" and isinstance(previous[0], int):
            imports.add((previous[0], str(instruction.argval)))
        previous = [previous[1], instruction.argval]
    matches = any(instruction.opname in _STRUCTURE for instruction in dis.get_instructions(code))
    names = frozenset(globals_), frozenset(stored), frozenset(attributes)
    return CodeNames(*names, frozenset(imports), matches)


def imported(level: int, name: str, held: Mapping[str, Any]) -> Any:
    """Returns a Python module that code with the globals `held` imports while it runs."""
    try:
        full = resolve_name("." * level + name, str(held.get("__package__") or ""))
    except ImportError:
        return None
    return sys.modules.get(full)
