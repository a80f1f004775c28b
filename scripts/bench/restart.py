"""Seconds from the kill of one process of four to the next step, and what they go into.

Three systems, in turn: a run of this project, and a script of plain PyTorch with DDP and a
checkpoint, both under `torchrun --max-restarts 1`; and the floor, which is four interpreters that
import torch, construct the model and make its optimizer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from scripts.bench.common import interleave, print_footer, print_table, shown
from scripts.soak import OVERRIDES, REPOSITORY, kill_tree, recovery

PROCESSES = 4
LIMIT_S = 90.0  # for a restart, a multiple of the time that it takes
TORCHRUN = [
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)),
    *("--max-restarts", "5"),
]
FLOOR = """
import torch
from scripts.soak import model
torch.optim.AdamW(model(10, 8, 1).parameters())
"""
# The lines of a step go to the file that `recovery` reads.
RAW = """
import json, os, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from scripts.soak import model

# Keys of its own for each start: with torch 2.14, init_process_group("gloo") alone finds the
# addresses of the processes before the restart, and fails or waits in most restarts.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("start " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group(
    "gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
)
net = DistributedDataParallel(model(10, 8, 1))
optimizer = torch.optim.AdamW(net.parameters())
checkpoint, metrics, step = Path("checkpoint.pt"), Path("run/metrics.jsonl"), 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while True:
    step += 1
    net(torch.randn(16, 1, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time()}) + "\\n")
        if step % 20 == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                       "new.pt")
            Path("new.pt").rename(checkpoint)
    time.sleep(0.01)
"""


def environment() -> dict[str, str]:
    """Returns the environment of all processes: with bytecode, and one thread each."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def floor() -> float:
    """Returns the seconds of four interpreters, started at once, until the last one ends."""
    began = time.perf_counter()
    interpreters = [
        subprocess.Popen([sys.executable, "-c", FLOOR], env=environment()) for _ in range(PROCESSES)
    ]
    assert not any([process.wait() for process in interpreters])  # noqa: C419  all have to end
    return time.perf_counter() - began


def restart(words: Sequence[str], parts: list[dict[str, float]]) -> float:
    """Runs Python with `words`, kills one of its processes, and waits for the next step.

    Args:
        words: of torchrun and the script.
        parts: the parts of the time are appended here.

    Returns:
        seconds from the kill to the first step after it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directory = folder / "run"
        (folder / "raw.py").write_text(RAW)
        if words[-1] == "raw.py":
            directory.mkdir()
        with (folder / "log.txt").open("w") as log:
            launcher = psutil.Popen(
                [sys.executable, *words], cwd=folder, env=environment(), stdout=log, stderr=log
            )
            try:
                deadline = time.monotonic() + LIMIT_S
                while _steps(directory) < 30 and time.monotonic() < deadline:
                    assert launcher.poll() is None, (folder / "log.txt").read_text()
                    time.sleep(0.05)
                workers = launcher.children()
                random.choice(workers).send_signal(signal.SIGKILL)
                found = recovery(launcher, workers, directory, time.time(), LIMIT_S)
                if found is None:
                    text = (folder / "log.txt").read_text()
                    print(f"no step after the restart:\n{text[-2000:]}", file=sys.stderr)
                    return math.inf
            finally:
                kill_tree(launcher)
    parts.append(found)
    return found["total"]


def _steps(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    ours = [
        *TORCHRUN,
        *(
            "-m",
            "hybridtrain",
            *OVERRIDES,
            "world.replicas=4",
            "output_dir=.",
            "trainer.steps=9999",
        ),
        *("checkpoint.best=null", "trainer.eval_every=null"),
    ]
    parts: list[dict[str, float]] = []
    raw_parts: list[dict[str, float]] = []
    jobs = {
        "floor": floor,
        "plain PyTorch": lambda: restart([*TORCHRUN, "raw.py"], raw_parts),
        "hybridtrain": lambda: restart(ours, parts),
    }
    results = interleave(jobs, options.repeats, warm_up=0)
    print_table(
        ["system", "s to the next step"],
        [[name, shown(seconds, "{:.1f}", min)] for name, seconds in results.items()],
    )
    for system, measured in (("hybridtrain", parts), ("plain PyTorch", raw_parts)):
        rows = [
            [name, f"{statistics.median(one[name] for one in measured if name in one):.2f}"]
            for name in measured[0]
        ]
        print_table([f"part, {system}", "median s"], rows)
    print(json.dumps({"floor": results["floor"], "parts": parts, "plain": raw_parts}))
    print_footer("Medians of the same run; in brackets the least.")


if __name__ == "__main__":
    main()
