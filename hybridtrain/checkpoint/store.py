"""Checkpoint directories that survive a killed process, a power cut and a flipped bit.

A checkpoint is a directory of files, each filled by a function of the caller's. It is built under a
hidden name and appears under its own in one step, so it is complete or absent:

    .tmp-100-<uuid>/     each file hashed while it is written, then fsync
                         manifest.json last: size and hash of every file
                         fsync of the directory
        |  rename, fsync of the root
        v
    step_00000100/       published

A directory cannot be renamed onto another that has files, so a step that is saved again (a run
resumed from an earlier checkpoint reaches it again) is first published beside the old one:

    step_00000100  step_00000100.1      published: the highest generation of a step counts
    .tmp-<uuid>    step_00000100.1      the old one retired
                   step_00000100        the new one renamed, the retired files removed

Every line of this picture has a complete checkpoint of step 100, and each is on disk before the
next begins. Readers never repair anything; the next save removes what a killed run left behind.

One process at a time saves into a root (rank 0 of the run); any number may read.
"""

import errno
import io
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from hybridtrain.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1

_TEMPORARY = ".tmp-"
_PUBLISHED = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run: `root/step_00000100/`, `root/step_00000200/`, ...

    Args:
        root: their directory; made by the first `save`.
        keep: how many of the newest stay on disk; None: all. A save needs space for one more.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} must be at least 1, or None to keep all")
        self.root = root
        self.keep = keep

    def save(self, step: int, writers: Mapping[str, Callable[[BinaryIO], object]]) -> Path:
        """Publishes the checkpoint of `step`, with a file per writer; returns its directory.

        When this returns, the checkpoint is on disk. One of the same step is replaced; at every
        moment one of the two can be loaded. Then, with `keep`, the oldest are removed, but never
        later steps than this one.

        Args:
            step: the optimizer steps done.
            writers: by file name; each gets a binary file that can only be appended to.

        Raises:
            CheckpointError: the files cannot be written (disk full, no permission); the older
                checkpoints are unchanged. Other exceptions of a writer are passed on.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        for name in writers:
            if not name or name.startswith(".") or "/" in name or name == MANIFEST:
                raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")

        temporary = self.root / f"{_TEMPORARY}{step}-{uuid4().hex}"
        try:
            make_directory(self.root)
            # first, because on a full disk this is the space that is missing
            self._remove(list(self.root.glob(f"{_TEMPORARY}*")))
            temporary.mkdir()
            files = {name: _write_file(temporary / name, write) for name, write in writers.items()}
            manifest = _render_manifest({"format": FORMAT, "step": step, "files": files})
            _write_file(temporary / MANIFEST, lambda file: file.write(manifest))
            sync_directory(temporary)
            published = self._publish(temporary, step)
        except OSError as error:
            raise CheckpointError(self._explain(step, temporary, error)) from error
        finally:
            if temporary.is_dir():  # not published
                shutil.rmtree(temporary, ignore_errors=True)

        # the checkpoint is on disk: errors from here on must not look like a failed save
        try:
            self._settle(step, published)
            self._prune(step)
        except OSError as error:
            _log.warning("%s is saved, but an older one cannot be removed: %s", published, error)
        return self._generations(step)[-1]

    def steps(self) -> list[int]:
        """Returns the steps of the published checkpoints, ascending; they may be damaged."""
        return sorted({step for step, _, _ in self._published()})

    def newest(self) -> Path | None:
        """Returns the newest intact checkpoint, or None if there are no checkpoints.

        Reads every byte of it. A damaged one is skipped with a warning.

        Raises:
            CheckpointError: all are damaged; starting from scratch is the user's decision.
        """
        published = self._published()
        for _, _, path in reversed(published):
            try:
                verify(path)
            except CheckpointError as error:
                _log.warning("skipping a damaged checkpoint: %s", error)
            else:
                return path
        if published:
            names = ", ".join(path.name for _, _, path in published)
            raise CheckpointError(
                f"none of the checkpoints in {self.root} is intact ({names}): restore one from a "
                "copy, or start a new run in another directory"
            )
        return None

    def _published(self) -> list[tuple[int, int, Path]]:
        """Returns every (step, generation, path), oldest first."""
        if not self.root.is_dir():
            return []
        matches = ((_PUBLISHED.fullmatch(path.name), path) for path in self.root.iterdir())
        return sorted((int(m[1]), int(m[2] or 0), path) for m, path in matches if m)

    def _generations(self, step: int) -> list[Path]:
        return [path for published_step, _, path in self._published() if published_step == step]

    def _publish(self, temporary: Path, step: int) -> Path:
        target = self.root / f"step_{step:08d}"
        if generations := [number for other, number, _ in self._published() if other == step]:
            target = target.with_suffix(f".{generations[-1] + 1}")
        os.rename(temporary, target)
        sync_directory(self.root)
        return target

    def _settle(self, step: int, newest: Path) -> None:
        """Retires the older generations of `step` and gives the newest the plain name."""
        if retired := [self._retire(p) for p in self._generations(step) if p != newest]:
            sync_directory(self.root)
            os.rename(newest, self.root / f"step_{step:08d}")
            self._remove(retired)

    def _prune(self, published: int) -> None:
        """Removes the oldest checkpoints, so that `keep` of those up to `published` stay.

        Later steps stay: after a return to an earlier checkpoint, one of them may be the newest
        intact one.
        """
        if self.keep is None:
            return
        surplus = [step for step in self.steps() if step <= published][: -self.keep]
        if retired := [self._retire(p) for step in surplus for p in self._generations(step)]:
            self._remove(retired)

    def _retire(self, path: Path) -> Path:
        """Hides a checkpoint under a temporary name, so that it is never found half removed."""
        hidden = self.root / f"{_TEMPORARY}{uuid4().hex}"
        os.rename(path, hidden)
        return hidden

    def _remove(self, hidden: Iterable[Path]) -> None:
        """Removes hidden directories; only warns about what cannot be removed."""
        # a power cut must not bring back a name whose files are already removed
        sync_directory(self.root)
        for path in hidden:
            try:
                shutil.rmtree(path)
            except OSError as error:
                _log.warning("%s is no longer needed, but cannot be removed: %s", path, error)

    def _explain(self, step: int, temporary: Path, error: OSError) -> str:
        message = f"cannot save the checkpoint of step {step} in {self.root}: {error}"
        if error.errno not in _NO_SPACE:
            return message
        written = sum(file.stat().st_size for file in temporary.glob("*"))
        existing = next(path for path in (self.root, *self.root.parents) if path.is_dir())
        free = written + shutil.disk_usage(existing).free
        try:
            # the best guess: the checkpoints of a run have nearly the same size
            files = _read_manifest(self._published()[-1][2])["files"]
            previous = sum(entry["size"] for entry in files.values())
        except (CheckpointError, IndexError):
            previous = 0
        return (
            f"{message}. It needs {max(written, previous) / 1e6:,.1f} MB or more; the disk has "
            f"{free / 1e6:,.1f} MB free, a quota or a limit on file sizes may allow less. Free "
            "some space or lower keep=; the older checkpoints are untouched"
        )


def verify(path: Path) -> None:
    """Checks that every file in the manifest of a checkpoint equals what was saved.

    Raises:
        CheckpointError: names the first file that is missing, cut short or altered.
    """
    manifest = _read_manifest(path)
    named = _PUBLISHED.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(
            f"{path} is named for step {int(named[1])} but holds step {manifest['step']}: "
            "rename it back"
        )
    for name, expected in manifest["files"].items():
        file = path / name
        try:
            found = _fingerprint(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        size, crc32 = expected["size"], expected["crc32"]
        if found["size"] != size:
            raise CheckpointError(f"{file} has {found['size']:,} bytes; {size:,} were saved")
        if found["crc32"] != crc32:
            altered = f"its crc32 is {found['crc32']}, not {crc32}"
            raise CheckpointError(f"{file} was altered after it was saved: {altered}")


def step_of(path: Path) -> int:
    """Returns the step of the checkpoint at `path`, whatever the name of its directory.

    Raises:
        CheckpointError: there is no intact manifest.
    """
    return int(_read_manifest(path)["step"])


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


class _HashingFile(io.RawIOBase):
    """An append-only file that computes the size and the crc32 of what is written.

    crc32 detects every flipped bit and every burst of up to 32 bits, misses other damage once in 4
    billion, and takes half the time of sha256. The base class refuses to seek, so no writer can
    bypass the hash; `torch.save` only appends.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            # torch.save turns this into a RuntimeError about file positions
            self.error = error
            raise
        size = memoryview(data).nbytes
        self.size += size
        self.crc32 = zlib.crc32(data, self.crc32)
        return size


