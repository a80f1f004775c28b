"""The memory of each process that trains a part of a GPT: constructs, trains, saves and restores.

Resident memory is the kernel's: `VmHWM`, which is set back before each phase, less `VmRSS` after a
tiny model was trained in the same processes, when Python, PyTorch and gloo have what they need. It
is shown as a share of the weights and gradients of the whole model. To restore, rank 0 reads the
checkpoint through a mapping, whose pages count although they belong to the page cache; the line
without files is the most of `RssAnon`, looked at every 5 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridtrain.checkpoint.saving import save_checkpoint as save
from hybridtrain.checkpoint.state import restore_checkpoint as restore
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.world import World
from scripts.bench.common import print_footer, print_table

VOCABULARY, ROWS = 1024, 4


def resident(key: str) -> int:
    """A field of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


@contextmanager
def most_anonymous() -> Iterator[list[int]]:
    """Looks at the memory that belongs to no file; the list has what was seen."""
    seen = [resident("RssAnon")]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            seen.append(resident("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def counts(layers: int, processes: int) -> list[int]:
    """Returns the layers of each stage: as many blocks each; embedding and head are extra."""
    blocks = [layers // processes + (i < layers % processes) for i in range(processes)]
    blocks[0] += 1
    blocks[-1] += 2
    return blocks


def train(model: HybridModel, optimizer: torch.optim.Optimizer, length: int, steps: int) -> None:
    """Trains some steps on random tokens, the same in all processes."""
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (ROWS, length + 1), generator=g)
        model.train_step(tokens[:, :-1], tokens[:, 1:], loss)
        optimizer.step()
        optimizer.zero_grad()


def work(options: argparse.Namespace) -> None:
    """Runs the phases in this process, and writes down its figures."""
    world = World.from_env(options.processes, "cpu", timeout_s=3600, engine="distributed")
    length = options.length

    def build(layers: int, width: int) -> HybridModel:
        split = counts(layers, options.processes) if options.split == "by hand" else options.split
        torch.manual_seed(0)
        return HybridModel.construct(
            lambda: gpt(VOCABULARY, length, layers, 16, width),
            world,
            split=split,
            chunks=ROWS,
            example_inputs=torch.zeros(ROWS, length, dtype=torch.int64),
        )

    tiny = build(2 * options.processes, 32)
    train(tiny, torch.optim.SGD(tiny.parameters(), lr=0.1), length, 2)
    before = resident("VmRSS")
    figures: dict[str, dict[str, float]] = {}

    anonymous = resident("RssAnon")

    def phase(name: str, run: Callable[[], object]) -> None:
        world.gather(None)  # one phase after the other, in all processes
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
        start = time.perf_counter()
        with most_anonymous() as most:
            run()
        seconds = time.perf_counter() - start
        figures[name] = {"peak": resident("VmHWM") - before, "seconds": seconds}
        figures[name]["without files"] = max(most) - anonymous

    def construct() -> None:
        nonlocal model
        model = build(options.layers, options.width)

    model = tiny
    del tiny
    phase("construct", construct)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phase(f"train {options.steps} steps", partial(train, model, optimizer, length, options.steps))
    store = CheckpointStore(Path(options.folder, "checkpoints"))
    phase("save", partial(save, store, options.steps, model, optimizer, {}))
    path = Path(options.folder, "checkpoints", f"step_{options.steps:08d}")
    expected = {name: value.sum().item() for name, value in model.named_parameters()}
    phase("restore", partial(restore, path, model, optimizer))
    assert expected == {name: value.sum().item() for name, value in model.named_parameters()}
    found = {
        "phases": figures,
        "stages": [len(stage) for stage in model.plan.layer_names],
        "owned": sum(p.nbytes for p in model.parameters()),
        "whole": sum(p.nbytes for p in model.net.parameters()),
    }
    Path(options.folder, f"rank{world.rank}.json").write_text(json.dumps(found))
    del model, optimizer
    gc.collect()  # the threads of a model's process groups must not outlive the interpreter
    world.gather(None)
    world.close()


def main() -> None:
    """Starts the processes, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--split", default="by hand", help="or uniform, size, time, a plan")
    parser.add_argument(
        "--limits",
        type=float,
        nargs=2,
        metavar=("CONSTRUCT", "TRAIN"),
        help="fail if a process has a larger share in these phases",
    )
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.processes)]
        command += ["-m", "scripts.bench.big_model", *sys.argv[1:], "--folder", folder]
        subprocess.run(command, check=True)
        ranks = [
            json.loads(Path(folder, f"rank{rank}.json").read_text())
            for rank in range(options.processes)
        ]
    whole = 2 * ranks[0]["whole"]
    rows = []
    worst = []
    lines = [(name, name, "peak") for name in ranks[0]["phases"]]
    for title, name, key in [*lines, ("restore, without files", "restore", "without files")]:
        phases = [rank["phases"][name] for rank in ranks]
        shares = [phase[key] / whole for phase in phases]
        worst.append(max(shares))
        seconds = max(phase["seconds"] for phase in phases)
        mib = [f"{phase[key] / 2**20:.0f}" for phase in phases]
        rows.append([title, *mib, *(f"{share:.3f}" for share in shares), f"{seconds:.1f}"])
    numbers = range(options.processes)
    header = ["", *(f"MiB {i}" for i in numbers), *(f"share {i}" for i in numbers), "seconds"]
    print_table(header, rows)
    owned = ", ".join(f"{rank['owned'] / ranks[0]['whole']:.3f}" for rank in ranks)
    print_footer(
        f"gpt with {whole / 8e6:.0f} million parameters, {whole / 2**20:.0f} MiB of weights and "
        f"gradients, in {options.processes} processes; split {options.split}: layers "
        f"{ranks[0]['stages']}, share of the parameters {owned}. SGD without momentum, "
        f"{ROWS} micro-batches of {options.length} tokens."
    )
    if options.limits is not None:
        for title, share, limit in zip(("construct", "train"), worst, options.limits, strict=False):
            if share > limit:
                sys.exit(f"{title}: a process had {share:.3f} of the whole; the limit is {limit}")


if __name__ == "__main__":
    main()
