"""Files of samples, read by the library `datasets` without losing or changing a sample.

Python's `csv` reads a table of text (CSV, TSV) once beforehand: it finds errors that a parser would
skip, and knows their lines. Every field is a text; `NA` and `null` are words, and an empty field is
an empty text. In a TSV file, a line is a sample: if quotes would join lines, they are plain
characters. The header shows the separator; columns without a name, such as an index of pandas, are
not read.
"""

from __future__ import annotations

import ast
import codecs
import csv
import glob
import gzip
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, TextIO

from hybridtrain._base.text_table import counted
from hybridtrain.data import HeldOutError, digest_of_files, digest_of_texts
from hybridtrain.datasets.split_names import split_of_file
from hybridtrain.errors import DataError, argument, setting

FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_COMPRESSED = ("csv", "json", "text")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
"""The separators of tables of text, by name."""
# Excel's first line, which names the separator
_OF_EXCEL = re.compile("sep=(.)\r?\n?", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d[\d.\s]*,\d+\s*")
# the lines that a header with line breaks in quotes may have
_HEADER_LINES = 20
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
# two quotes that may be the end of a text and the begin of the next one
_PERHAPS_NO_COMMA = re.compile(r"""["']\s*["']""")
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")


@dataclass(frozen=True)
class Table:
    """The samples of a path, by split.

    Attributes:
        splits: a `datasets.Dataset` for each split, by name.
        files: the files that were read, by split; empty for a name on the Hub.
        notes: formats, paths, and skipped files.
        digest: the digest of the files' names and sizes; None if unknown.
        numbers_are_texts: whether the source is CSV, in which all values are text.
    """

    splits: dict[str, Any]
    files: dict[str, list[Path]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    digest: str | None = None
    numbers_are_texts: bool = False


def read_table(
    key: str,
    path: str,
    name: str | None = None,
    *,
    text: str | None = None,
    separator: str | None = None,
    choose: Callable[[Collection[str]], str] | None = None,
) -> Table:
    """Returns the splits of a file, a pattern of files, a folder or a name on the Hub.

    Args:
        key: the config key of `path`, for messages.
        path: a file, a pattern of files, a folder or a name on the Hub.
        name: the configuration, for a data set on the Hub with several.
        text: the column of the lines of a text file; None: text.
        separator: the separator of CSV and TSV files, or its name; None: guess it from the header.
        choose: returns, of the names of the splits, the one to read; None: read all. The library
            `datasets` reads all of a name on the Hub, and of a folder with a README.md.

    Raises:
        DataError: the data does not exist, is empty, damaged or of an unknown format; the message
            names the file, and the line if possible.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"this data set needs the library datasets ({error}): "
            'pip install "hybridtrain[datasets]"'
        ) from error
    place = Path(path).expanduser()
    files = _files_of(key, path, place)
    if files:
        if choose is not None:
            files = {split: files[split] for split in [choose([*filter(None, files)])]}
        return _read_files(key, path, files, text, _separator(separator))
    try:
        with quiet():
            shown = setting(key, path)
            where = f"{shown}: a file of save_to_disk", "save the data set again"
            _check_inside(place, _saved_files(place), *where)
            if choose is not None and (saved_splits := _saved_splits(place)):
                chosen = choose(saved_splits)
                splits = {chosen: datasets.load_from_disk(str(place / chosen))}
            elif place.is_dir() and any((place / saved_name).is_file() for saved_name in _SAVED):
                loaded = datasets.load_from_disk(str(place))
                one_split = isinstance(loaded, datasets.Dataset)
                splits = {"train": loaded} if one_split else dict(loaded)
            else:
                if place.is_dir():
                    builder = datasets.load_dataset_builder(str(place), name)
                    named = (builder.config.data_files or {}).values()
                    advice = f"set {argument(key)} to that file, or move it into the folder"
                    where = f"{shown}: its README.md", advice
                    _check_inside(place, itertools.chain.from_iterable(named), *where)
                splits = dict(datasets.load_dataset(str(place) if place.exists() else path, name))
    except (DataError, HeldOutError):
        raise
    except Exception as error:  # from many libraries, for many formats
        raise _unreadable(key, path, place.exists(), error) from error
    if choose is not None:
        splits = {split: splits[split] for split in [choose(splits)]}
    return Table(splits, notes=[f"from {path}"])


def _saved_splits(place: Path) -> list[str]:
    """Returns the splits that `save_to_disk` wrote to a folder; [] if it has no splits."""
    try:
        return [*json.loads((place / _SAVED[0]).read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _saved_files(place: Path) -> Iterator[Path]:
    """Yields the files and folders that the files of `save_to_disk` in a folder name."""
    for folder in [place, *(place / split for split in _saved_splits(place))]:
        yield folder
        with suppress(OSError, ValueError, KeyError, TypeError):  # reported by the one who reads it
            state = json.loads((folder / _SAVED[2]).read_text(encoding="utf-8"))
            yield from [folder / file["filename"] for file in state["_data_files"]]


def _check_inside(folder: Path, files: Iterable[str | Path], by: str, advice: str) -> None:
    """Refuses files elsewhere: what a folder says of its files may come from anyone.

    Args:
        folder: the folder.
        files: the files that it names.
        by: what names them, for the message.
        advice: the end of the message.

    Raises:
        DataError: one is outside of the folder.
    """
    inside = os.path.abspath(folder)
    for file in files:
        if not Path(os.path.abspath(file)).is_relative_to(inside):
            raise DataError(f"{by} names {file}, which is outside of the folder: {advice}")


def _unreadable(key: str, path: str, exists: bool, error: Exception) -> DataError:
    import datasets

    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    cache = str(datasets.config.HF_DATASETS_CACHE)
    place = str(getattr(cause, "filename", None) or "")
    if place and (cache.startswith(place) or place.startswith(cache)):
        return DataError(
            f"{setting(key, path)}: the library datasets cannot write its cache in {cache} "
            f"({cause}): set HF_HOME= to a writable folder"
        )
    reason = " ".join(str(cause).split())[:300]
    local = "does not exist locally and cannot be loaded from the Hub"
    problem = "cannot be read" if exists else local
    return DataError(f"{setting(key, path)} {problem} ({type(cause).__name__}: {reason})")


def _suffix(path: PurePath) -> str:
    """Returns the suffix of a file, in lower case, without a suffix for compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] == [".gz"]
    return "".join(suffixes[-2:-1] if compressed else suffixes[-1:])


def _files_of(key: str, path: str, place: Path) -> dict[str, list[Path]]:
    """Returns the files that a path matches, by split; empty if `datasets` must resolve it."""
    formats = f"supported formats are {', '.join(FORMATS)}, also with .gz"
    if place.is_file():
        if _suffix(place) not in FORMATS:
            raise DataError(f"{setting(key, path)}: {formats}; use a file with such a suffix")
        return {"train": [place]}
    if place.is_dir():
        if any((place / name).is_file() for name in (*_SAVED, "README.md")):
            return {}
        paths = [
            file
            for file in sorted(place.rglob("*"))
            if file.is_file()
            and _suffix(file) in FORMATS
            and not any(part.startswith((".", "_")) for part in file.relative_to(place).parts)
        ]
        if not paths:
            raise DataError(
                f"{setting(key, path)}: this folder contains no readable file; {formats}"
            )
        return _by_split(place, paths)
    if any(sign in path for sign in "*?["):
        paths = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
        paths = [file for file in paths if file.is_file()]
        if not paths:
            raise DataError(f"{setting(key, path)}: no file matches this pattern in {Path.cwd()}")
        return {"train": paths}
    if _suffix(place) in FORMATS or path.startswith((".", "/", "~")):
        raise DataError(f"{setting(key, path)}: no such file or folder ({place.absolute()})")
    return {}


def _by_split(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Returns files by the splits in their names; files without split names are one split."""
    table = [file for file in files if _suffix(file) != ".txt"]
    files = table or files  # notes next to a table are not samples
    by_split: dict[str, list[Path]] = {}
    for file in files:
        split = split_of_file(file.relative_to(folder)) or ""
        by_split.setdefault(split, []).append(file)
    if list(by_split) == [""]:
        return {"train": by_split[""]}
    return {split: by_split[split] for split in sorted(by_split)}


def _separator(chosen: str | None) -> str | None:
    """Returns the separator that a key names, or which it is."""
    separator = SEPARATORS.get(chosen or "", chosen)
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise DataError(
            f"{setting('separator', chosen)} must be one character, or {', '.join(SEPARATORS)}"
        )
    return separator


def _read_files(
    key: str, path: str, files: dict[str, list[Path]], text: str | None, separator: str | None
) -> Table:
    import datasets

    left_out = [file.name for file in files.pop("", [])]
    suffixes = {_suffix(file) for paths in files.values() for file in paths}
    kinds = {FORMATS[suffix] for suffix in suffixes}
    if len(kinds) > 1 or len(suffixes & {".csv", ".tsv"}) > 1:  # all files share one separator
        raise DataError(
            f"{setting(key, path)} has files of several formats ({', '.join(sorted(suffixes))}): "
            f"keep one of them, or select files with a pattern such as '*{min(suffixes)}'"
        )
    (kind,) = kinds
    notes = []
    splits = {}
    for split, paths in files.items():
        scans = [_checked(file, kind, separator) for file in paths]
        options: dict[str, Any] = {"encoding": "utf-8-sig"} if kind == "text" else {}
        if kind == "csv":
            first = scans[0]
            header = [name or f"Unnamed: {place}" for place, name in enumerate(first.header)]
            for file, scan in zip(paths, scans, strict=True):
                if (scan.separator, scan.skipped) != (first.separator, first.skipped):
                    raise DataError(
                        f"{file} and {paths[0]} have different separators: read one of them, or "
                        f"set {argument('separator')} if they have the same"
                    )
                if scan.header != first.header:
                    raise DataError(
                        f"{file} has the columns {', '.join(scan.header)}, but {paths[0]} has "
                        f"{', '.join(first.header)}"
                    )
            plain = any(scan.quotes_are_plain for scan in scans)
            options = {
                "sep": first.separator,
                "skiprows": first.skipped,
                "features": datasets.Features({name: datasets.Value("string") for name in header}),
                "keep_default_na": False,
                "na_filter": False,
                "quoting": csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
                "encoding": "utf-8-sig",
            }
            notes += [
                f"{scan.joined} samples of {file.name} have line breaks in quotes, the longest "
                f"from line {scan.longest[0]} to {scan.longest[1]}"
                for file, scan in zip(paths, scans, strict=True)
                if scan.joined
            ]
            if first.separator != _usual_separator(paths[0]):
                notes.append(f"separator {_named_separator(first.separator)}")
            if unnamed := [name for name in header if name not in first.header]:
                notes.append(f"{counted(len(unnamed), 'column')} without a name not read")
        try:
            with quiet():
                loaded = datasets.load_dataset(
                    kind, data_files={split: [str(file) for file in paths]}, **options
                )[split]
            if kind == "csv":
                loaded = loaded.remove_columns(unnamed)
            elif kind == "text" and text is not None:
                loaded = loaded.rename_columns({"text": text})
        except Exception as error:
            if kind == "json":
                _check_json(paths)
            raise _unreadable(key, path, True, error) from error
        expected = sum(scan.samples for scan in scans)
        if kind == "csv" and len(loaded) != expected:
            raise DataError(
                f"{setting(key, path)} has {expected} samples, but {len(loaded)} were read: look "
                "for unclosed quotes"
            )
        splits[split] = loaded
    every = [file for paths in files.values() for file in paths]
    shown = path if len(every) > 3 else ", ".join(str(file) for file in every)
    count = f"{len(every)} files, " if len(every) > 1 else ""
    notes.append(f"{count}{_suffix(every[0])[1:]} from {shown}")
    if left_out:
        notes.append(f"not used: {', '.join(left_out[:8])}")
    # per split, because each may be in another folder
    digest = digest_of_texts(map(digest_of_files, files.values()))
    unique = [*dict.fromkeys(notes)]  # not once per split
    return Table(splits, files, unique, digest, numbers_are_texts=kind == "csv")


@dataclass(frozen=True)
class _Scan:
    """The result of scanning a file."""

    header: list[str] = field(default_factory=list)
    samples: int = 0
    separator: str = ","
    skipped: int = 0
    quotes_are_plain: bool = False
    joined: int = 0
    longest: tuple[int, int] = (0, 0)


def _checked(path: Path, kind: str, separator: str | None) -> _Scan:
    """Scans a file before it is read.

    Raises:
        DataError: the file is empty, or one of its lines is not a sample.
    """
    try:
        with open(path, "rb") as raw:
            head = raw.read(2)
        if not head:
            raise DataError(f"{path} is empty")
        if path.suffix.lower() == ".gz":
            if kind not in _COMPRESSED:
                raise DataError(f"{path}: a {kind} file must not be gzipped; unpack it")
            if head != b"\x1f\x8b":
                raise DataError(f"{path} is not a gzip file: rename it without .gz")
        if kind in ("json", "text"):
            with _opened(path) as file:
                if not any(line.strip() for line in file):
                    raise DataError(f"{path} is empty")
        return _scan_csv(path, separator) if kind == "csv" else _Scan()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        is_compressed, place = path.suffix.lower() == ".gz", shlex.quote(str(path))
        with open(path, "rb") as raw:
            head = (gzip.GzipFile(fileobj=raw) if is_compressed else raw).read(2)
        utf16 = head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        command = f"iconv -f {'UTF-16' if utf16 else 'WINDOWS-1252'} -t UTF-8"
        command = f"gzip -dc {place} | {command}" if is_compressed else f"{command} {place}"
        perhaps = "" if utf16 else ", if it is from Windows or an older Excel"
        raise DataError(
            f"{path} cannot be read: it is not UTF-8 ({error}): convert it, by "
            f"`{command} > new{_suffix(path)}`{perhaps}"
        ) from error


def _check_json(paths: Sequence[Path]) -> None:
    """Raises a DataError with the first position in these files without JSON, or an object."""
    for path in paths:
        with _opened(path) as file:
            lines = file.read().splitlines()
        first = next(line for line in lines if line.strip())
        try:
            json.loads(first)
        except json.JSONDecodeError:  # one value over several lines, in a .json file
            if _suffix(path) == ".json":
                lines = ["\n".join(lines)]
        for number, line in enumerate(lines):
            try:
                value = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number + error.lineno} is not JSON: {error.msg}, at column "
                    f"{error.colno}"
                ) from error
            samples = value if isinstance(value, list) else [value]
            if not all(isinstance(sample, dict) for sample in samples):
                raise DataError(
                    f"{path}, line {number + 1}: a sample must be an object such as "
                    f'{{"text": "a good story"}}, not {line.strip()[:60]}'
                )


def _opened(path: Path) -> TextIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _usual_separator(path: Path) -> str:
    return "\t" if _suffix(path) == ".tsv" else ","


def _named_separator(separator: str) -> str:
    names = {character: name for name, character in SEPARATORS.items()}
    return names.get(separator, repr(separator))


def _guessed_separator(path: Path) -> tuple[str, int]:
    """Returns the separator that divides the header into most columns, and the lines before it.

    The usual separator of the suffix is preferred: alone in a TSV file, else among equals.
    """
    usual = _usual_separator(path)
    with _opened(path) as file:
        first = file.readline()
        if named := _OF_EXCEL.fullmatch(first):
            return named[1], 1
        lines = [first, *itertools.islice(file, _HEADER_LINES)]

    def columns(separator: str) -> int:
        try:
            return len(next(filter(None, csv.reader(lines, delimiter=separator)), []))
        except csv.Error:
            return 0

    if usual == "\t" and columns(usual) > 1:
        return usual, 0
    return max([usual, *SEPARATORS.values()], key=columns), 0


def _scan_csv(path: Path, separator: str | None) -> _Scan:
    guessed, skipped = _guessed_separator(path)
    separator = separator or guessed
    if separator != "\t":
        return _scan(path, separator, csv.QUOTE_MINIMAL, skipped)
    try:
        scan = _scan(path, separator, csv.QUOTE_MINIMAL, skipped)
    except DataError:  # perhaps an unclosed quote
        return _scan(path, separator, csv.QUOTE_NONE, skipped)
    return _scan(path, separator, csv.QUOTE_NONE, skipped) if scan.joined else scan


def _scan(path: Path, separator: str, quoting: Any, skipped: int) -> _Scan:
    header: list[str] | None = None
    samples, joined, longest, last_line = 0, 0, (0, 0), skipped
    csv.field_size_limit(1 << 30)
    with _opened(path) as file:
        for _ in range(skipped):
            file.readline()
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
        try:
            for fields in reader:
                first, last_line = last_line + 1, skipped + reader.line_num
                if not fields:
                    continue
                if header is None:
                    header = fields
                    names = list(filter(None, header))
                    if len({*names}) < len(names):
                        raise DataError(f"{path} has two columns of one name: {', '.join(header)}")
                    continue
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}, line {first}: {len(fields)} fields, but the header has "
                        f"{len(header)} columns ({', '.join(header)}), separated by "
                        f"{_named_separator(separator)}. Quote text that contains the separator "
                        f"or a quote, or set {argument('separator')} if the file has another"
                    )
                samples += 1
                if last_line > first:
                    joined += 1
                    longest = max(longest, (first, last_line), key=lambda pair: pair[1] - pair[0])
        except csv.Error as error:
            raise DataError(
                f"{path}: the sample that begins at line {last_line + 1} has a misplaced quote "
                f"({error}): double the quotes inside a quoted text, and close it"
            ) from error
    if header is None:
        raise DataError(f"{path} is empty")
    if samples == 0:
        raise DataError(f"{path} has a header ({', '.join(header)}), but no samples")
    plain = quoting == csv.QUOTE_NONE
    return _Scan(header, samples, separator, skipped, plain, joined, longest)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the progress bars of the library datasets, and log lines of errors it also
    raises."""
    import datasets

    shown = datasets.utils.are_progress_bars_disabled() is False
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


def as_numbers(values: Sequence[str]) -> list[int] | None:
    """Returns texts as whole numbers if all of them are written as such; else None."""
    texts = all(isinstance(value, str) for value in values)
    return [*map(int, values)] if texts and all(map(_WHOLE_NUMBER.fullmatch, values)) else None


def without_missing(table: Table, columns: Sequence[str]) -> tuple[Table, dict[str, int]]:
    """Returns a table without the samples that lack a value, and how many these are by split.

    A blank text and NaN are no values.

    Args:
        table: the table of samples.
        columns: the columns with a value in each remaining sample; missing ones are skipped.
    """

    def has_value(value: Any) -> bool:
        if isinstance(value, str):
            return bool(value.strip())
        return value is not None and value == value  # not NaN

    splits, left_out = dict(table.splits), {}
    for split, samples in table.splits.items():
        present = [[*samples[column]] for column in columns if column in samples.features]
        complete = [n for n in range(len(samples)) if all(has_value(of[n]) for of in present)]
        left_out[split] = len(samples) - len(complete)
        if left_out[split]:
            splits[split] = samples.select(complete, keep_in_memory=True)
    return replace(table, splits=splits), left_out


def with_lists(table: Table, columns: Sequence[str]) -> Table:
    """Returns a table in which texts such as `["a", "b"]` or `['a', 'b']` are lists.

    CSV has no lists; pandas and other tools write them as text. A column with another text, and a
    missing one, stays as it is.

    Raises:
        DataError: a column mixes texts with other values.
    """
    splits = dict(table.splits)
    for split, samples in table.splits.items():
        for column in columns:
            dtype = str(getattr(samples.features.get(column), "dtype", ""))
            if not dtype.endswith("string"):
                continue
            lists = [_list_in(text) for text in samples[column]]
            if all(value is not None for value in lists):
                kinds = {type(item) for value in lists for item in value or ()}
                if str in kinds and len(kinds) > 1:
                    raise DataError(
                        f"the column {column} of the {split} split has lists of texts and of other "
                        "values: write all of them in quotes"
                    )
                samples = samples.remove_columns([column]).add_column(column, lists)
        splits[split] = samples
    return replace(table, splits=splits)


def _list_in(text: str | None) -> list[Any] | None:
    text = (text or "").strip()
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(value, list | tuple) or _has_no_comma(text):
        return None
    return [*value]


def _has_no_comma(text: str) -> bool:
    """Returns whether two texts follow each other, as in NumPy's `['a' 'b']`: Python joins them."""
    if not _PERHAPS_NO_COMMA.search(text):
        return False
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = [token.type for token in tokens if token.type != tokenize.NL]
    return (tokenize.STRING, tokenize.STRING) in itertools.pairwise(kinds)


def check_complete(
    table: Table,
    columns: Sequence[str],
    key: str,
    blank: bool = True,
    can_drop: bool = False,
) -> None:
    """Checks that each sample has a value in these columns, and that a column has one type.

    Args:
        table: the table of samples.
        columns: the columns to check; missing ones are skipped.
        key: the config key of the columns, for messages.
        blank: whether a blank text counts as a value.
        can_drop: whether the data set has a key `drop_missing`, for the message.

    Raises:
        DataError: a sample has no value or another type; the message names file and sample.
    """
    for split, samples in table.splits.items():
        for column in columns:
            if column not in samples.features:
                continue
            dtype = str(getattr(samples.features[column], "dtype", samples.features[column]))
            mixed = "json" in dtype.lower() or "json" in str(samples.features[column]).lower()
            texts = not blank and not mixed and _has_blank(samples, column)
            if not mixed and not texts and not _missing(samples, column):
                continue
            first: tuple[int, Any] | None = None
            for number, value in enumerate(samples[column]):
                if value is None or (texts and not value.strip()):
                    way_out = f", or set {setting('drop_missing', True)}" if can_drop else ""
                    raise DataError(
                        f"{setting(key, column)}: {_place(table, split, number)} has no value: "
                        f"fill it in, or remove the sample{way_out}"
                    )
                kind = "text" if isinstance(value, str) else type(value).__name__
                kind = "number" if isinstance(value, int | float) else kind
                if first is None:
                    first = number, kind
                elif kind != first[1]:
                    raise DataError(
                        f"{setting(key, column)} mixes texts and numbers: "
                        f"{_place(table, split, first[0])} has a {first[1]}, but "
                        f"{_place(table, split, number)} has the {kind} {value!r}"
                    )


def check_finite(table: Table, columns: Sequence[str], key: str) -> None:
    """Checks that each sample has a number in these columns (as text in CSV).

    Raises:
        DataError: a sample does not; the message names the file and the sample.
    """
    for split, samples in table.splits.items():
        for column in columns:
            dtype = str(getattr(samples.features.get(column), "dtype", "none"))
            if dtype.startswith(("int", "uint", "none")):
                continue
            for number, value in enumerate(samples[column]):
                try:
                    finite = math.isfinite(float(value))
                except ValueError:
                    finite = False
                if not finite:
                    comma = isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value)
                    hint = ": write numbers with a decimal point, such as 1234.5" if comma else ""
                    if isinstance(value, float) and math.isnan(value):
                        hint = f": fill it in, or set {setting('drop_missing', True)}"
                    raise DataError(
                        f"{setting(key, column)}: {_place(table, split, number)} has {value!r}, "
                        f"which is not a finite number{hint}"
                    )


def _has_blank(samples: Any, column: str) -> bool:
    """Returns True if a column contains a text without visible characters."""
    if not str(getattr(samples.features[column], "dtype", "")).endswith("string"):
        return False
    with quiet():
        return any(not (value or "").strip() for value in samples.unique(column))


def _missing(samples: Any, column: str) -> bool:
    try:
        return bool(samples.data.column(column).null_count)
    except (AttributeError, KeyError):
        return True  # the caller checks them one by one


def _place(table: Table, split: str, number: int) -> str:
    files = table.files.get(split, [])
    origin = f" of {files[0]}" if len(files) == 1 else f" of the {split} split"
    return f"sample {number + 1}{origin}"
