"""Finds patterns that make a text read like a translation: `python scripts/words.py [--report]`.

Checks string literals and docstrings in hybridtrain/, and the prose of the documentation: code
blocks and inline code are left out. `words.txt` has the patterns with their reasons. A line that
must contain one ends with `words: ok`. `--report` counts the findings of each pattern and always
succeeds.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
INLINE_CODE = re.compile(r"`[^`\n]*`")


class Pattern(NamedTuple):
    """A line of words.txt; an error unless it is only `counted`."""

    regex: re.Pattern[str]
    reason: str
    counted: bool


def patterns() -> list[Pattern]:
    """Returns the patterns of words.txt."""
    lines = (ROOT / "scripts/words.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" => ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [
        Pattern(re.compile(regex.removeprefix("? ")), reason, regex.startswith("? "))
        for regex, reason in pairs
    ]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of a file with their line numbers; inline code is replaced by `x`."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if path.suffix == ".py":
        strings = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
        entries = [(node.lineno, node.value) for node in strings if isinstance(node.value, str)]
    else:
        prose = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.S)
        entries = list(enumerate(prose.splitlines(), start=1))
    for number, text in entries:
        if not lines[number - 1].rstrip(" ->").endswith("words: ok"):
            yield number, " ".join(INLINE_CODE.sub("`x`", text).split())


def main() -> int:
    """Prints the findings, or with `--report` their number for each pattern."""
    files = [*sorted((ROOT / "hybridtrain").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.md"))]
    rules, counts = patterns(), Counter[str]()
    errors = []
    for path in [*(ROOT / page for page in PAGES), *files]:
        for number, text in texts(path):
            for pattern in rules:
                for match in pattern.regex.finditer(text):
                    counts[pattern.regex.pattern] += 1
                    if not pattern.counted:
                        where = f"{path.relative_to(ROOT)}:{number}"
                        errors.append(f"{where}: {match[0].strip()!r}: {pattern.reason}")
    if "--report" in sys.argv[1:]:
        print("\n".join(f"{counts[p.regex.pattern]:5d} {p.regex.pattern}" for p in rules))
        return 0
    print("\n".join(errors))
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
