"""The pages that readers see, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# in a tab it is indented
_BLOCK = re.compile(r"^(?P<indent> *)```(\w+)\n(.*?)^(?P=indent)```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the page's line that the text begins at."""

    language: str
    text: str
    line: int


def blocks(page: Path, *languages: str) -> list[Block]:
    """Returns the blocks of `page` in one of `languages`, in order."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match[2], dedent(match[3]), text.count("\n", 0, match.start(3)) + 1)
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language in languages]


def name(page: Path) -> str:
    """Returns the path of `page` below the repository, as the name of a test's case."""
    return str(page.relative_to(ROOT))
