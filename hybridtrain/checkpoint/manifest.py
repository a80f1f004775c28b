"""The manifest of a checkpoint, and its files.

The manifest says which files a checkpoint has, and the size and checksum of each. Files are hashed
while they are written, and compared with the manifest before they are read. Only regular files
count: whatever a link points to was not saved.
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
"""Writes the content of one file, which can only be appended to."""

MANIFEST = "manifest.json"
FORMAT = 2
"""Of checkpoints in safetensors and JSON; 1 had files of `torch.save`."""

PUBLISHED = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
"""The name of a published checkpoint: its step, and the generation of a step saved again."""

_PIECE_BYTES = 4 << 20


def check_file_name(name: str) -> None:
    """Checks that `name` can be the name of a file in a checkpoint.

    Raises:
        ValueError: it would be hidden, outside of the checkpoint, or its manifest.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name or name == MANIFEST:
        raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")


def verify(path: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Checks that every file in the manifest of a checkpoint equals what was saved.

    Args:
        path: its directory.
        part: which part of the files is checked, of several processes that do it together.
        parts: how many parts there are, of about as many bytes each.

    Returns:
        the manifest: `format`, `step`, and `files` by name.

    Raises:
        CheckpointError: names the first file that is missing, cut short, altered or a link.
    """
    manifest = read_manifest(path)
    named = PUBLISHED.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(
            f"{path} is named for step {int(named[1])} but holds step {manifest['step']}: "
            "rename it back"
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
    """Checks that the files of a checkpoint are there, and as large as they were saved.

    Returns:
        the manifest, see `verify`, which reads every byte.

    Raises:
        CheckpointError: names the first file that is missing or has another size.
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
    return CheckpointError(f"{file} has {size:,} bytes; {saved:,} were saved")


def step_of(path: Path) -> int:
    """Returns the step of the checkpoint at `path`, whatever the name of its directory.

    Raises:
        CheckpointError: there is no intact manifest.
    """
    return int(read_manifest(path)["step"])


class HashingFile(io.RawIOBase):
    """An append-only file that computes the size and the crc32 of what is written.

    crc32 detects every flipped bit and every burst of up to 32 bits, misses other damage once in 4
    billion, and takes half the time of sha256. The base class refuses to seek, so no writer can
    bypass the hash.
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
            # in pieces that are still in the processor's cache when they are hashed
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                self._file.write(piece)
                self.crc32 = zlib.crc32(piece, self.crc32)
        except OSError as error:
            # torch.save turns this into a RuntimeError about file positions
            self.error = error
            raise
        self.size += len(view)
        return len(view)


def write_file(path: Path, write: FileWriter) -> dict[str, Any]:
    """Writes one file and waits until it is on disk; returns its entry in the manifest."""
    # opened like any other file, so that its mode follows the umask
    with open(path, "xb") as file:
        hashing = HashingFile(file)
        try:
            write(cast(BinaryIO, hashing))
        finally:
            if hashing.error is not None:
                raise hashing.error from None
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "crc32": f"{hashing.crc32:08x}"}


def render_manifest(content: Mapping[str, Any]) -> bytes:
    """Returns the canonical bytes of a manifest, with a hash of itself."""
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({**content, "crc32": f"{crc32:08x}"}, indent=2) + "\n").encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of the checkpoint at `path`; does not look at the files in it.

    Raises:
        CheckpointError: it is missing or damaged, or of a version that is not known.
    """
    file = path / MANIFEST
    try:
        with _open_regular(file) as opened:
            raw = opened.read()
    except FileNotFoundError:
        found = "it has no manifest.json" if path.is_dir() else "there is no such directory"
        raise CheckpointError(f"{path} is not a checkpoint: {found}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        content = json.loads(raw)
        found_crc32 = content.pop("crc32")
        version = content["format"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from None
    # compared as bytes: there is only one way to write it, so every flipped bit shows
    if render_manifest(content) != raw:
        raise CheckpointError(
            f"{file} was altered after it was saved: its crc32 of {found_crc32!r} is wrong"
        )
    if version != FORMAT:
        raise CheckpointError(
            f"{file} has format {version}, and this version of hybridtrain reads {FORMAT}: "
            f"load it with the version that saved it"
        )
    for name in content["files"]:  # anybody can make the checksum fit: nothing elsewhere is read
        try:
            check_file_name(name)
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from None
    return cast(dict[str, Any], content)


def _part_of(files: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Returns the files of one of `parts`, the largest spread first."""
    if parts == 1:
        return dict(files)
    bytes_of = [0] * parts
    own = {}
    for name in sorted(files, key=lambda name: (-int(files[name]["size"]), name)):
        least = bytes_of.index(min(bytes_of))
        bytes_of[least] += int(files[name]["size"])
        if least == part:
            own[name] = files[name]
    return own


def _fingerprint(path: Path) -> dict[str, Any]:
    """Computes the manifest's entry for a file on disk."""
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
        CheckpointError: it is a link, a device, a pipe or a directory.
    """
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "symbolic link" if stat.S_ISLNK(mode) else "special file or a directory"
        raise CheckpointError(
            f"{path} is a {kind}: a checkpoint holds regular files only, so copy the file itself"
        )
    return open(path, "rb", buffering=0)
