"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from uuid import uuid4

from hybridtrain.errors import DataError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` at the end, unless an exception is raised."""
    # Not tempfile's, which only its owner may read; and a process id would not tell apart two
    # nodes that share the folder.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave the new name without content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder that replaces `path` at the end, unless an exception is raised.

    A folder that is there is kept, under a hidden name, until the new one has its place, and comes
    back if the new one does not get it.
    """
    temporary, old = (path.with_name(f".{path.name}.{uuid4().hex}") for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        try:
            if path.exists():
                path.replace(old)
            temporary.replace(path)
        except BaseException:  # a Ctrl-C too
            if old.exists() and not path.exists():
                old.replace(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_to_append(path: Path) -> TextIO:
    """Opens a text file of a run to append to it; a link in its place is replaced by a file.

    A run directory may be a stranger's, and its links would lead the lines anywhere.

    Raises:
        OSError: the file cannot be opened, or the folder that it is in is a link.
    """
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, "its folder is a link", str(path.parent))
    for _ in range(2):
        try:
            return open(path, "a", encoding="utf-8", buffering=1, opener=_without_links)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            path.unlink()
    raise OSError(errno.ELOOP, "another process puts a link in its place", str(path))


def _without_links(path: str, flags: int) -> int:
    # without waiting for a reader, if it is a pipe
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path`; text is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_directory(path: Path) -> None:
    """Creates a directory and its parents; they are on disk when this returns."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on disk, which a file's own fsync does not do."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever a damaged or hostile file leads to into one line that names the file.

    Raises:
        DataError: in place of any other error of the block.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} cannot be read ({why}): restore it, or remove it") from error


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; an integer of more than 18 digits becomes a float.

    A file may be a stranger's, and Python's arithmetic ends in an OverflowError where an integer of
    400 digits meets a float.
    """
    return json.loads(text, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file, as `parse_json` does; None: there is no such file.

    Raises:
        DataError: it cannot be read.
    """
    with reading(path):
        try:
            return parse_json(path.read_bytes())
        except FileNotFoundError:
            return None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of a `metrics.jsonl` that may be written at this moment, or not be there.

    See `entries_of`.

    Raises:
        DataError: it is not such a file.
    """
    with reading(path):
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        entries = list(entries_of(lines))
        if not entries and any(line.endswith(b"\n") for line in lines):
            raise ValueError("no line of it has a step")
    yield from entries


def entries_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects with a step among lines, without those that are not complete."""
    for line in lines:
        try:
            entry: Any = parse_json(line)
        except (ValueError, RecursionError):  # the last line, half written, or that of a killed run
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield entry
