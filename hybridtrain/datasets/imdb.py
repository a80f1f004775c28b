"""The IMDB reviews, from the archive to the tensors of a batch.

    aclImdb_v1.tar.gz  --unpack-->  aclImdb/{train,test}/{pos,neg}/*.txt
                       --encode-->  imdb-<key>.pt, the token ids, cached for the next run

Both steps write under a temporary name and rename at the end, so neither an interrupted run nor two
simultaneous runs leave a partial folder or file.

torchtext 0.6.0 tokenizes; it is the last release in pure Python, which works with today's torch.
Its tokenizers, its reader of the aclImdb folder, its vocabulary and its padding are used unchanged.
This module adds a fixed order, a memory limit, and the name of a file that cannot be read.
"""

import functools
import gzip
import hashlib
import http.client
import inspect
import json
import logging
import os
import pickle
import pkgutil
import re
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from torch import Tensor

from hybridtrain._base.files import atomic_file
from hybridtrain.data import DataSplits, InMemoryDataset
from hybridtrain.errors import DataError, argument, setting

_log = logging.getLogger(__name__)

_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
_TIMEOUT_S = 60

_ARCHIVE = "aclImdb_v1.tar.gz"
_FOLDER = "aclImdb"
_REVIEW = re.compile(r"(?:\./)?aclImdb/(train|test)/(pos|neg)/[^/]+\.txt")

_LABELS = {"neg": 0, "pos": 1}
_UNKNOWN = "<unk>"

# Reviews per conversion to a tensor: nested lists of Python numbers take eight times its memory.
_REVIEWS_AT_A_TIME = 1000

Tokenizer = Callable[[str], list[str]]

# Increment it if the same settings and files would yield different ids.
_CACHE_FORMAT = 2


def imdb(
    root: str | Path = "data",
    download: bool = False,
    tokenizer: str = "basic_english",
    max_len: int = 256,
    max_vocab: int | None = 20_000,
    min_freq: int = 2,
) -> DataSplits:
    """Returns the 50,000 film reviews of the Large Movie Review Dataset, positive or negative.

    Items are `((tokens, mask), label)`: int64 of shape (max_len,), bool of shape (max_len,) that is
    True at padding, and int64, 0 for negative and 1 for positive. Every review has at least one
    token. The order is the same on every machine.

    Tokenizing takes many seconds, so the ids are cached in `root`, under a name that is a digest of
    everything they depend on. A read-only `root` has no cache.

    Metadata: `num_classes` 2, `vocab_size`, `max_len`, `pad_index`.

    Source: A. Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011.

    Args:
        root: the folder that contains `aclImdb/`, or the archive `aclImdb_v1.tar.gz`, from which
            the labeled reviews are unpacked.
        download: download the archive (84 MB) if neither exists.
        tokenizer: the name of a torchtext tokenizer, or the path of a function,
            `package.module:function`.
        max_len: the maximum number of tokens of a review.
        max_vocab: the maximum vocabulary size, without two special tokens; None: no limit.
        min_freq: the minimum number of occurrences of a vocabulary token in the training split.

    Raises:
        DataError: the data is missing or damaged, the download fails, the tokenizer is not found,
            torchtext is not installed, or an argument is not positive.
    """
    for name, value in (("max_len", max_len), ("max_vocab", max_vocab), ("min_freq", min_freq)):
        if value is not None and value < 1:
            raise DataError(f"{setting(name, value)} must be at least 1")
    root = Path(root)
    if download and not (root / _FOLDER).is_dir() and not (root / _ARCHIVE).is_file():
        _fetch(root / _ARCHIVE)

    tokenize = _tokenizer_named(tokenizer)
    with _unpacked(root) as folder:
        settings = [tokenizer, _tokenizer_version(tokenize), max_len, max_vocab, min_freq]
        key = json.dumps([_CACHE_FORMAT, *settings, _file_counts(folder)])
        cache = root / f"imdb-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
        encoded = _load(cache)
        if encoded is None:
            _log.info("tokenizing the reviews in %s; later runs reuse the result", folder)
            encoded = encode_reviews(folder, tokenize, max_len, max_vocab, min_freq)
            _save(encoded, cache)

    return DataSplits(
        train=InMemoryDataset(**encoded["train"], prepare=with_mask),
        eval=InMemoryDataset(**encoded["test"], prepare=with_mask),
        metadata={
            "num_classes": len(_LABELS),
            "classes": [*_LABELS],
            "max_len": max_len,
            **encoded["vocabulary"],
        },
    )


def with_mask(stored: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Any, Tensor]:
    """Returns int64 ids and the mask (N, L), True at padding, from stored ids and lengths (N,).

    The mask is computed from the lengths, not from the ids: a review may contain "<pad>".
    """
    tokens, lengths = stored
    return (tokens.long(), torch.arange(tokens.shape[1]) >= lengths.unsqueeze(1)), labels


