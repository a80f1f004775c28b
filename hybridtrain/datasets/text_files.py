"""Text files, as one long text for a language model."""

import glob
import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrain._base.text_table import counted
from hybridtrain.data import DataSplits, digest_of_files, for_trained_models
from hybridtrain.datasets.held_out import check_share
from hybridtrain.datasets.tokenizing import (
    end_of_text,
    load_tokenizer,
    unknown_tokens,
    vocabulary_digest,
)
from hybridtrain.datasets.windows import window_splits
from hybridtrain.errors import DataError, argument, setting


@for_trained_models(path="eval_path")
def text_files(
    path: str | Path,
    eval_path: str | Path | None = None,
    pattern: str = "*.txt",
    tokenizer: str | None = None,
    seq_len: int = 256,
    eval_share: float = 0.05,
    max_tokens: int | None = None,
    eval_tokens: int | None = None,
) -> DataSplits:
    """Returns the text of files as token windows for a language model.

    Items are `(x, y)`, both int64 of shape (seq_len,): the tokens of a window, and the next token
    for each of them. Files are joined into one text in path order; windows do not overlap. With a
    tokenizer, its end-of-text token follows each file, if it has one. Files that end in `.gz` are
    decompressed.

    Metadata: `vocab_size` (256 for bytes), `seq_len`.

    Args:
        path: a file, a folder, or a pattern such as `books/**/*.txt`.
        eval_path: a file, a folder, or a pattern with the evaluation text; None: the end of the
            text is held out.
        pattern: the names of the files in a folder and its subfolders.
        tokenizer: a `tokenizer.json`, a tokenizer folder, or a name on the Hugging Face Hub; None:
            use the bytes of the files as tokens.
        seq_len: the number of tokens per window.
        eval_share: the share of the text to hold out without an `eval_path`, 0 to 1.
        max_tokens: the maximum number of training tokens; None: no limit.
        eval_tokens: the maximum number of evaluation tokens; None: no limit.

    Raises:
        DataError: no file matches, a file cannot be read or is not UTF-8, the tokenizer cannot be
            loaded, a number is out of range, or a split has less than one window.
    """
    check_at_least_1(seq_len=seq_len, max_tokens=max_tokens, eval_tokens=eval_tokens)
    check_share(eval_share)
    tokenize = None if tokenizer is None else load_tokenizer(tokenizer)
    files = _files("path", path, pattern)
    of_eval = [] if eval_path is None else _files("eval_path", eval_path, pattern)
    if eval_path is None:
        whole = ids_of(files, tokenize)
        cut = len(whole) - round(len(whole) * eval_share)
        texts = [whole[:cut][:max_tokens], whole[cut:][:eval_tokens]]
    else:
        texts = [ids_of(files, tokenize, max_tokens), ids_of(of_eval, tokenize, eval_tokens)]

    def too_few(split: str, tokens: int) -> str:
        key = "eval_path" if split == "eval" and eval_path is not None else "path"
        source = path if key == "path" else eval_path
        held_out = (
            f", with {setting('eval_share', eval_share)} held out" if eval_path is None else ""
        )
        return (
            f"{tokens} tokens to {'train' if split == 'train' else 'evaluate'} on, from "
            f"{setting(key, source)}{held_out}, are too few for one window of "
            f"{setting('seq_len', seq_len)} and the next token: set a smaller "
            f"{argument('seq_len')}, or use more text"
        )

    splits = window_splits(texts, seq_len, 256 if tokenize is None else len(tokenize), too_few)
    every = [*files, *of_eval]
    return replace(
        splits,
        held_out=eval_path is None,
        notes=[
            *([] if tokenize is None else unknown_tokens(tokenize, str(tokenizer), texts[0])),
            f"{counted(sum(map(len, texts)), 'token')} from {counted(len(every), 'file')}, {path}"
            + (f" and {eval_path}" if eval_path is not None else ""),
        ],
        vocabulary=None if tokenize is None else vocabulary_digest(tokenize),
        digest=digest_of_files(every),
    )


def ids_of(
    files: Iterable[Path], tokenizer: Any | None = None, limit: int | None = None
) -> NDArray[Any]:
    """Returns the first `limit` tokens of the joined files: their bytes without a tokenizer.

    Raises:
        DataError: a file cannot be read, or is not UTF-8 although a tokenizer needs text.
    """
    parts: list[NDArray[Any]] = []
    total = 0
    for path in files:
        if limit is not None and total >= limit:
            break
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                content = file.read()
            if tokenizer is None:
                ids = np.frombuffer(content, dtype=np.uint8)
            else:
                text = io.IncrementalNewlineDecoder(None, True).decode(content.decode("utf-8-sig"))
                tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                ids = np.asarray([*tokens, *end_of_text(tokenizer)], dtype=np.int32)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            # Otherwise this process would have another text than the others.
            raise DataError(f"{path} cannot be read: {error}") from error
        parts.append(ids)
        total += len(ids)
    return np.concatenate(parts)[:limit] if parts else np.zeros(0, dtype=np.uint8)


def check_at_least_1(**values: int | None) -> None:
    """Raises a DataError if a value is a number below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise DataError(f"{setting(name, value)} must be at least 1")


def _files(key: str, path: str | Path, pattern: str) -> Sequence[Path]:
    """Returns the files that match `path`, sorted by path."""
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        files = [file for file in place.rglob(pattern) if file.is_file()]
        problem = (
            f"the folder {place.absolute()} contains no files {pattern}: set {argument('pattern')}"
        )
    else:
        files = [
            Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()
        ]
        problem = f"no such file or folder, and no file matches this pattern in {Path.cwd()}"
    if not files:
        raise DataError(f"{setting(key, path)}: {problem}")
    return sorted(files, key=lambda file: file.as_posix())
