"""The names in a checkpoint directory, the renames between them, and the mark of the best.

A checkpoint is built under a hidden name and published with a single rename, so it is complete or
absent:

    .tmp-100-<uuid>/     each file hashed while it is written, then fsync
                         manifest.json last: size and hash of every file
                         fsync of the directory
        |  rename_into_place, fsync of the root
        v
    step_00000100/       published

A directory cannot be renamed onto another one that contains files. If a step is saved again (a run
resumed from an earlier checkpoint), the new checkpoint is first published next to the old one:

    step_00000100  step_00000100.1      published: the highest generation of a step counts
    .tmp-<uuid>    step_00000100.1      cleanup: the old one hidden, and
                   step_00000100        the new one renamed, the hidden files removed

Every line of this diagram has a complete checkpoint of step 100, and is on disk before the next one
begins. `store` implements a save with these operations.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from hybridtrain._base.files import sync_directory
from hybridtrain.checkpoint.manifest import PUBLISHED, write_file
from hybridtrain.errors import CheckpointError

BEST = "best.json"
TEMPORARY = ".tmp-"
"""The prefix of names in a root that the next save removes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The step of the best checkpoint, with the value and the criterion that selected it."""

    step: int
    value: float
    criterion: str | None = None


def path_of(root: Path, step: int) -> Path:
    """Returns the directory of the checkpoint of `step`, if it has a single generation."""
    return root / f"step_{step:08d}"


def published(root: Path) -> list[tuple[int, int, Path]]:
    """Returns every (step, generation, path), oldest first; they may be damaged."""
    if not root.is_dir():
        return []
    matches = ((PUBLISHED.fullmatch(path.name), path) for path in root.iterdir())
    # By number: the text of a step with nine digits sorts before one with eight.
    return sorted((int(m[1]), int(m[2] or 0), path) for m, path in matches if m)


def generations(root: Path, step: int) -> list[Path]:
    """Returns the checkpoints of `step`, oldest first."""
    return [path for published_step, _, path in published(root) if published_step == step]


def rename_into_place(root: Path, temporary: Path, step: int) -> Path:
    """Renames a complete checkpoint, next to older generations of `step`; returns its path."""
    target = path_of(root, step)
    if numbers := [number for other, number, _ in published(root) if other == step]:
        target = target.with_suffix(f".{numbers[-1] + 1}")
    # Atomic within a file system: a reader sees the whole directory or none.
    os.rename(temporary, target)
    sync_directory(root)  # before any older checkpoint is removed
    return target


def tidy(root: Path, step: int, newest: Path) -> None:
    """Removes the older generations of `step` and gives the newest the plain name."""
    # If the process dies here, `step.1` is still published, and the next save removes the rest.
    if retired := [_retire(root, p) for p in generations(root, step) if p != newest]:
        # the old name must be gone on disk before the new checkpoint takes it
        sync_directory(root)
        os.rename(newest, path_of(root, step))
        remove(root, retired)


def remove_steps(root: Path, steps: Collection[int]) -> None:
    """Removes the checkpoints of the given `steps`."""
    if retired := [_retire(root, path) for step in steps for path in generations(root, step)]:
        remove(root, retired)


def remove(root: Path, hidden: Iterable[Path]) -> None:
    """Removes hidden directories; logs a warning if one cannot be removed."""
    # after a power cut, no name may come back without its files
    sync_directory(root)
    for path in hidden:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            _log.warning("%s is no longer needed, but could not be removed: %s", path, error)


def read_best(root: Path) -> Best | None:
    """Returns the mark in `root`, or None without one.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = root / BEST
    try:
        content = json.loads(file.read_text())
        step, value = content["step"], content["value"]
        criterion = content.get("criterion")
        if type(step) is not int or step < 0 or type(value) not in (int, float):
            raise ValueError(f"step {step!r} and value {value!r}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error!r}), so the best checkpoint is unknown: delete it to let "
            f"the run mark a new one, or write the best step and its value into it"
        ) from None
    return Best(step, float(value), criterion)


def write_best(root: Path, best: Best) -> None:
    """Replaces the mark in `root`; the mark is on disk when this returns."""
    temporary = root / f"{TEMPORARY}{uuid4().hex}"
    entries = {name: value for name, value in asdict(best).items() if value is not None}
    content = json.dumps(entries).encode() + b"\n"
    try:
        # A new file and a rename: a reader finds the old mark or the new one.
        write_file(temporary, lambda file: file.write(content))
        os.rename(temporary, root / BEST)
        sync_directory(root)
    finally:
        temporary.unlink(missing_ok=True)


def _retire(root: Path, path: Path) -> Path:
    """Hides a checkpoint under a temporary name, so that no reader finds it half removed."""
    hidden = root / f"{TEMPORARY}{uuid4().hex}"
    # Atomic: a reader that has opened files of it keeps them.
    os.rename(path, hidden)
    return hidden
