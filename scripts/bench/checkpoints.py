"""Seconds to save and to load 500 MiB, and the seconds that a step waits for a save.

The state is a model and AdamW's two moments. All write to the same disk, in turn, into a new
directory, and to the end of `fsync` where the library offers it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint.saving import save_checkpoint as save
from hybridtrain.checkpoint.state import restore_checkpoint as restore
from hybridtrain.checkpoint.store import CheckpointStore
from scripts.bench.common import Job, interleave, print_footer, print_table, shown

WIDTH = 2048


def build(mib: int) -> tuple[HybridModel, torch.optim.Optimizer]:
    """A model whose weights and moments have `mib` MiB, after a step."""
    layers = max(1, round(mib / 3 / (WIDTH * WIDTH * 4 / 2**20)))
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    model = HybridModel(net, World.from_env(nb_part=1, devices="cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def flat(model: HybridModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors under one name each, for the libraries that take no more."""
    moments = optimizer.state_dict()["state"]
    return {
        **model.state_dict(),
        **{f"{number}.{key}": v for number, e in moments.items() for key, v in e.items()},
    }


def sync(path: Path) -> None:
    """Waits until the file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def timed(folder: Path, action: Callable[[Path], object], then: Callable[[], object]) -> Job:
    """Times `action` on a new directory; `then` ends what it leaves behind, untimed."""

    def job() -> float:
        target = folder / "one"
        target.mkdir()
        os.sync()
        start = time.perf_counter()
        action(target)
        seconds = time.perf_counter() - start
        then()
        shutil.rmtree(target)
        return seconds

    return job


def loading(action: Callable[[], object]) -> Job:
    """Times `action`."""

    def job() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return job


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        run(folder, arguments.mib, arguments.repeats)
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()


def run(folder: Path, mib: int, repeats: int) -> None:
    """Measures in `folder`."""
    model, optimizer = build(mib)
    tensors = flat(model, optimizer)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    pending: list[Any] = []
    # its copies in host memory are reused by later saves, as in a run
    background = CheckpointStore(folder / "background", background=True)

    def ours(target: Path) -> None:
        save(CheckpointStore(target), 1, model, optimizer, {})

    def ours_in_background(target: Path) -> None:
        background.root = target
        save(background, 1, model, optimizer, {})

    def torch_save(target: Path) -> None:
        torch.save(tensors, target / "all.pt")
        sync(target / "all.pt")

    def safetensors_save(target: Path) -> None:
        save_file(tensors, target / "all.safetensors")
        sync(target / "all.safetensors")

    def dcp_save(target: Path) -> None:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(target, sync_files=True))

    def dcp_async(target: Path) -> None:
        writer = dcp.FileSystemWriter(target, sync_files=True)
        pending.append(dcp.async_save(tensors, storage_writer=writer))

    def dcp_wait() -> None:
        pending.pop().result()

    def nothing() -> None:
        pass

    saves: dict[str, Job | None] = {
        "torch.save + fsync": timed(folder, torch_save, nothing),
        "safetensors save_file + fsync": timed(folder, safetensors_save, nothing),
        "dcp.save": timed(folder, dcp_save, nothing),
        "hybridtrain": timed(folder, ours, nothing),
        "dcp.async_save, waits": timed(folder, dcp_async, dcp_wait),
        "hybridtrain, async, waits": timed(folder, ours_in_background, background.wait),
    }
    first = saves["hybridtrain, async, waits"]
    assert first is not None
    first_wait = first()
    results = interleave(saves, repeats)
    base = sorted(results["torch.save + fsync"])[len(results["torch.save + fsync"]) // 2]
    rows = []
    for name, seconds in results.items():
        median = sorted(seconds)[len(seconds) // 2]
        rows.append((name, shown(seconds, best=min), f"{median / base:.2f}"))
    print_table([f"saving {size:.0f} MiB", "s", "of torch.save"], rows)

    kept = {name: folder / name for name in ("torch", "safetensors", "dcp", "ours")}
    for name, action in {
        "torch": torch_save,
        "safetensors": safetensors_save,
        "dcp": dcp_save,
        "ours": ours,
    }.items():
        kept[name].mkdir()
        action(kept[name])

    def copied(found: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.detach().copy_(found[name])

    loads: dict[str, Job | None] = {
        "torch.load, mmap": loading(
            lambda: copied(torch.load(kept["torch"] / "all.pt", mmap=True, weights_only=True))
        ),
        "safetensors load_file": loading(
            lambda: copied(load_file(kept["safetensors"] / "all.safetensors"))
        ),
        "dcp.load": loading(
            lambda: dcp.load(tensors, storage_reader=dcp.FileSystemReader(kept["dcp"]))
        ),
        "hybridtrain, checksums included": loading(
            lambda: restore(kept["ours"] / "step_00000001", model, optimizer)
        ),
    }
    rows = [(n, shown(s, best=min)) for n, s in interleave(loads, repeats).items()]
    print_table([f"loading {size:.0f} MiB", "s"], rows)
    print_footer(
        f"Medians and, in brackets, the best of {repeats}. The first save in the background "
        f"waits {first_wait:.3f} s, for its memory. safetensors {safetensors.__version__}."
    )


if __name__ == "__main__":
    main()
