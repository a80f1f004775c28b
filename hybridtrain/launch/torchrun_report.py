"""The file in which a worker tells torchrun why it failed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def write_error_file(line: str, at: float | None = None) -> None:
    """Leaves `line` where torchrun looks for the cause of a failure; it shows the earliest one.

    In the format of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`, which itself
    writes whole tracebacks only. Without torchrun nothing is written.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    timestamp = str(int(time.time() if at is None else at))
    details = {"py_callstack": line, "timestamp": timestamp}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
