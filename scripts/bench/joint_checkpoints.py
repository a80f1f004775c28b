"""A checkpoint of a GPT over several processes: seconds that training waits, and memory.

Each form saves three times; the last two count, since the first one gets the memory of its copies.
Memory is the most that belongs to no file (`RssAnon`, looked at every 5 ms) in any of these saves,
less what the process had before the first one, as a share of the whole state: weights and two
moments.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hybridtrain.checkpoint.saving import finishing_saves as finishing
from hybridtrain.checkpoint.saving import save_checkpoint as save
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.world import World
from scripts.bench.big_model import VOCABULARY, counts, most_anonymous, resident
from scripts.bench.common import print_footer, print_table

FORMS = (("rank0", False), ("all", False), ("all", True))


def work(options: argparse.Namespace) -> None:
    """Measures in this process, and writes down its figures."""
    torch.set_num_threads(1)
    world = World.from_env(options.processes, "cpu", timeout_s=3600, engine="distributed")
    torch.manual_seed(0)
    model = HybridModel.construct(
        lambda: gpt(VOCABULARY, 64, options.layers, 16, options.width),
        world,
        split=counts(options.layers, options.processes),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = 3 * sum(p.nbytes for p in model.net.parameters())
    figures = {}
    for writers, background in FORMS:
        store = CheckpointStore(
            Path(options.folder, f"{writers}{background}"), 1, background, writers
        )
        gc.collect()
        before = resident("RssAnon")
        waits, wholes = [], []
        with most_anonymous() as seen, finishing(store, world):
            for step in range(3):
                world.gather(None)
                start = time.perf_counter()
                save(store, step, model, optimizer, {})
                waits.append(time.perf_counter() - start)
                store.wait()
                wholes.append(time.perf_counter() - start)
        held = (max(seen) - before) / state
        figures[f"{writers}, {'background' if background else 'foreground'}"] = (
            waits,
            wholes,
            held,
        )
        del store
    everyones = world.gather(figures)
    if world.is_main:
        Path(options.folder, "figures.json").write_text(json.dumps([everyones, state]))
    del model, optimizer
    gc.collect()
    world.gather(None)
    world.close()


def main() -> None:
    """Starts the processes, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    options = parser.parse_args()
    if options.folder is not None and Path(options.folder, "run").exists():
        work(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        Path(folder, "run").touch()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={options.processes}", "-m", __spec__.name]
        sizes = [f"--{name}={getattr(options, name)}" for name in ("processes", "layers", "width")]
        subprocess.run([*command, *sizes, "--folder", folder], check=True)
        everyones, state = json.loads(Path(folder, "figures.json").read_text())
    rows = []
    for form in everyones[0]:
        waits, wholes, held = zip(*(figures[form] for figures in everyones), strict=True)
        slowest = [
            [max(each) for each in zip(*times, strict=True)][1:] for times in (waits, wholes)
        ]
        shown = [" ".join(f"{seconds:.2f}" for seconds in times) for times in slowest]
        rows.append((form, *shown, " ".join(f"{share:.3f}" for share in held)))
    size = f"{state / 2**20:.0f} MiB"
    print_table([f"saving {size}", "training waits, s", "on disk after, s", "held"], rows)
    print_footer(
        f"{options.processes} processes; two saves each, the slowest process of each; held: per "
        f"process, as a share of the state."
    )


if __name__ == "__main__":
    main()
