"""The source of the interpreter's standard library, a text that every machine has."""

import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.data.splits import DataSplits, already_batched
from hybridtrain.errors import DataError

# Not part of the library proper, or present on some machines only (`test`, `idlelib` and
# `tkinter` are packages of their own on Debian); `encodings` is mostly tables of code points.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "tkinter",
    "turtledemo",
    "encodings",
    "__pycache__",
}

_HELD_OUT_EVERY = 20

Batch = tuple[Tensor, Tensor]


class ByteWindows(Dataset[Batch]):
    """Windows of a text for next-byte prediction.

    `text` is a uint8 tensor of shape (bytes,). Item i is `(x, y)`, both int64 of shape
    (seq_len,): x starts at byte `i * seq_len`, and y is x shifted by one byte. The windows do not
    overlap, so each byte is predicted at most once per epoch; a last one that would be too short
    is left out.
    """

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text = text
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        x, y = self.__getitems__([index % len(self)])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns these windows as one batch, x and y of shape (len(indices), seq_len)."""
        starts = torch.as_tensor(indices, dtype=torch.int64) * self.seq_len
        window = self.text[starts.unsqueeze(1) + torch.arange(self.seq_len + 1)].long()
        # Copies, so that a loss may flatten them with `view`.
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def python_source(
    seq_len: int = 256, max_bytes: int | None = 8_000_000, eval_bytes: int | None = 400_000
) -> DataSplits:
    """Returns the Python source of the interpreter's standard library, byte by byte.

    Items are `(x, y)`, both int64 of shape (seq_len,) with values 0..255: the bytes of a window,
    and the byte that follows each of them. The files are taken in the order of their paths: every
    20th is held out for evaluation, the rest are for training, and those of a split are joined
    into one text.

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

    train = ByteWindows(_joined(training, max_bytes), seq_len)
    evaluation = ByteWindows(_joined(held_out, eval_bytes), seq_len)
    for purpose, argument, windows in (
        ("train on", "max_bytes", train),
        ("evaluate on", "eval_bytes", evaluation),
    ):
        if len(windows) == 0:
            raise DataError(
                f"python_source: {len(windows.text)} bytes to {purpose}, from {len(sources)} .py "
                f"files under {library}, are too few for one window of seq_len={seq_len} bytes and "
                f"the byte that follows. Set a smaller seq_len= or a larger {argument}=, or use an "
                "interpreter that has its standard library as .py files on the disk"
            )
    return DataSplits(
        train=train,
        eval=evaluation,
        collate=already_batched,
        metadata={"vocab_size": 256, "seq_len": seq_len},
    )


def _sources(library: Path) -> list[Path]:
    """Returns the .py files under `library`, sorted by path."""
    found = []
    for folder, subfolders, names in os.walk(library):
        # Changed in place, so that os.walk does not enter those left out.
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(library).as_posix())


def _joined(paths: Iterable[Path], limit: int | None) -> Tensor:
    """Returns the first `limit` bytes of the files, joined, as a uint8 tensor."""
    text = bytearray()
    for path in paths:
        if limit is not None and len(text) >= limit:
            break
        try:
            text += path.read_bytes()
        except OSError as error:
            # Without it, this process would have another text than the others.
            raise DataError(f"python_source: {path} cannot be read: {error}") from error
    # frombuffer refuses an empty buffer.
    data = bytearray(text[:limit])
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
