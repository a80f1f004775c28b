"""The source of the interpreter's standard library: text files that every machine has."""

import os
import sysconfig
from pathlib import Path

from hybridtrain.data import DataSplits
from hybridtrain.datasets.text_files import check_at_least_1, ids_of
from hybridtrain.datasets.windows import window_splits
from hybridtrain.errors import argument, setting

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
    and the next byte for each of them. Every 20th file in path order is held out for evaluation,
    the others are for training, and the files of a split are joined into one text. Windows do not
    overlap, so each byte is predicted at most once per epoch.

    All processes of a run must have the same Python release, and results are comparable only
    between runs on the same release.

    Metadata: `vocab_size` 256, `seq_len`.

    Args:
        seq_len: the number of bytes per window.
        max_bytes: the maximum length of the training text; None: no limit.
        eval_bytes: the maximum length of the evaluation text; None: no limit.

    Raises:
        DataError: an argument is not positive, or the sources are missing (for example if the
            standard library is zipped or compiled only) or too few for a window in each split.
    """
    check_at_least_1(seq_len=seq_len, max_bytes=max_bytes, eval_bytes=eval_bytes)
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = _sources(library)
    held_out = sources[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    training = [path for i, path in enumerate(sources, start=1) if i % _HELD_OUT_EVERY]

    def too_few(split: str, bytes_found: int) -> str:
        purpose, key = ("train", "max_bytes") if split == "train" else ("evaluate", "eval_bytes")
        return (
            f"python_source: {bytes_found} bytes to {purpose} on, from {len(sources)} .py files "
            f"in {library}, are too few for one window of {setting('seq_len', seq_len)} bytes and "
            f"the next byte. Set a smaller {argument('seq_len')} or a larger {argument(key)}, or "
            "use an interpreter with its standard library as .py files"
        )

    texts = [ids_of(training, limit=max_bytes), ids_of(held_out, limit=eval_bytes)]
    return window_splits(texts, seq_len, 256, too_few)


def _sources(library: Path) -> list[Path]:
    """Returns the .py files under `library`, sorted by path."""
    paths = []
    for folder, subfolders, names in os.walk(library):
        # Modified in place, so that os.walk skips the excluded folders.
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths, key=lambda path: path.relative_to(library).as_posix())
