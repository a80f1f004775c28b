"""Files that are complete or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from uuid import uuid4

from hybridtrain.errors import ConfigError, DataError

_MOST_BYTES = 1 << 30  # of a file that is read as a whole; one with a hole takes no place on a disk


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` at the end, unless an exception is raised."""
    # Not `tempfile`, which creates files readable only by the owner. A process ID would not be
    # unique for two nodes that share the folder.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a power failure must not leave the new name without content
        # Atomic within a file system, so the temporary file is in the same folder.
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Creates a temporary folder that replaces `path` at the end, unless an exception is raised.

    An existing folder is kept under a hidden name until it is replaced, and restored if that fails.
    """
    temporary, backup = (path.with_name(f".{path.name}.{uuid4().hex}") for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        try:
            if path.exists():
                # A folder cannot be renamed onto one with files, so there are two renames, and
                # between them no folder.
                path.replace(backup)
            temporary.replace(path)
        except BaseException:  # including Ctrl-C
            if backup.exists() and not path.exists():
                backup.replace(path)
            raise
        shutil.rmtree(backup, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_to_append(path: Path) -> TextIO:
    """Opens a text file of a run for appending; replaces a link in its place by a file.

    A run directory may come from someone else, and a link in it could lead anywhere.

    Raises:
        OSError: the file cannot be opened, or its folder is a link.
    """
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, "its folder is a link", str(path.parent))
    # A second time after the link was removed; a link that is back by then is an attack or another
    # program.
    for _ in range(2):
        try:
            return open(path, "a", encoding="utf-8", buffering=1, opener=_without_links)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            path.unlink()
    raise OSError(errno.ELOOP, "another process replaced it by a link", str(path))


def read_file(path: Path) -> bytes:
    """Returns the content of a file of a run, which may come from someone else.

    Raises:
        OSError: it cannot be read, or is no regular file; reading a pipe or a device may never end.
    """
    with open(path, "rb", opener=_only_regular) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, "larger than 1 GiB", str(path))
        return file.read()


def _without_links(path: str, flags: int) -> int:
    return _only_regular(path, flags | os.O_NOFOLLOW)


def _only_regular(path: str, flags: int) -> int:
    # does not wait for the other end if it is a pipe
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    # Of the open file: the path may lead to another one by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path`; text is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_replaceable(path: Path, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Checks that a file to replace is missing, empty, a link, or one that this library wrote.

    Args:
        path: the file.
        is_ours: returns whether a file begins as this library's do, from its first 4096 bytes.
        what: words for the file, such as "a report".

    Raises:
        ConfigError: it is another file.
    """
    # replacing a link leaves the file that it leads to as it is
    if path.is_symlink() or not path.is_file():
        return
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        head = b"?"  # unreadable, so this library's or not
    if head and not is_ours(head):
        raise ConfigError(
            f"{path} exists and is not {what} of hybridtrain, so it is not replaced: choose "
            f"another file, or remove it"
        )


def make_directory(path: Path) -> None:
    """Creates a directory and its parents, and syncs them to disk."""
    if not path.is_dir():
        make_directory(path.parent)
        # Another process may make it at the same time.
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Syncs the entries of a directory to disk, which fsync of a file does not do."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts any error from a damaged or hostile file to a one-line error that names the file.

    Raises:
        DataError: instead of any other error in the block.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"cannot read {path} ({reason}): restore it, or remove it") from error


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; an integer of 20 or more characters becomes a float.

    A file may come from someone else, and Python raises an OverflowError when it combines an
    integer of 400 digits with a float.
    """
    return json.loads(text, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file by `parse_json`; None if there is no such file.

    Raises:
        DataError: the file cannot be read.
    """
    with reading(path):
        try:
            return parse_json(read_file(path))
        except FileNotFoundError:
            return None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of a `metrics.jsonl`, which may be missing or still being written.

    Raises:
        DataError: the file has no complete line with a step.
    """
    with reading(path):
        try:
            lines = read_file(path).splitlines(keepends=True)
        except FileNotFoundError:
            return
        entries = list(entries_of(lines))
        if not entries and any(line.endswith(b"\n") for line in lines):
            raise ValueError("no line has a step")
    yield from entries


def entries_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects that have a step, skipping incomplete lines."""
    for line in lines:
        try:
            entry: Any = parse_json(line)
        except (ValueError, RecursionError):  # a partially written line
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield entry
