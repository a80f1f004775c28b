"""The IMDB reviews: from the archive to the tensors of a batch. What torchtext does is in text.py.

    aclImdb_v1.tar.gz  --unpack-->  aclImdb/{train,test}/{pos,neg}/*.txt
                       --encode-->  imdb-<key>.pt, the token ids, kept for the next run

Both arrows write under another name and rename at the end, so that neither an interrupted run nor
two runs at once leave half a folder or half a file.
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
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
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

_log = logging.getLogger(__name__)

_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
_TIMEOUT_S = 60

_ARCHIVE = "aclImdb_v1.tar.gz"
_FOLDER = "aclImdb"
_HALVES = ("train", "test")
_REVIEW = re.compile(r"(?:\./)?aclImdb/(train|test)/(pos|neg)/([^/]+\.txt)")

# To be raised when the same settings and files would give other ids.
_CACHE_FORMAT = 1


def imdb(
    root: str | Path = "data",
    download: bool = False,
    tokenizer: str = "basic_english",
    max_len: int = 256,
    max_vocab: int | None = 20_000,
    min_freq: int = 2,
) -> DataSplits:
    """The 50,000 film reviews of the Large Movie Review Dataset, positive or negative.

    `root` is the folder that holds `aclImdb/` or the archive `aclImdb_v1.tar.gz`, which is then
    unpacked (the labelled reviews only). With `download` the archive (84 MB) is fetched if
    neither is there. `tokenizer` is one of torchtext's or a function's path (see
    `text.tokenizer_named`); a review is cut after `max_len` tokens; the vocabulary is that of the
    training half, `max_vocab` tokens (None: all) that occur at least `min_freq` times, and two
    special ones.

    Items are `((tokens, mask), label)`: int64 of shape (max_len,), bool of shape (max_len,) that
    is True where there is padding, and int64, 0 for negative and 1 for positive. Every review has
    at least one token. The order is the same on every machine.

    Tokenising takes many seconds, so the ids are kept in `root` under a name that is a digest of
    all they depend on. A read-only `root` works: nothing is kept then.

    Facts: `num_classes` 2, `vocab_size`, `max_len`, `pad_index`.

    Source: A. Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011. Raises
    `DataError` if the data is missing, cannot be fetched or is damaged, if the tokenizer cannot
    be found, or if torchtext is not installed.
    """
    for name, value in (("max_len", max_len), ("max_vocab", max_vocab), ("min_freq", min_freq)):
        if value is not None and value < 1:
            raise DataError(f"data.{name} must be at least 1, not {value}")
    root = Path(root)
    if download and not (root / _FOLDER).is_dir() and not (root / _ARCHIVE).is_file():
        _fetch(root / _ARCHIVE)

    tokenize = tokenizer_named(tokenizer)
    with _unpacked(root) as folder:
        settings = [tokenizer, tokenizer_version(tokenize), max_len, max_vocab, min_freq]
        key = json.dumps([_CACHE_FORMAT, *settings, _survey(folder)])
        cache = root / f"imdb-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
        encoded = _load(cache)
        if encoded is None:
            _log.info("tokenising the reviews in %s (once: the result is kept)", folder)
            encoded = encode_reviews(folder, tokenize, max_len, max_vocab, min_freq)
            _save(encoded, cache)

    return DataSplits(
        train=_rows(encoded.train),
        eval=_rows(encoded.test),
        collate=already_batched,
        facts={
            "num_classes": len(LABELS),
            "vocab_size": encoded.vocab_size,
            "max_len": max_len,
            "pad_index": encoded.pad_index,
        },
    )


def tokens_and_mask(stored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids (N, L) and lengths (N,) as kept, to int64 ids and the mask (N, L), True at padding.

    The mask comes from the lengths, not from the ids: a review may well contain "<pad>".
    """
    tokens, lengths = stored
    return tokens.long(), torch.arange(tokens.shape[1]) >= lengths.unsqueeze(1)


def _rows(reviews: EncodedReviews) -> InMemoryDataset:
    return InMemoryDataset(
        (reviews.tokens, reviews.lengths), reviews.labels, prepare=tokens_and_mask
    )


# From the network to the folder ------------------------------------------------------------------


def _fetch(archive: Path) -> None:
    _log.info("fetching %s into %s", _URL, archive.parent)
    digest = hashlib.md5(usedforsecurity=False)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with _published(archive) as file, urlopen(_URL, timeout=_TIMEOUT_S) as response:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != _MD5:
                raise DataError(
                    f"IMDB: what came from {_URL} is not the archive (its MD5 is "
                    f"{digest.hexdigest()}, not {_MD5}): cut short on the way, or replaced. "
                    f"Nothing was kept; try again. {_by_hand(archive.parent)}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"IMDB: {_URL} could not be fetched into {archive.parent.absolute()}: {error}\n"
            + _by_hand(archive.parent)
        ) from error


@contextmanager
def _unpacked(root: Path) -> Iterator[Path]:
    """The folder `aclImdb`, unpacked into `root` if need be (elsewhere if that is read-only)."""
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
        for half, label, name, content in _reviews(archive):
            place = unpacked / half / label
            place.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        if not unpacked.is_dir():
            raise DataError(_broken(archive, f"it holds no {_FOLDER}/train/pos/*.txt"))
        if keep:
            try:
                unpacked.rename(folder)
            except OSError:
                # Another process was quicker, which is as good.
                if not folder.is_dir():
                    raise
        yield folder if keep else unpacked


def _reviews(archive: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Half, label, file name and content of every labelled review in the archive.

    Regular files with one of the expected names, and nothing else: so the archive cannot say where
    to write or make a link, and the 50,000 reviews without a label cost no time.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                expected = _REVIEW.fullmatch(member.name)
                content = tar.extractfile(member) if expected and member.isfile() else None
                if expected and content:
                    half, label, name = expected.groups()
                    yield half, label, name, content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(_broken(archive, str(error))) from error


def _survey(folder: Path) -> list[tuple[int, int]]:
    """How many files there are in each of the four folders, and their bytes in all."""
    found = []
    for half in _HALVES:
        for label in LABELS:
            place = folder / half / label
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
        "or name another folder with data.root"
    )


def _broken(archive: Path, found: str) -> str:
    return (
        f"IMDB: {archive.absolute()} is not the archive, or damaged ({found}). Delete it and fetch "
        f"it again: {_command(archive.parent)}"
    )


# What is kept ------------------------------------------------------------------------------------


def _load(cache: Path) -> EncodedSet | None:
    """The ids kept in this file, or None if there is no such file or it is no good."""
    try:
        kept = torch.load(cache, weights_only=True)
        halves = {half: EncodedReviews(**kept[half]) for half in _HALVES}
        return EncodedSet(**halves, vocab_size=kept["vocab_size"], pad_index=kept["pad_index"])
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        # It can be made again, so a damaged one is no reason to stop.
        _log.warning("%s cannot be used (%s): tokenising again", cache, error)
        return None


def _save(encoded: EncodedSet, cache: Path) -> None:
    try:
        with _published(cache) as file:
            torch.save(dataclasses.asdict(encoded), file)
    except OSError as error:
        _log.warning("the token ids are not kept for the next run: %s", error)


@contextmanager
def _published(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete, and is gone if that never happens."""
    # Not tempfile's own, which nobody but its owner may read: a data folder is often shared.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open("xb") as file:
            yield file
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
