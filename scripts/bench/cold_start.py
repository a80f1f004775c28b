"""Seconds from the shell to the end of the first step of `recipe=digits`, in one and two processes.

Beside it, what a script of plain PyTorch needs before its first step: `import torch` and an
optimizer, whose class imports PyTorch's compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from scripts.bench.common import interleave, print_footer, print_table, shown

RAW = "import torch\ntorch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\n"
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FIRST_STEP = re.compile(r"^(\S+ \S+) INFO hybridtrain\.progress: step 1/1  loss", re.MULTILINE)


def seconds_of(words: Sequence[str]) -> float:
    """Runs Python with `words`; returns the seconds from its start to its end."""
    # with the bytecode of an earlier start, as a user has it
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def to_first_step(launcher: Sequence[str], whole: list[float]) -> float:
    """Runs one step; returns the seconds to its line in the log, and adds those of the command."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        run = ["recipe=digits", "trainer.steps=1", f"output_dir={folder}", "run_name=run"]
        whole.append(seconds_of([*launcher, "-m", "hybridtrain", *run]))
        logs = "\n".join(path.read_text() for path in Path(folder, "run", "logs").iterdir())
    match = FIRST_STEP.search(logs)
    assert match is not None, logs
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    whole: dict[str, list[float]] = {"hybridtrain": [], "hybridtrain, 2 processes": []}

    def first(name: str, launcher: Sequence[str]) -> Callable[[], float]:
        return lambda: to_first_step(launcher, whole[name])

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "raw.py")
        script.write_text(RAW)
        jobs = {
            "PyTorch": lambda: seconds_of([str(script)]),
            "hybridtrain": first("hybridtrain", []),
            "PyTorch, 2 processes": lambda: seconds_of([*TWO, str(script)]),
            "hybridtrain, 2 processes": first("hybridtrain, 2 processes", TWO),
        }
        results = interleave(jobs, options.repeats)
    rows = []
    for name, values in results.items():
        command = whole[name][-len(values) :] if name in whole else values
        base = results["PyTorch, 2 processes" if "2" in name else "PyTorch"]
        ratio = statistics.median(value / raw for value, raw in zip(values, base, strict=True))
        cells = [shown(values, "{:.2f}", min), f"{ratio:.2f}", shown(command, "{:.2f}", min)]
        rows.append([name, *cells])
    print_table(["", "s to the first step's end", "of PyTorch's", "s of the command"], rows)
    print_footer(
        f"Median of {options.repeats} starts, in brackets the best; PyTorch: to the first "
        f"optimizer, and without a step. The command ends with an evaluation, a checkpoint, "
        f"pictures and a prediction."
    )


if __name__ == "__main__":
    main()
