"""The mark of a run's best checkpoint: a small file beside the checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from hybridtrain.checkpoint.manifest import write_file
from hybridtrain.errors import CheckpointError
from hybridtrain.files import sync_directory

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """The step of the best checkpoint, the value that it was chosen by, and what that is of."""

    step: int
    value: float
    criterion: str | None = None


def read_best(root: Path) -> Best | None:
    """Returns the mark in `root`, or None if nothing is marked.

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
            f"{file} is damaged ({error!r}), so that the best checkpoint is not known: remove it "
            f"to mark a new one, or write the step and the value of the best into it"
        ) from None
    return Best(step, float(value), criterion)


def write_best(root: Path, best: Best, temporary_prefix: str) -> None:
    """Replaces the mark in `root`; it is on disk when this returns."""
    temporary = root / f"{temporary_prefix}{uuid4().hex}"
    entries = {name: value for name, value in asdict(best).items() if value is not None}
    content = json.dumps(entries).encode() + b"\n"
    try:
        write_file(temporary, lambda file: file.write(content))
        os.rename(temporary, root / BEST)
        sync_directory(root)
    finally:
        temporary.unlink(missing_ok=True)
