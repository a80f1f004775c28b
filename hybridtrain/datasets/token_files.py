"""Memory-mapped files of token ids: in the formats of nanoGPT, llm.c and others, and NumPy
arrays."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from hybridtrain._base.text_table import counted
from hybridtrain.data import DataSplits, digest_of_files, for_trained_models
from hybridtrain.datasets.text_files import check_at_least_1
from hybridtrain.datasets.windows import TokenWindows
from hybridtrain.errors import DataError, argument, check_choice, setting

_DTYPES = ("uint8", "uint16", "int16", "uint32", "int32", "int64")

# The number of ids to read at once when looking for the largest.
_IDS_AT_A_TIME = 1 << 24


@for_trained_models(train="eval")
def token_files(
    root: str | Path = "data",
    train: str = "train.bin",
    eval: str | None = "val.bin",
    dtype: str = "uint16",
    header_bytes: int = 0,
    vocab_size: int | None = None,
    seq_len: int = 256,
) -> DataSplits:
    """Returns the windows of files of token ids, which stay on disk.

    Items are `(x, y)`, both int64 of shape (seq_len,): the tokens of a window, and the next token
    for each of them. Windows do not overlap or span two files.

    Metadata: `vocab_size`, `seq_len`.

    Args:
        root: the folder of the files.
        train: the file of the training split, or a pattern (`fineweb_train_*.bin`) for several
            files, used in the order of their names. `.npy` files have a dtype; other files are
            plain sequences of ids.
        eval: the file of the evaluation split, or a pattern; None: no evaluation split.
        dtype: the type of the ids: uint8, uint16, int16, uint32, int32 or int64.
        header_bytes: the bytes to skip at the beginning of each file (1024 in llm.c files).
        vocab_size: the size of the vocabulary; None: the largest id plus one, for which all files
            are read once.
        seq_len: the number of tokens per window.

    Raises:
        DataError: a file is missing, empty or not a whole number of ids, an id is not below
            `vocab_size`, or a split has less than one window.
    """
    check_at_least_1(seq_len=seq_len, vocab_size=vocab_size)
    check_choice("dtype", dtype, _DTYPES)
    if header_bytes < 0:
        raise DataError(f"{setting('header_bytes', header_bytes)} must be 0 or more")
    root = Path(root)
    files = {
        key: _files(root, key, name)
        for key, name in (("train", train), ("eval", eval))
        if name is not None
    }
    splits = {
        key: [_mapped(path, dtype, header_bytes) for path in paths] for key, paths in files.items()
    }
    if vocab_size is None:
        vocab_size = 1 + max(_largest(ids) for arrays in splits.values() for ids in arrays)
    splits_by_key: dict[str, Dataset[Any]] = {}
    for key, arrays in splits.items():
        windows = [TokenWindows(ids, seq_len, vocab_size) for ids in arrays if len(ids) > seq_len]
        if not windows:
            raise DataError(
                f"{key}: {sum(map(len, arrays))} tokens in {len(arrays)} files in "
                f"{root.absolute()} are too few for one window of {setting('seq_len', seq_len)} "
                f"and the next token: set a smaller {argument('seq_len')}"
            )
        splits_by_key[key] = windows[0] if len(windows) == 1 else ConcatDataset(windows)
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len}
    every = [path for paths in files.values() for path in paths]
    tokens = sum(len(ids) for arrays in splits.values() for ids in arrays)
    return DataSplits(
        splits_by_key["train"],
        splits_by_key.get("eval"),
        metadata=sizes,
        notes=[f"{counted(tokens, 'token')} from {counted(len(every), 'file')} in {root}"],
        digest=digest_of_files(every),
    )


def _files(root: Path, key: str, name: str) -> list[Path]:
    paths = sorted(root.glob(name))
    if not paths:
        entries = sorted(path.name for path in root.iterdir())[:8] if root.is_dir() else []
        content = f"has {', '.join(entries)}" if entries else "is empty or does not exist"
        raise DataError(f"{setting(key, name)}: {root.absolute()} has no such file; it {content}")
    return paths


def _mapped(path: Path, dtype: str, header_bytes: int) -> NDArray[Any]:
    """Returns the ids of a file, memory-mapped."""
    try:
        if path.suffix == ".npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ValueError(
                    f"it has {ids.dtype} of shape {ids.shape}, not one-dimensional ids"
                )
            return ids  # type: ignore[no-any-return]
        size = path.stat().st_size - header_bytes
        if size <= 0 or size % np.dtype(dtype).itemsize:
            position = f" after {setting('header_bytes', header_bytes)}" if header_bytes else ""
            raise ValueError(f"{size} bytes{position} are not a whole number of {dtype}")
        return np.memmap(path, dtype, "r", header_bytes)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged or not a file of token ids: {error}") from error


def _largest(ids: NDArray[Any]) -> int:
    starts = range(0, len(ids), _IDS_AT_A_TIME)
    return max((int(ids[start : start + _IDS_AT_A_TIME].max()) for start in starts), default=0)
