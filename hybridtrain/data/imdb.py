"""The IMDB reviews, from the archive to the tensors of a batch. text.py tokenises them.

    aclImdb_v1.tar.gz  --unpack-->  aclImdb/{train,test}/{pos,neg}/*.txt
                       --encode-->  imdb-<key>.pt, the token ids, kept for the next run

Both arrows write under a temporary name and rename at the end, so that neither an interrupted run
nor two runs at a time leave a partial folder or file.
"""

import dataclasses
import hashlib
import http.client
import json
import logging
import os
import pickle
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import torch
from torch import Tensor

from hybridtrain.data.splits import DataSplits, InMemoryDataset, already_batched
from hybridtrain.data.text import (
    LABELS,
    EncodedReviews,
    EncodedSet,
    encode_reviews,
    tokenizer_named,
    tokenizer_version,
)
from hybridtrain.errors import DataError
from hybridtrain.files import atomic_file

_log = logging.getLogger(__name__)

_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
_TIMEOUT_S = 60

_ARCHIVE = "aclImdb_v1.tar.gz"
_FOLDER = "aclImdb"
_SPLITS = ("train", "test")
_REVIEW = re.compile(r"(?:\./)?aclImdb/(train|test)/(pos|neg)/([^/]+\.txt)")

# Raise it when the same settings and files would give other ids.
_CACHE_FORMAT = 1


def imdb(
    root: str | Path = "data",
    download: bool = False,
    tokenizer: str = "basic_english",
    max_len: int = 256,
    max_vocab: int | None = 20_000,
    min_freq: int = 2,
) -> DataSplits:
    """Returns the 50,000 film reviews of the Large Movie Review Dataset, positive or negative.

    Items are `((tokens, mask), label)`: int64 of shape (max_len,), bool of shape (max_len,) that
    is True where there is padding, and int64, 0 for negative and 1 for positive. Every review has
    at least one token. The order is the same on every machine.

    Tokenising takes many seconds, so the ids are kept in `root` under a name that is a digest of
    all they depend on. Nothing is kept in a read-only `root`.

    Metadata: `num_classes` 2, `vocab_size`, `max_len`, `pad_index`.

    Source: A. Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011.

    Args:
        root: the folder that holds `aclImdb/`, or the archive `aclImdb_v1.tar.gz`, from which the
            labelled reviews are unpacked.
        download: fetch the archive (84 MB) if neither is there.
        tokenizer: one of torchtext's, or a function's path; see `text.tokenizer_named`.
        max_len: tokens after which a review is cut.
        max_vocab: tokens of the vocabulary beside two special ones; None: all.
        min_freq: least occurrences in the training split of a token in the vocabulary.

    Raises:
        DataError: the data is missing, cannot be fetched or is damaged, the tokenizer cannot be
            found, torchtext is not installed, or an argument is not positive.
    """
    for name, value in (("max_len", max_len), ("max_vocab", max_vocab), ("min_freq", min_freq)):
        if value is not None and value < 1:
            raise DataError(f"{name}={value} must be at least 1")
    root = Path(root)
    if download and not (root / _FOLDER).is_dir() and not (root / _ARCHIVE).is_file():
        _fetch(root / _ARCHIVE)

    tokenize = tokenizer_named(tokenizer)
    with _unpacked(root) as folder:
        settings = [tokenizer, tokenizer_version(tokenize), max_len, max_vocab, min_freq]
        key = json.dumps([_CACHE_FORMAT, *settings, _file_counts(folder)])
        cache = root / f"imdb-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
        encoded = _load(cache)
        if encoded is None:
            _log.info("tokenising the reviews in %s; later runs reuse the result", folder)
            encoded = encode_reviews(folder, tokenize, max_len, max_vocab, min_freq)
            _save(encoded, cache)

    return DataSplits(
        train=_dataset(encoded.train),
        eval=_dataset(encoded.test),
        collate=already_batched,
        metadata={
            "num_classes": len(LABELS),
            "vocab_size": encoded.vocab_size,
            "max_len": max_len,
            "pad_index": encoded.pad_index,
        },
    )


