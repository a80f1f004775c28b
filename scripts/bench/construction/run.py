"""What it costs to build a large model: the most memory that the process held, and the time.

Each way runs in a process of its own, which reads its peak from the kernel: `VmHWM`, all of its
resident memory, with the 0.3 GiB that Python and PyTorch take before a model is there. A
checkpoint is read through a mapping, whose pages count as resident although they are the page
cache's; so the peak without pages of files is sampled too (`RssAnon`, every 5 ms).
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import print_footer, print_table

from hybridtrain.checkpoint.state import restore, writers
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.deferred import construct
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.world import World

STAGES = 4
WAYS = {
    "plain PyTorch: gpt()": "plain",
    "plain PyTorch: gpt(), then a copy for the stages": "copied",
    f"hybridtrain, {STAGES} CPU stages": "built",
    f"hybridtrain, {STAGES} CPU stages, restored from a checkpoint": "restored",
}


class Peak:
    """The most anonymous memory of this process, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, status("RssAnon"))
            time.sleep(0.005)


def status(key: str) -> int:
    """A field of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def run(way: str, layers: int, width: int, checkpoints: Path) -> dict[str, float]:
    """Builds the model one way, in this process."""
    peak, start = Peak(), time.perf_counter()

    def net() -> torch.nn.Sequential:
        return gpt(256, 1024, n_layer=layers, n_head=16, d_model=width)

    if way in ("plain", "copied"):
        model = net()
        parameters = sum(p.nbytes for p in model.parameters())
        if way == "copied":
            stages = [copy.deepcopy(layer) for layer in model]
            assert stages
    else:
        hybrid = HybridModel(construct(net), World.from_env(STAGES, devices="cpu"))
        parameters = sum(p.nbytes for p in hybrid.parameters())
        if way == "restored":
            newest = CheckpointStore(checkpoints).newest()
            assert newest is not None
            restore(newest, hybrid)
    return {
        "parameters": parameters,
        "peak": status("VmHWM"),
        "anonymous": max(peak.bytes, status("RssAnon")),
        "seconds": time.perf_counter() - start,
    }


def save(layers: int, width: int, checkpoints: Path) -> None:
    """Writes a checkpoint of the model for the way that restores one."""
    net = gpt(256, 1024, n_layer=layers, n_head=16, d_model=width)
    model = HybridModel(net, World.from_env(STAGES, devices="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    CheckpointStore(checkpoints).save(1, writers(model, optimizer, {}))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoints", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = options.layers, options.width
    if options.way == "save":
        save(*size, options.checkpoints)
        return
    if options.way:
        print(json.dumps(run(options.way, *size, options.checkpoints)))
        return
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--layers", str(size[0]), "--width", str(size[1])]
        command += ["--checkpoints", folder, "--way"]
        subprocess.run([*command, "save"], check=True)
        for name, way in WAYS.items():
            seen = json.loads(subprocess.check_output([*command, way]).splitlines()[-1])
            whole = seen["parameters"]
            rows.append(
                [
                    name,
                    f"{seen['peak'] / whole:.2f}",
                    f"{seen['anonymous'] / whole:.2f}",
                    f"{seen['seconds']:.1f}",
                ]
            )
    print_table(["", "peak / parameters", "without files", "seconds"], rows)
    print(f"\ngpt with {whole / 4e9:.2f} billion parameters, {whole / 2**30:.2f} GiB in fp32.  ")
    print_footer()


if __name__ == "__main__":
    main()
