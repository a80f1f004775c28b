"""Small checkpoints for the tests of the store."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def writers(content: str, size: int = 300) -> dict[str, Callable[[BinaryIO], None]]:
    """Returns writers of two files whose `content` says which save they come from."""

    def write(file: BinaryIO) -> None:
        # in several pieces, for crash points in the middle of a file
        for _ in range(3):
            file.write(content.encode() * size)

    return {"model.pt": write, "state.json": write}


def content_of(path: Path) -> str:
    """Returns the content of a checkpoint; both files must come from the same save."""
    contents = {(path / name).read_text()[:5] for name in ("model.pt", "state.json")}
    assert len(contents) == 1
    return contents.pop()
