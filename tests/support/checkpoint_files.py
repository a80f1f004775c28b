"""Small checkpoints for the tests of the store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import load_file
from torch import Tensor


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


def tensors_in(folder: Path, stem: str) -> dict[str, Tensor]:
    """Returns the tensors of `stem.safetensors`, or of its shards, read with safetensors alone."""
    files = [*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*.safetensors")]
    assert files, f"no {stem}.safetensors in {folder}"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def optimizer_in(path: Path) -> dict[str, Any]:
    """Returns the optimizer's state in a checkpoint, read with safetensors and json alone."""
    tensors = load_file(path / "optimizer.safetensors")
    content: dict[str, Any] = json.loads((path / "optimizer.json").read_text())
    for entry in content["state"].values():
        for key, value in entry.items():
            if isinstance(value, dict):
                entry[key] = tensors[value["$tensor"]]
    return content
