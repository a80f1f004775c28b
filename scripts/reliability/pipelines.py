"""Faults in pipelines over several processes: what is said first, and how soon have all ended?

Four processes are two pipelines of two stages (`world.engine=distributed`). Each fault is one of
rank 3, which has stage 1 of the second pipeline.

    python -m scripts.reliability.pipelines [--only kill] [--output]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from scripts.reliability.first_errors import Outcome, run

STALL_S = 8.0
RANK = r"rank 3 \(stage 1, "
# what each kind of fault must be told as
EXPECTED = {
    "exception:forward:3": r"ArithmeticError: boom in forward[\s\S]*on " + RANK,
    "exception:loss:3": r"ArithmeticError: boom in loss[\s\S]*on " + RANK,
    "exception:backward:3": r"ArithmeticError: boom in backward[\s\S]*on " + RANK,
    "exception:data:3": r"error: sample \d+ of .* boom in data.* on " + RANK,
    "exception:optimizer:3": r"ArithmeticError: boom in optimizer[\s\S]*on " + RANK,
    "memory:forward:3": r"(MemoryError|RuntimeError: .*memory)[\s\S]*on " + RANK,
    "kill:forward:3": "error: " + RANK + r".*ended without a message",
    "kill:optimizer:3": "error: " + RANK + r".*ended without a message",
    "stop:forward:3": "error: " + RANK + r".*does not respond",
    "sleep:forward:3": "error: " + RANK + r".*has made no progress",
    "nan:forward:3": r"error: .*not finite",
    "interrupt:forward:3": r"interrupted at step \d+ of \d+ by SIGINT: saved",
    "terminate:forward:3": r"interrupted at step \d+ of \d+ by SIGTERM: saved",
}


def first_line(output: str) -> str:
    """Returns the first line of the error in an output, without a time or a path."""
    pattern = r"^(?:error: |\w+Error: |interrupted at).*"
    found = re.search(pattern, output, re.MULTILINE)
    return found[0] if found else "nothing"


def judge(fault: str, outcome: Outcome) -> bool:
    """Returns whether the fault was told as it should be, and nothing else before."""
    ours = re.split(r"\n[WE]\d{4} .*failed \(exitcode", outcome.output)[0]
    reports = re.findall(r"^(?:error: |\w+Error: ).*", ours, re.MULTILINE)
    return bool(re.search(EXPECTED[fault], ours)) and len(reports) <= 1


def main() -> int:
    """Runs all faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the faults' names")
    parser.add_argument("--output", action="store_true", help="show the output of what is wrong")
    arguments = parser.parse_args()
    faults = [fault for fault in EXPECTED if arguments.only in fault]
    layout = ("world.engine=distributed", f"world.stall_s={STALL_S}")
    layout += (
        "trainer.loss={_target_: faults.FaultyLoss}",
        "trainer.steps=400",
        "trainer.max_skipped=2",
    )
    right = 0
    print("| fault | told rightly | s to the end of all | first line |\n|---|---|--:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults):
            outcome = run(fault, Path(folder) / str(number), *layout, processes=4)
            told = judge(fault, outcome)
            right += told
            line = first_line(outcome.output).replace("|", "/")[:160]
            said = "yes" if told else "NO"
            print(f"| {fault} | {said} | {outcome.seconds:.1f} | {line} |", flush=True)
            if arguments.output and not told:
                print(outcome.output)
    print(f"\ntold rightly: {right} of {len(faults)}")
    return 0 if right == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