def tokens_and_mask(stored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns int64 ids and the mask (N, L), True at padding, of stored ids and lengths (N,).

    The mask comes from the lengths, not from the ids: a review may contain "<pad>".
    """
    tokens, lengths = stored
    return tokens.long(), torch.arange(tokens.shape[1]) >= lengths.unsqueeze(1)


def _dataset(reviews: EncodedReviews) -> InMemoryDataset:
    return InMemoryDataset(
        (reviews.tokens, reviews.lengths), reviews.labels, prepare=tokens_and_mask
    )


# Fetch and unpack


def _fetch(archive: Path) -> None:
    _log.info("fetching %s into %s", _URL, archive.parent)
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
                    f"{_MD5}): the transfer was cut short, or the file has been replaced. Nothing "
                    f"was kept; try again. {_by_hand(archive.parent)}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"IMDB: {_URL} could not be fetched into {archive.parent.absolute()}: {error}\n"
            + _by_hand(archive.parent)
        ) from error


@contextmanager
def _unpacked(root: Path) -> Iterator[Path]:
    """Yields the folder `aclImdb`, unpacked into `root`, or elsewhere if that is read-only."""
    folder, archive = root / _FOLDER, root / _ARCHIVE
    if folder.is_dir():
        yield folder
        return
    if not archive.is_file():
        raise DataError(
            f"IMDB: looked in {root.absolute()} for the folder {_FOLDER} and the archive "
            f"{_ARCHIVE}, and found neither.\n"
            f"Fetch it with: {_command(root)}\n" + _by_hand(root)
        )
    keep = _writable(root)
    with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=root if keep else None) as scratch:
        unpacked = Path(scratch) / _FOLDER
        _log.info("unpacking %s", archive)
        for split, label, name, content in _reviews(archive):
            target = unpacked / split / label
            target.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
        if not unpacked.is_dir():
            raise DataError(_broken(archive, f"it has no {_FOLDER}/train/pos/*.txt"))
        if keep:
            try:
                unpacked.rename(folder)
            except OSError:
                # Another process may have unpacked the same archive first.
                if not folder.is_dir():
                    raise
        yield folder if keep else unpacked


def _reviews(archive: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Yields split, label, file name and content of every labelled review in the archive.

    Only regular files with an expected name are read, so that the archive cannot choose where to
    write or make a link, and the 50,000 unlabelled reviews take no time.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                expected = _REVIEW.fullmatch(member.name)
                content = tar.extractfile(member) if expected and member.isfile() else None
                if expected and content:
                    split, label, name = expected.groups()
                    yield split, label, name, content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(_broken(archive, str(error))) from error


def _file_counts(folder: Path) -> list[tuple[int, int]]:
    """Returns the number of files, and their bytes, of each of the four folders."""
    found = []
    for split in _SPLITS:
        for label in LABELS:
            place = folder / split / label
            sizes = [path.stat().st_size for path in place.glob("*.txt")]
            if not sizes:
                state = "is empty" if place.is_dir() else "is not there"
                raise DataError(
                    f"IMDB: {place.absolute()} should hold reviews as .txt files, but it {state}. "
                    f"Delete {folder} and unpack {_ARCHIVE} again. {_by_hand(folder.parent)}"
                )
            found.append((len(sizes), sum(sizes)))
    return found


def _command(root: Path) -> str:
    return f"hybridtrain recipe=imdb_transformer data.download=true data.root={root}"


def _by_hand(root: Path) -> str:
    return (
        f"Or by hand: put {_ARCHIVE} (from {_URL}) into {root.absolute()}, "
        "or name another folder with root="
    )


def _broken(archive: Path, found: str) -> str:
    return (
        f"IMDB: {archive.absolute()} is not the archive, or damaged ({found}). Delete it and fetch "
        f"it again: {_command(archive.parent)}"
    )


# Cache of token ids


def _load(cache: Path) -> EncodedSet | None:
    """Returns the ids kept in this file, or None if it is missing or damaged."""
    try:
        kept = torch.load(cache, weights_only=True)
        splits = {split: EncodedReviews(**kept[split]) for split in _SPLITS}
        return EncodedSet(**splits, vocab_size=kept["vocab_size"], pad_index=kept["pad_index"])
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        # Not an error: the ids can be made again.
        _log.warning("%s cannot be used (%s): tokenising again", cache, error)
        return None


def _save(encoded: EncodedSet, cache: Path) -> None:
    try:
        with atomic_file(cache) as file:
            torch.save(dataclasses.asdict(encoded), file)
    except OSError as error:
        _log.warning("the token ids are not kept for the next run: %s", error)


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
