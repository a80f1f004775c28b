"""The IMDB reviews, from the archive to the tensors of a batch. text.py tokenises them.

    aclImdb_v1.tar.gz  --unpack-->  aclImdb/{train,test}/{pos,neg}/*.txt
                       --encode-->  imdb-<key>.pt, the token ids, kept for the next run

Both arrows write under a temporary name and rename at the end, so that neither an interrupted run
nor two runs at a time leave a partial folder or file.
"""

import gzip
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from torch import Tensor

from hybridtrain.data.splits import DataSplits, InMemoryDataset
from hybridtrain.data.text import LABELS, encode_reviews, tokenizer_named, tokenizer_version
from hybridtrain.errors import DataError
from hybridtrain.files import atomic_file

_log = logging.getLogger(__name__)

_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
_TIMEOUT_S = 60

_ARCHIVE = "aclImdb_v1.tar.gz"
_FOLDER = "aclImdb"
_REVIEW = re.compile(r"(?:\./)?aclImdb/(train|test)/(pos|neg)/[^/]+\.txt")

# Raise it when the same settings and files would give other ids.
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
        train=InMemoryDataset(**encoded["train"], prepare=with_mask),
        eval=InMemoryDataset(**encoded["test"], prepare=with_mask),
        metadata={"num_classes": len(LABELS), "max_len": max_len, **encoded["vocabulary"]},
    )


def with_mask(stored: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Any, Tensor]:
    """Returns int64 ids and the mask (N, L), True at padding, of stored ids and lengths (N,).

    The mask comes from the lengths, not from the ids: a review may contain "<pad>".
    """
    tokens, lengths = stored
    return (tokens.long(), torch.arange(tokens.shape[1]) >= lengths.unsqueeze(1)), labels


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
                    f"was kept; try again.\n{_remedy(archive.parent)}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"IMDB: {_URL} could not be fetched into {archive.parent.absolute()}: {error}\n"
            f"{_remedy(archive.parent)}"
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
    """Writes every labelled review in the archive into `place`.

    Only regular files with an expected name are read, so that the archive cannot choose where to
    write or make a link, and the 50,000 unlabelled reviews take no time.
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
            f"IMDB: {archive.absolute()} is not the archive, or damaged ({damage}). Delete it.\n"
            f"{_remedy(archive.parent)}"
        )


def _file_counts(folder: Path) -> list[tuple[int, int]]:
    """Returns the number of files, and their bytes, of each of the four folders."""
    found = []
    for place in (folder / split / label for split in ("train", "test") for label in LABELS):
        sizes = [path.stat().st_size for path in place.glob("*.txt")]
        if not sizes:
            state = "is empty" if place.is_dir() else "is not there"
            raise DataError(
                f"IMDB: {place.absolute()} should hold reviews as .txt files, but it {state}. "
                f"Delete {folder} and unpack {_ARCHIVE} again.\n{_remedy(folder.parent)}"
            )
        found.append((len(sizes), sum(sizes)))
    return found


def _remedy(root: Path) -> str:
    return (
        f"Fetch it with: hybridtrain recipe=imdb_transformer data.download=true data.root={root}\n"
        f"Or by hand: put {_ARCHIVE} (from {_URL}) into {root.absolute()}, "
        "or name another folder with root="
    )


# Cache of token ids


def _load(cache: Path) -> dict[str, Any] | None:
    """Returns the ids kept in this file, or None if it is missing or damaged."""
    try:
        kept: dict[str, Any] = torch.load(cache, weights_only=True)
        return kept
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        # Not an error: the ids can be made again.
        _log.warning("%s cannot be used (%s): tokenising again", cache, error)
        return None


def _save(encoded: dict[str, Any], cache: Path) -> None:
    try:
        with atomic_file(cache) as file:
            torch.save(encoded, file)
    except OSError as error:
        _log.warning("the token ids are not kept for the next run: %s", error)
