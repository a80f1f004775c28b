"""A real model on two cores: two stages, one intra-op thread each, against one thread unsplit.

With P stages on as many cores and m micro-batches, a pipeline can be m P / (m + P - 1) times as
fast as one core: 1.6 for m=4 and P=2, 1.78 for m=8.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hybridtrain.model import HybridModel
from hybridtrain.world import World
from scripts.bench.common import (
    Processes,
    gpipe_library,
    interleave,
    optional,
    print_footer,
    print_table,
    shown,
    square_loss,
    timed,
)
from tests.support.compare import CLOSE, assert_same_gradients, plain_step

LAYERS, WIDTH, STAGES = 8, 256, 2


def network(layers: int = LAYERS) -> nn.Sequential:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(WIDTH, 4, 1024, dropout=0.0, batch_first=True)
            for _ in range(layers)
        ]
    )


def batch(samples: int, length: int) -> Tensor:
    """The same samples wherever it is called."""
    return torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(1))


def unsplit(net: nn.Sequential, x: Tensor, chunks: int) -> Callable[[], None]:
    """A step of the plain model: gradient accumulation over the same micro-batches."""

    def step() -> None:
        for samples in x.chunk(chunks):
            (square_loss(net(samples), None) / chunks).backward()
        net.zero_grad()

    return step


def hybrid(
    x: Tensor, chunks: int, schedule: str = "1f1b", per_device: int = 1
) -> tuple[HybridModel, Callable[[], None]]:
    """A step of this project's."""
    model = HybridModel(
        network(),
        World.from_env(STAGES, devices="cpu"),
        chunks=chunks,
        schedule=schedule,
        stages_per_device=per_device,
    )

    def step() -> None:
        model.train_step(x, None, square_loss)
        model.zero_grad()

    return model, step


def peer(x: Tensor, chunks: int) -> Callable[[], None]:
    """A step of torchgpipe's."""
    model = gpipe_library(network(), [LAYERS // STAGES] * STAGES, chunks)

    def step() -> None:
        square_loss(model(x), None).backward()
        model.zero_grad()

    return step


def torch_pipelining(samples: int, length: int, chunks: int) -> Callable[[], None]:
    """This process's part of a step of torch.distributed.pipelining's."""
    rank, per_stage = dist.get_rank(), LAYERS // STAGES
    net = network()[rank * per_stage : (rank + 1) * per_stage]
    stage = PipelineStage(net, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, chunks, loss_fn=square_loss)
    x, y = batch(samples, length), torch.zeros(samples)

    def step() -> None:
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, return_outputs=False)
        net.zero_grad()

    return step


def over_processes(samples: int, length: int, chunks: int) -> Callable[[], None]:
    """This process's part of a step of this project's `engine=distributed`."""
    world = World.from_env(STAGES, devices="cpu", engine="distributed")
    x, model = batch(samples, length), HybridModel(network(), world, chunks=chunks)

    def step() -> None:
        model.train_step(x, None, square_loss)
        model.zero_grad()

    return step


def half(samples: int, length: int, chunks: int, alone: bool) -> Callable[[], None] | None:
    """Half the layers in each process, or in the first alone: what the second core is worth."""
    if alone and dist.get_rank():
        return None
    return unsplit(network(LAYERS // STAGES), batch(samples, length), chunks)


def check(x: Tensor, chunks: int) -> None:
    """All do the same work: the gradients of a step are those of the plain model."""
    net, (model, _) = network(), hybrid(x, chunks)
    plain_step(net, x, None, square_loss, chunks)
    model.train_step(x, None, square_loss)
    assert_same_gradients(model, net, **CLOSE)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=112)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    processes = Processes(STAGES)
    x = batch(options.samples, options.length)
    rows = []
    for chunks in options.chunks:
        check(x, chunks)
        sizes = options.samples, options.length, chunks
        processes.add("torch", torch_pipelining, *sizes)
        processes.add("ours", over_processes, *sizes)
        for alone in (True, False):
            processes.add(f"half {alone}", half, *sizes, alone)
        times = interleave(
            {
                "one thread, unsplit": timed(unsplit(network(), x, chunks)),
                "torchgpipe": timed(peer(x, chunks)) if optional("torchgpipe") else None,
                "torch.distributed.pipelining": lambda: processes.seconds("torch"),
                "hybridtrain": timed(hybrid(x, chunks)[1]),
                "hybridtrain, zb-h1": timed(hybrid(x, chunks, "zb-h1")[1]),
                "hybridtrain, zb-v": timed(hybrid(x, chunks, "zb-v", 2)[1]),
                "hybridtrain, engine=distributed": lambda: processes.seconds("ours"),
                "alone": lambda: processes.seconds("half True"),
                "both": lambda: processes.seconds("half False"),
            },
            options.repeats,
        )
        slower = [b / a for a, b in zip(times.pop("alone"), times.pop("both"), strict=True)]
        one = statistics.median(times["one thread, unsplit"])
        bound = chunks * STAGES / (chunks + STAGES - 1)
        for name, seconds in times.items():
            ratio = one / statistics.median(seconds or [one])
            cells = [f"{ratio:.2f}", f"{ratio / bound:.3f}"] if seconds else ["", ""]
            rows.append([f"m={chunks}: {name}", shown(seconds, best=min), *cells])
        contention = statistics.median(slower)
        for name, factor in (("bound", 1.0), ("bound with two cores at work", contention)):
            cells = f"{one / bound * factor:.3f}", f"{bound / factor:.2f}", f"{1 / factor:.3f}"
            rows.append([f"m={chunks}: {name}", *cells])
    processes.close()
    print_table(["", "seconds per step", "over one thread", "of the bound"], rows)
    print_footer(
        f"{LAYERS} encoder layers of width {WIDTH}, {options.samples} samples of {options.length}, "
        f"two stages, 1F1B unless said otherwise (torchgpipe has its own schedule), one "
        f"intra-op thread each; median of {options.repeats}, in brackets the best. The "
        f"last line counts that a core is slower while the other one works: "
        f"measured on half of the layers, in one process alone and in two at a time."
    )


if __name__ == "__main__":
    main()
