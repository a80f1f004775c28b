"""The manifest of a checkpoint, and its files.

The manifest lists the files of a checkpoint with the size and checksum of each. Files are hashed
while they are written, and verified against the manifest before they are read. Only regular files
count: the target of a link was never saved.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from hybridtrain.errors import CheckpointError

FileWriter = Callable[[BinaryIO], object]
"""Writes the content of one append-only file."""

MANIFEST = "manifest.json"
FORMAT = 2
"""Checkpoints in safetensors and JSON; format 1 used `torch.save`."""

PUBLISHED = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
"""The name of a published checkpoint: its step, and a generation if the step was saved again."""

_PIECE_BYTES = 4 << 20


def check_file_name(name: str) -> None:
    """Checks that `name` is a valid file name in a checkpoint.

    Raises:
        ValueError: the name is hidden, leads outside the checkpoint, or is the manifest's.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name or name == MANIFEST:
        raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")


def verify(path: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Checks that every file in a checkpoint's manifest is unchanged since it was saved.

    Args:
        path: the directory of the checkpoint.
        part: the index of the part to check, if several processes share the work.
        parts: the number of parts, of about equal size in bytes.

    Returns:
        the manifest: `format`, `step`, and `files` by name.

    Raises:
        CheckpointError: names the first file that is missing, truncated, altered or a link.
    """
    manifest = read_manifest(path)
    named = PUBLISHED.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(
            f"{path} is named for step {int(named[1])}, but contains step {manifest['step']}: "
            "restore its original name"
        )
    for name, expected in _part_of(manifest["files"], part, parts).items():
        file = path / name
        try:
            actual = _fingerprint(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        size, crc32 = expected["size"], expected["crc32"]
        if actual["size"] != size:
            raise _other_size(file, actual["size"], size)
        if actual["crc32"] != crc32:
            altered = f"its crc32 is {actual['crc32']}, not {crc32}"
            raise CheckpointError(f"{file} was altered after it was saved: {altered}")
    return manifest


def check_sizes(path: Path) -> dict[str, Any]:
    """Checks that the files of a checkpoint exist and have their saved sizes.

    Returns:
        the manifest, as `verify`, which reads every byte.

    Raises:
        CheckpointError: names the first file that is missing or has a different size.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        try:
            size = (path / name).lstat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path / name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from error
        if size != expected["size"]:
            raise _other_size(path / name, size, expected["size"])
    return manifest


def _other_size(file: Path, size: int, saved: int) -> CheckpointError:
    return CheckpointError(f"{file} has {size:,} bytes instead of the {saved:,} that were saved")


def step_of(path: Path) -> int:
    """Returns the step of the checkpoint at `path`, whatever its directory is called.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    return int(read_manifest(path)["step"])


class HashingFile(io.RawIOBase):
    """An append-only file that computes the size and crc32 of its content.

    crc32 detects every flipped bit and every burst of up to 32 bits, misses other damage once in 4
    billion cases, and takes half the time of sha256. The base class refuses to seek, so a writer
    cannot bypass the hash.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any, /) -> int:
        """Appends `data`, a buffer of bytes; returns its size."""
        view = memoryview(data).cast("B")
        try:
            # in chunks that are still in the CPU cache when they are hashed
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                self._file.write(piece)
                self.crc32 = zlib.crc32(piece, self.crc32)
        except OSError as error:
            # torch.save hides this behind a RuntimeError about file positions
            self.error = error
            raise
        self.size += len(view)
        return len(view)


def write_file(path: Path, write: FileWriter) -> dict[str, Any]:
    """Writes one file, syncs it to disk, and returns its manifest entry."""
    # opened like any other file, so its mode follows the umask
    with open(path, "xb") as file:
        hashing = HashingFile(file)
        try:
            write(cast(BinaryIO, hashing))
        finally:
            if hashing.error is not None:
                raise hashing.error from None
        # To the system first: `fsync` does not know Python's buffer.
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "crc32": f"{hashing.crc32:08x}"}


def render_manifest(content: Mapping[str, Any]) -> bytes:
    """Returns the canonical bytes of a manifest, including a hash of itself."""
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({**content, "crc32": f"{crc32:08x}"}, indent=2) + "\n").encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of the checkpoint at `path`, without checking its files.

    Raises:
        CheckpointError: it is missing, damaged or of an unknown version.
    """
    file = path / MANIFEST
    try:
        with _open_regular(file) as opened:
            raw = opened.read()
    except FileNotFoundError:
        reason = "it has no manifest.json" if path.is_dir() else "the directory does not exist"
        raise CheckpointError(f"{path} is not a checkpoint: {reason}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        content = json.loads(raw)
        # Taken out: it covers the rest, as `render_manifest` computes it.
        found_crc32 = content.pop("crc32")
        version = content["format"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from None
    # compare bytes: the encoding is canonical, so every flipped bit shows
    if render_manifest(content) != raw:
        raise CheckpointError(
            f"{file} was altered after it was saved: its crc32 {found_crc32!r} is wrong"
        )
    if version != FORMAT:
        raise CheckpointError(
            f"{file} has format {version}, but this version of hybridtrain reads format {FORMAT}: "
            f"load it with the version that saved it"
        )
    for name in content["files"]:  # a valid checksum proves nothing: never read other folders
        try:
            check_file_name(name)
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from None
    return cast(dict[str, Any], content)


def _part_of(files: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Returns the files of one of `parts`, distributed largest first."""
    if parts == 1:
        return dict(files)
    bytes_of = [0] * parts
    part_files = {}
    # The same order on all processes, which each compute their part alone.
    for name in sorted(files, key=lambda name: (-int(files[name]["size"]), name)):
        least = bytes_of.index(min(bytes_of))
        bytes_of[least] += int(files[name]["size"])
        if least == part:
            part_files[name] = files[name]
    return part_files


def _fingerprint(path: Path) -> dict[str, Any]:
    """Computes the manifest entry of a file on disk."""
    size = crc32 = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with _open_regular(path) as file:
        while count := file.readinto(buffer):
            size += count
            crc32 = zlib.crc32(buffer[:count], crc32)
    return {"size": size, "crc32": f"{crc32:08x}"}


def _open_regular(path: Path) -> io.FileIO:
    """Opens a regular file for reading.

    Raises:
        CheckpointError: the path is a link, a device, a pipe or a directory.
    """
    # Not `stat`, which would follow a link.
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "symbolic link" if stat.S_ISLNK(mode) else "special file or a directory"
        raise CheckpointError(
            f"{path} is a {kind}, but a checkpoint consists of regular files: copy the file itself"
        )
    return open(path, "rb", buffering=0)