# Download and unpack


def _fetch(archive: Path) -> None:
    _log.info("downloading %s to %s", _URL, archive.parent)
    digest = hashlib.md5(usedforsecurity=False)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(archive) as file, urlopen(_URL, timeout=_TIMEOUT_S) as response:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != _MD5:
                raise DataError(
                    f"IMDB: {_URL} did not send the archive (MD5 {digest.hexdigest()} instead of "
                    f"{_MD5}): the transfer was interrupted, or the file has been replaced. "
                    f"Nothing was saved; try again.\n{_remedy(archive.parent)}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"IMDB: could not download {_URL} to {archive.parent.absolute()}: {error}\n"
            f"{_remedy(archive.parent)}"
        ) from error


@contextmanager
def _unpacked(root: Path) -> Iterator[Path]:
    """Yields the folder `aclImdb`, unpacked into `root`, or elsewhere if `root` is read-only."""
    folder, archive = root / _FOLDER, root / _ARCHIVE
    if folder.is_dir():
        yield folder
        return
    if not archive.is_file():
        raise DataError(
            f"IMDB: looked in {root.absolute()} for the folder {_FOLDER} and the archive "
            f"{_ARCHIVE}, and found neither.\n{_remedy(root)}"
        )
    place = root if os.access(root, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=place) as scratch:
        _log.info("unpacking %s", archive)
        _unpack(archive, Path(scratch))
        if place is not None:
            with suppress(OSError):  # another process may have unpacked the same archive first
                (Path(scratch) / _FOLDER).rename(folder)
        yield folder if folder.is_dir() else Path(scratch) / _FOLDER


def _unpack(archive: Path, place: Path) -> None:
    """Writes every labeled review in the archive to `place`.

    It reads only regular files with an expected name, so the archive cannot choose where to write
    or create a link, and the 50,000 unlabeled reviews take no time.
    """
    damage = f"it has no {_FOLDER}/train/pos/*.txt"
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                expected = member.isfile() and _REVIEW.fullmatch(member.name)
                if expected and (content := tar.extractfile(member)):
                    target = place / member.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content.read())
                    damage = ""
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        damage = str(error)
    if damage:
        raise DataError(
            f"IMDB: {archive.absolute()} is damaged or another file ({damage}). Delete it.\n"
            f"{_remedy(archive.parent)}"
        )


def _file_counts(folder: Path) -> list[tuple[int, int]]:
    """Returns the number of files and their total bytes for each of the four folders."""
    counts = []
    for place in (folder / split / label for split in ("train", "test") for label in _LABELS):
        sizes = [path.stat().st_size for path in place.glob("*.txt")]
        if not sizes:
            state = "is empty" if place.is_dir() else "does not exist"
            raise DataError(
                f"IMDB: {place.absolute()} must contain reviews as .txt files, but it {state}. "
                f"Delete {folder} and unpack {_ARCHIVE} again.\n{_remedy(folder.parent)}"
            )
        counts.append((len(sizes), sum(sizes)))
    return counts


def _remedy(root: Path) -> str:
    return (
        f"Download it with: hybridtrain recipe=imdb_transformer data.download=true "
        f"data.root={root}\nOr manually: put {_ARCHIVE} (from {_URL}) into {root.absolute()}, or "
        f"set another folder with {argument('root')}"
    )


# Cache of token ids


def _load(cache: Path) -> dict[str, Any] | None:
    """Returns the ids cached in this file, or None if it is missing or damaged."""
    try:
        cached: dict[str, Any] = torch.load(cache, weights_only=True)
        return cached
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        # Not an error: the ids can be recreated.
        _log.warning("cannot use %s (%s): tokenizing again", cache, error)
        return None


def _save(encoded: dict[str, Any], cache: Path) -> None:
    try:
        with atomic_file(cache) as file:
            torch.save(encoded, file)
    except OSError as error:
        _log.warning("could not cache the token ids for the next run: %s", error)


# Tokens


def _tokenizer_named(name: str) -> Tokenizer:
    """Returns the tokenizer called `name`, a function from a text to a list of tokens.

    A name with a dot or a colon is any importable function: `package.module:function` or
    `package.module.function`. Other names are torchtext's: `basic_english`, `spacy`, `moses`,
    `toktok`, `revtok`, `subword` (all but the first need another package).

    Raises:
        DataError: it is not found, or does not convert a sentence to a list of strings.
    """
    tokenize = _imported(name) if "." in name or ":" in name else _from_torchtext(name)
    tokens = tokenize("Once more, with feeling.")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise DataError(
            f"{setting('tokenizer', name)} must convert a string to a list of strings, but "
            f"returned {tokens!r}"
        )
    return tokenize


