"""A long text of token ids as language model samples: adjacent windows."""

from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from hybridtrain.data import DataSplits
from hybridtrain.errors import DataError, argument


class TokenWindows(Dataset[Any]):
    """The windows of a text, which do not overlap, so each token is predicted at most once.

    Items are `(x, y)`, both int64 of shape (seq_len,): the tokens of a window, and the next token
    for each of them. A last window that is too short is dropped.

    Args:
        tokens: the ids, 1-dimensional. A memory map is read on use, and only its file name is sent
            to a worker process.
        seq_len: the number of tokens per window.
        vocab_size: an id that is not below it raises an error; None: every id is known to be valid.
        prepare: converts a batch `(x, y)` of tensors (N, seq_len) to its final form; see
            `InMemoryDataset`.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        seq_len: int,
        vocab_size: int | None = None,
        prepare: Callable[[Tensor, Tensor], tuple[Any, Any]] | None = None,
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.prepare = prepare

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = self.__getitems__([index % len(self)])
        item: tuple[Any, Any] = tree_map(lambda leaf: leaf[0], batch)
        return item

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Returns the batch `(x, y)` of these windows, each of shape (N, seq_len)."""
        starts = np.asarray(indices, dtype=np.int64) * self.seq_len
        ids = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        if self.vocab_size is not None and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise DataError(
                f"there are token ids from {ids.min()} to {ids.max()}, but {argument('vocab_size')}"
                f"{self.vocab_size} allows 0 to {self.vocab_size - 1}: check that the vocabulary "
                f"and the dtype match the ones that the tokens were written with"
            )
        whole = torch.from_numpy(ids)
        x, y = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        return (x, y) if self.prepare is None else self.prepare(x, y)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        tokens = self.tokens
        if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap):  # not a slice of one
            state["tokens"] = (str(tokens.filename), tokens.dtype, tokens.offset, tokens.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, tuple):
            name, dtype, offset, shape = self.tokens
            self.tokens = np.memmap(name, dtype, "r", offset, shape)


def window_splits(
    texts: Sequence[NDArray[Any]],
    seq_len: int,
    vocab_size: int,
    too_few: Callable[[str, int], str],
    prepare: Callable[[Tensor, Tensor], tuple[Any, Any]] | None = None,
) -> DataSplits:
    """Returns the windows of a training and an evaluation text.

    Metadata: `vocab_size`, `seq_len`.

    Args:
        texts: the ids of both texts.
        seq_len: the number of tokens per window.
        vocab_size: the vocabulary size.
        too_few: returns the error message for a split (`train` or `eval`) and its token count.
        prepare: see `TokenWindows`.

    Raises:
        DataError: a text has no window.
    """
    for split, ids in zip(("train", "eval"), texts, strict=True):
        if len(ids) <= seq_len:
            raise DataError(too_few(split, len(ids)))
    train, evaluation = (TokenWindows(ids, seq_len, prepare=prepare) for ids in texts)
    return DataSplits(train, evaluation, metadata={"vocab_size": vocab_size, "seq_len": seq_len})
