"""Checks of `engine=distributed` on GPUs: the weights, the speed and the memory of a GPT.

Run it by `scripts/gpu_check.sh --processes N`. N processes are one pipeline of N stages. With a GPU
for each they talk by NCCL; with fewer, they share the GPUs and talk by gloo, which shows that it
works, and not how fast it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridtrain._base.precision import AUTOCAST
from hybridtrain.loss import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models.gpt import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.world import World
from scripts.bench.common import print_table
from scripts.gpu_check import Size


def join(device: str, processes: int) -> World:
    """Returns the World of a pipeline of all processes, on the GPUs that there are."""
    if device == "cpu":
        return World.from_env(processes, "cpu", engine="distributed")
    gpus = torch.cuda.device_count()
    own = f"cuda:{int(os.environ['LOCAL_RANK']) % gpus}"
    backend = None if gpus >= processes else "gloo"
    return World.from_env(processes, [own], backend, engine="distributed")


def plain_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, size: Size, precision: str, ids: Tensor
) -> None:
    """Does a step of the unsplit model, with the gradients of all micro-batches added up."""
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for part in zip(x.split(size.samples), y.split(size.samples), strict=True):
        with torch.autocast(ids.device.type, AUTOCAST[precision], precision != "fp32"):
            loss = cross_entropy(net(part[0]), part[1])
        (loss / size.chunks).backward()
    optimizer.step()
    optimizer.zero_grad()


def build(size: Size) -> nn.Sequential:
    """Returns a GPT without tied weights, which are added up in another order."""
    torch.manual_seed(0)
    return gpt(size.vocabulary, size.length, size.layers, size.heads, size.width)


def exactness(world: World, precision: str) -> tuple[list[str], bool]:
    """Compares this process's weights after 3 steps with those of the unsplit model."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    size = Size(2 * world.nb_part, 64, 4, 32, 256, 2, 2 * world.nb_part)
    torch.manual_seed(1)
    shape = size.samples * size.chunks, size.length + 1
    ids = torch.randint(size.vocabulary, shape).to(world.devices[0])
    plain = build(size).to(world.devices[0])
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = PipelineOptions(chunks=size.chunks, split="size", precision=precision)
    model = HybridModel(build(size), world, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        plain_step(plain, own, size, precision, ids)
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        model.train_step(x, y, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    most = max(
        float((value.detach() - expected[name].detach()).abs().max())
        for name, value in model.named_parameters()
    )
    torch.use_deterministic_algorithms(False)
    most = max(world.gather(most))
    said = "bitwise equal" if most == 0 else f"largest difference {most:.2e}"
    return ["weights after 3 steps", precision, said, "unsplit, on one device"], most == 0


def speed(world: World, small: bool, until: float) -> list[str]:
    """Measures the steps of a GPT over all processes, as far as there is time."""
    size = Size(2, 64, 4, 64, 512, 1, 4, 2) if small else Size(chunks=4 * world.nb_part)
    if size.layers < world.nb_part:
        size = Size(world.nb_part, 64, 4, 64, 512, 1, 4, 2)
    on_gpu = world.devices[0].type == "cuda"
    model = HybridModel.construct(
        lambda: build(size),
        world,
        PipelineOptions(chunks=size.chunks, split="size", precision="bf16"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    torch.manual_seed(1)
    shape = size.samples * size.chunks, size.length + 1
    ids = torch.randint(size.vocabulary, shape).to(world.devices[0])
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    began, steps = 0.0, -2  # the first ones are not counted
    while steps < size.steps:
        if steps == 0:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        model.train_step(x, y, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps > 0 and world.broadcast(time.monotonic() > until):
            break
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    tokens = size.samples * size.chunks * size.length / seconds
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_gpu else "not on a CPU"
    peaks = world.gather(peak)
    setting = f"{size.layers} layers of {size.width}, {size.chunks} micro-batches, bf16"
    return ["speed", setting, f"{tokens:,.0f} tokens/s", f"peak by stage: {', '.join(peaks)}"]


def main() -> int:
    """Runs the checks and prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny GPT, to try the script")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the speed")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --small tries the script without")
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    world = join(options.device, int(os.environ.get("WORLD_SIZE", "1")))
    world.watch(Path(tempfile.gettempdir()) / "hybridtrain-stalls")
    precisions = ["fp32", "bf16"]
    rows, right = [], True
    for precision in precisions:
        row, same = exactness(world, precision)
        rows.append(row)
        right &= same
        if world.is_main:  # a run that is ended early has said it
            print("   ".join(row), file=sys.stderr, flush=True)
    rows.append(speed(world, options.small, until))
    if world.is_main:
        gpus = f"{torch.cuda.device_count()} GPUs" if options.device == "cuda" else "no GPU"
        print(
            f"\n{world.size} processes, {gpus}, {world.backend}, torch {torch.__version__}, "
            f"Python {platform.python_version()}\n"
        )
        print_table(["check", "setting", "result", "beside"], rows)
        if world.backend != "nccl":
            print("not shown: NCCL, which needs a GPU for each process, and any speed")
        print("exact" if right else "FAILED")
    world.close()
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
