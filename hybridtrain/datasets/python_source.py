"""The source of the interpreter's standard library, a text that every machine has."""

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.data import DataSplits, InMemoryDataset
from hybridtrain.errors import DataError

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
# Debian has separate packages for most of these.
_ON_SOME_MACHINES = {"test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo"}
_LEFT_OUT = _NOT_THE_LIBRARY | _ON_SOME_MACHINES | {"encodings"}  # mostly tables of code points

_HELD_OUT_EVERY = 20


def python_source(
    seq_len: int = 256, max_bytes: int | None = 8_000_000, eval_bytes: int | None = 400_000
) -> DataSplits:
    """Returns the Python source of the interpreter's standard library, byte by byte.

    Items are `(x, y)`, both int64 of shape (seq_len,) with values 0..255: the bytes of a window,
    and the byte that follows each of them. The files are taken in the order of their paths: every
    20th is held out for evaluation, the rest are for training, and those of a split are joined
    into one text. Windows do not overlap, so each byte is predicted at most once per epoch.

    All processes of a run must have the same release of Python, and results are comparable only
    between runs on the same release.

    Metadata: `vocab_size` 256, `seq_len`.

    Args:
        seq_len: bytes in a window.
        max_bytes: the length of the training text at most; None: all of it.
        eval_bytes: the length of the evaluation text at most; None: all of it.

    Raises:
        DataError: an argument is not positive, or the sources are missing (an interpreter with its
            library in a zip file, or compiled only) or too few for a window in each split.
    """
    for name, value in (("seq_len", seq_len), ("max_bytes", max_bytes), ("eval_bytes", eval_bytes)):
        if value is not None and value < 1:
            raise DataError(f"{name}={value} must be at least 1")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = _sources(library)
    held_out = sources[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    training = [path for i, path in enumerate(sources, start=1) if i % _HELD_OUT_EVERY]
    splits = []
    for purpose, argument, paths, limit in (
        ("train on", "max_bytes", training, max_bytes),
        ("evaluate on", "eval_bytes", held_out, eval_bytes),
    ):
        text = _joined(paths, limit)
        if len(text) <= seq_len:
            raise DataError(
                f"python_source: {len(text)} bytes to {purpose}, from {len(sources)} .py files "
                f"under {library}, are too few for one window of seq_len={seq_len} bytes and the "
                f"byte that follows. Set a smaller seq_len= or a larger {argument}=, or use an "
                "interpreter that has its standard library as .py files on the disk"
            )
        splits.append(_windows(torch.frombuffer(text, dtype=torch.uint8), seq_len))
    train, evaluation = splits
    return DataSplits(train, evaluation, metadata={"vocab_size": 256, "seq_len": seq_len})


def as_numbers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bytes as the int64 that an embedding and a loss take."""
    return x.long(), y.long()


def _windows(text: Tensor, seq_len: int) -> InMemoryDataset:
    """Returns the windows of a text, side by side; a last one that is too short is left out."""
    end = (len(text) - 1) // seq_len * seq_len
    x, y = text[:end].view(-1, seq_len), text[1 : end + 1].view(-1, seq_len)
    return InMemoryDataset(x, y, prepare=as_numbers)


def _sources(library: Path) -> list[Path]:
    """Returns the .py files under `library`, sorted by path."""
    found = []
    for folder, subfolders, names in os.walk(library):
        # Changed in place, so that os.walk does not enter those left out.
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(library).as_posix())


def _joined(paths: Iterable[Path], limit: int | None) -> bytearray:
    """Returns the first `limit` bytes of the files, joined."""
    text = bytearray()
    for path in paths:
        if limit is not None and len(text) >= limit:
            break
        try:
            text += path.read_bytes()
        except OSError as error:
            # Without it, this process would have another text than the others.
            raise DataError(f"python_source: {path} cannot be read: {error}") from error
    return text[:limit]
