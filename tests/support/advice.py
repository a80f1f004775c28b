"""The advice in the errors of the sources: what a message tells the user to type."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hybridtrain

_SOURCES = Path(hybridtrain.__file__).parent
_ADVICE = re.compile(
    r"\b(set|use|run|add|remove|write|pass|choose|raise|lower|start|train)\b.*?"
    r"([\w}]=|hybridtrain |--\w)"
)


def advice_in(*packages: str) -> Iterator[str]:
    """Yields the messages of errors that advise to type something, with {} for what they format."""
    for package in packages:
        for path in sorted((_SOURCES / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                text = _text(node.args[0]) if node.args else ""
                if node.func.id.endswith("Error") and _ADVICE.search(text):
                    yield f"{path.relative_to(_SOURCES).as_posix()}: {text}"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} | {_text(node.orelse)}"
    call = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
        name = call.args[0]
        if call.func.id in ("argument", "setting") and isinstance(name, ast.Constant):
            return str(name.value) + "="
    return "{}"
