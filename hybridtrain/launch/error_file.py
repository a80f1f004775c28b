"""The file in which a process tells torchrun why it failed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def write_error_file(line: str, at: float | None = None) -> None:
    """Writes `line` to torchrun's error file; torchrun reports the earliest error of all.

    Uses the format of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`, which itself
    writes only whole tracebacks. Does nothing without torchrun.

    Args:
        line: the error message.
        at: the time of the failure, in seconds since the epoch; None for now.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # Whole seconds, the precision of torchrun's own file: callers shift `at` by whole seconds to
    # come after another process.
    timestamp = str(int(time.time() if at is None else at))
    details = {"py_callstack": line, "timestamp": timestamp}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