def _write_file(path: Path, write: Callable[[BinaryIO], object]) -> dict[str, Any]:
    """Writes one file and waits until it is on disk; returns its entry in the manifest."""
    # opened like any other file, so that its mode follows the umask
    with open(path, "xb") as file:
        hashing = _HashingFile(file)
        try:
            write(cast(BinaryIO, hashing))
        finally:
            if hashing.error is not None:
                raise hashing.error from None
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "crc32": f"{hashing.crc32:08x}"}


def _fingerprint(path: Path) -> dict[str, Any]:
    """Computes the manifest's entry for a file on disk."""
    size = crc32 = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
            crc32 = zlib.crc32(buffer[:count], crc32)
    return {"size": size, "crc32": f"{crc32:08x}"}


def _render_manifest(content: Mapping[str, Any]) -> bytes:
    """Returns the canonical bytes of a manifest, with a hash of itself."""
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return (json.dumps({**content, "crc32": f"{crc32:08x}"}, indent=2) + "\n").encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        found = "it has no manifest.json" if path.is_dir() else "there is no such directory"
        raise CheckpointError(f"{path} is not a checkpoint: {found}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        content = json.loads(raw)
        found_crc32 = content.pop("crc32")
        version = content["format"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from None
    # compared as bytes: there is only one way to write it, so every flipped bit shows
    if _render_manifest(content) != raw:
        raise CheckpointError(
            f"{file} was altered after it was saved: its crc32 of {found_crc32!r} is wrong"
        )
    if version != FORMAT:
        raise CheckpointError(
            f"{file} has format {version}; this version of hybridtrain reads format {FORMAT}"
        )
    return cast(dict[str, Any], content)
