"""Reviews as token ids, through torchtext. The one module that imports it.

torchtext 0.6.0 is the last release in pure Python and works with today's torch. Its tokenizers,
its reader of the aclImdb folder, its vocabulary and its padding are used unchanged. Added here: a
fixed order, a bound on memory, and the name of a file that cannot be read.
"""

import functools
import hashlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridtrain.errors import DataError

Tokenizer = Callable[[str], list[str]]

LABELS = {"neg": 0, "pos": 1}

_UNKNOWN = "<unk>"

# Reviews made into a tensor at a time: nested lists of Python numbers take eight times its memory.
_REVIEWS_AT_A_TIME = 1000


def tokenizer_named(name: str) -> Tokenizer:
    """Returns the tokenizer called `name`, a function from a text to a list of tokens.

    A name with a dot or a colon is any function that can be imported: `package.module:function`
    or `package.module.function`. Any other is one of torchtext's: `basic_english`, `spacy`,
    `moses`, `toktok`, `revtok`, `subword` (all but the first need a further package).

    Raises:
        DataError: it cannot be found, or does not turn a sentence into a list of strings.
    """
    tokenize = _imported(name) if "." in name or ":" in name else _from_torchtext(name)
    tokens = tokenize("Once more, with feeling.")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise DataError(
            f"tokenizer={name} must turn a string into a list of strings, "
            f"but it returned {tokens!r}"
        )
    return tokenize


def tokenizer_version(tokenize: Tokenizer) -> str:
    """Returns a digest of the file that defines the tokenizer, or "" where there is no such file.

    It is part of the cache key of the token ids, so that an edited tokenizer makes new ones.
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
    """Reads `folder`/{train,test}/{pos,neg}/*.txt and numbers the tokens.

    Returns the splits `train` and `test`, each with `inputs`, the token ids (N, max_len) and the
    lengths (N,) in int32, and `targets`, the labels (N,) in int64; and the `vocabulary` with
    `vocab_size` and `pad_index`. Review i has `lengths[i]` ids, at least one, and then padding.

    A review is cut after `max_len` tokens. The vocabulary is that of the training split as cut,
    by falling frequency (then by alphabet): at most `max_vocab` tokens (None: all of them) that
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
        sequential=False, use_vocab=False, preprocessing=LABELS.__getitem__
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
        # Sorted by their text, the reviews have one order everywhere.
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
    # A review without a token would be all padding, and its attention a softmax over nothing.
    # Interning makes the same word in 50,000 reviews one object.
    return [sys.intern(token) for token in tokens[:max_len]] or [_UNKNOWN]


def _encoded(reviews: list[Any], text: Any, label: Any) -> dict[str, Any]:
    parts = []
    for start in range(0, len(reviews), _REVIEWS_AT_A_TIME):
        some = reviews[start : start + _REVIEWS_AT_A_TIME]
        labels = label.process([review.label for review in some])
        parts.append((*text.process([review.text for review in some]), labels))
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
            f"tokenizer={name}: {error}. The names of torchtext are basic_english, spacy, "
            "moses, toktok, revtok and subword; any other function is named by its path, "
            "package.module:function"
        ) from error


def _imported(path: str) -> Tokenizer:
    try:
        tokenize = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"tokenizer={path} cannot be imported: {error}") from error
    if not callable(tokenize):
        raise DataError(f"tokenizer={path} is not a function but {tokenize!r}")
    return tokenize  # type: ignore[no-any-return]


def _torchtext() -> Any:
    install = 'pip install "hybridtrain[text]"'
    try:
        import torchtext
    except ImportError as error:
        raise DataError(f"this data set needs torchtext ({error}): {install}") from error
    except OSError as error:
        # 0.7 to 0.18 have a library that is linked against an older torch.
        raise DataError(f"torchtext is not the release 0.6.0 ({error}): {install}") from error
    if not hasattr(torchtext.data, "Field"):
        raise DataError(
            f"torchtext {torchtext.__version__} is installed, and 0.6.0 is needed: {install}"
        )
    return torchtext