def _tokenizer_version(tokenize: Tokenizer) -> str:
    """Returns a digest of the file that defines the tokenizer, or "" if there is no such file.

    It is part of the cache key of the token ids, so that an edited tokenizer creates new ones.
    """
    try:
        source = inspect.getsourcefile(tokenize)
    except TypeError:  # a partial, or an object with __call__
        return ""
    if source is None or not Path(source).is_file():
        return ""
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


def encode_reviews(
    folder: Path, tokenize: Tokenizer, max_len: int, max_vocab: int | None, min_freq: int
) -> dict[str, Any]:
    """Reads `folder`/{train,test}/{pos,neg}/*.txt and converts the tokens to ids.

    Returns the splits `train` and `test`, each with `inputs`, the token ids (N, max_len) and the
    lengths (N,) in int32, and `targets`, the labels (N,) in int64; and the `vocabulary` with
    `vocab_size` and `pad_index`. Review i has `lengths[i]` ids, at least one, and then padding.

    Reviews are truncated to `max_len` tokens. The vocabulary comes from the truncated training
    split, by falling frequency (then alphabetically): at most `max_vocab` tokens (None: all) that
    occur at least `min_freq` times, after `<unk>` (0) and `<pad>` (1).

    Raises:
        DataError: a file is not UTF-8, or torchtext 0.6.0 is not installed.
    """
    torchtext = _torchtext()
    text = torchtext.data.Field(
        tokenize=tokenize,
        preprocessing=functools.partial(_cut, max_len=max_len),
        fix_length=max_len,
        include_lengths=True,
        batch_first=True,
        unk_token=_UNKNOWN,
        dtype=torch.int32,
    )
    label = torchtext.data.Field(
        sequential=False, use_vocab=False, preprocessing=_LABELS.__getitem__
    )
    try:
        # With a path given, splits() reads the folder and downloads nothing.
        splits = torchtext.datasets.IMDB.splits(text, label, path=str(folder))
    except UnicodeDecodeError as error:
        raise DataError(
            f"IMDB: {_not_utf8(folder)} is not UTF-8 text ({error}). "
            f"Delete {folder} and unpack the archive again"
        ) from error
    for split in splits:
        # torchtext lists a folder in the file system's order, which differs between machines.
        # Sorting the reviews by their text gives the same order everywhere.
        split.examples.sort(key=lambda review: (review.label, review.text))
    train, test = splits
    text.build_vocab(train, max_size=max_vocab, min_freq=min_freq)
    padding = text.vocab.stoi[text.pad_token]
    return {
        "train": _encoded(train.examples, text, label),
        "test": _encoded(test.examples, text, label),
        "vocabulary": {"vocab_size": len(text.vocab), "pad_index": padding},
    }


def _cut(tokens: list[str], max_len: int) -> list[str]:
    # A review without tokens would be padding only, and its attention a softmax over nothing.
    # Interning makes the same word in 50,000 reviews a single object.
    return [sys.intern(token) for token in tokens[:max_len]] or [_UNKNOWN]


def _encoded(reviews: list[Any], text: Any, label: Any) -> dict[str, Any]:
    parts = []
    for start in range(0, len(reviews), _REVIEWS_AT_A_TIME):
        batch = reviews[start : start + _REVIEWS_AT_A_TIME]
        labels = label.process([review.label for review in batch])
        parts.append((*text.process([review.text for review in batch]), labels))
    tokens, lengths, labels = map(torch.cat, zip(*parts, strict=True))
    return {"inputs": (tokens, lengths), "targets": labels}


def _not_utf8(folder: Path) -> Path:
    # The exception names the byte but not the file.
    for path in sorted(folder.glob("*/*/*.txt")):
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            return path
    return folder


def _from_torchtext(name: str) -> Tokenizer:
    try:
        return _torchtext().data.get_tokenizer(name)  # type: ignore[no-any-return]
    except (ValueError, ImportError, OSError, LookupError) as error:
        raise DataError(
            f"{setting('tokenizer', name)}: {error}. torchtext's tokenizers are basic_english, "
            "spacy, moses, toktok, revtok and subword; for any other function, set its path, "
            "package.module:function"
        ) from error


def _imported(path: str) -> Tokenizer:
    try:
        tokenize = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"{setting('tokenizer', path)} cannot be imported: {error}") from error
    if not callable(tokenize):
        raise DataError(f"{setting('tokenizer', path)} must be a function, not {tokenize!r}")
    return tokenize  # type: ignore[no-any-return]


def _torchtext() -> Any:
    install = 'pip install "hybridtrain[text]"'
    try:
        import torchtext
    except ImportError as error:
        raise DataError(f"this data set needs torchtext ({error}): {install}") from error
    except OSError as error:
        # 0.7 to 0.18 include a library linked against an older torch.
        raise DataError(f"torchtext 0.6.0 is required ({error}): {install}") from error
    if not hasattr(torchtext.data, "Field"):
        raise DataError(
            f"torchtext 0.6.0 is required, but {torchtext.__version__} is installed: {install}"
        )
    return torchtext
