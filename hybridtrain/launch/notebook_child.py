"""The process that `notebook_launcher` starts: `... -m hybridtrain.launch.notebook_child DIR`."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path

from hybridtrain.files import write_atomically
from hybridtrain.launch.notebook import dumped
from hybridtrain.launch.processes import end_with_parent


def main() -> int:
    """Calls the function; leaves its result or its error in the folder."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    end_with_parent(always=True)
    try:
        function, args = pickle.loads((folder / "call.pkl").read_bytes())
        result = function(*args)
        if rank == 0:
            write_atomically(folder / "result.pkl", dumped(result, "the result of the function"))
    except BaseException as error:
        # told to the notebook before the others notice and fail as well
        report = {
            "rank": rank,
            "time": time.time(),
            "summary": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
        }
        write_atomically(folder / f"error{rank}.pkl", pickle.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no thread, and no process that waits for this one, may keep it
    return 0


if __name__ == "__main__":
    sys.exit(main())
