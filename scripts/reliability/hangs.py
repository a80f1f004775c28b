"""Processes that sleep for ever or are stopped: does the watchdog name them, and how soon?

python -m scripts.reliability.hangs [--only stop]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.reliability.first_errors import run

STALL_S = 5.0
FAULTS = [
    f"{kind}:{phase}:{rank}"
    for kind in ("sleep", "stop")
    for phase in ("data", "forward", "backward", "optimizer", "evaluate")
    for rank in (0, 1)
]


def main() -> int:
    """Runs all faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the faults' names")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault]
    named, late = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults):
            outcome = run(fault, Path(folder) / str(number), f"world.stall_s={STALL_S}")
            named += outcome.named
            # the first evaluation is given four times the limit
            limit = STALL_S * (4 if ":evaluate:" in fault else 1)
            late.append(outcome.seconds - limit)
            print(
                f"{fault:20} {'named' if outcome.named else 'WRONG'} "
                f"{late[-1]:5.1f} s after the limit  {outcome.line[:200]}",
                flush=True,
            )
    late.sort()
    print(
        f"\nnamed rightly: {named} of {len(faults)}; seconds from the limit to the end of the job: "
        f"median {late[len(late) // 2]:.1f}, most {late[-1]:.1f}"
    )
    return 0 if named == len(faults) and late[-1] <= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
