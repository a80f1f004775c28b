"""The errors of a save, and what the other processes are told of them."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import CheckpointError, UserError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoSpaceError(CheckpointError):
    """A checkpoint was not saved because the disk is full; a later save may succeed."""


def save_error(temporary: Path, step: int, error: OSError, previous_bytes: int) -> CheckpointError:
    """Returns the error of a save that could not write or rename a file.

    Args:
        temporary: the directory that was written to; it may be missing.
        step: of the checkpoint.
        error: what the system says.
        previous_bytes: the size of the newest checkpoint, which the next ones are about as large
            as; 0 if there is none.
    """
    root = temporary.parent
    message = f"cannot save the checkpoint of step {step} in {root}: {error}"
    if error.errno not in _NO_SPACE:
        return CheckpointError(message)
    written = sum(file.stat().st_size for file in temporary.glob("*"))
    existing = next(path for path in (root, *root.parents) if path.is_dir())
    free = written + shutil.disk_usage(existing).free
    return NoSpaceError(
        f"{message}. It needs {max(written, previous_bytes) / 1e6:,.1f} MB or more; the disk has "
        f"{free / 1e6:,.1f} MB free, a quota or a limit on file sizes may allow less. Free "
        "some space or lower keep=; the older checkpoints are untouched"
    )


@dataclass(frozen=True)
class Problem:
    """An exception of one process, as the others are told of it."""

    rank: int
    kind: str
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Problem:
        """Returns the problem that `error` on `rank` is."""
        if isinstance(error, NoSpaceError):
            return cls(rank, "space", str(error))
        if isinstance(error, UserError):
            return cls(rank, "user", str(error))
        return cls(rank, "other", f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Returns the exception for a process that it did not happen in."""
        if self.kind == "space":
            return NoSpaceError(f"rank {self.rank}: {self.message}")
        if self.kind == "user":
            return CheckpointError(f"rank {self.rank}: {self.message}")
        return RuntimeError(f"rank {self.rank} failed: {self.message}")


def worst(problems: list[Problem]) -> Problem | None:
    """Returns the problem that decides: a full disk only if that is all there is."""
    return min(problems, key=lambda each: (each.kind == "space", each.rank), default=None)
