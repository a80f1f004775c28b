"""Two replicas of one stage each, against a hand-written DistributedDataParallel loop.

Each runs in the same two processes in turn, on gloo, one intra-op thread each; this project's also
with a fixed number of replicas, whose gradients are added in a fixed order.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybridtrain.model import HybridModel
from hybridtrain.world import World
from scripts.bench.common import (
    Processes,
    interleave,
    print_footer,
    print_table,
    shown,
    square_loss,
)
from scripts.bench.real_compute import network as encoder

MODELS = ("encoder", "mlp")


def network(kind: str) -> nn.Sequential:
    """Four encoder layers, or an MLP whose step takes a millisecond."""
    torch.manual_seed(0)
    if kind == "encoder":
        return encoder(4)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())


def batch_of(kind: str) -> Tensor:
    """This process's batch; every process has another."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (8, 64, 256) if kind == "encoder" else (32, 256)
    return torch.randn(shape, generator=generator)


def by_hand(kind: str, steps: int) -> Callable[[], Tensor]:
    """The loop to compare with."""
    x = batch_of(kind)
    net = DistributedDataParallel(network(kind), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def run() -> Tensor:
        for _ in range(steps):
            square_loss(net(x), None).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(net.module)

    return run


def hybrid(kind: str, steps: int, replicas: int | None = None) -> Callable[[], Tensor]:
    """This project's."""
    x = batch_of(kind)
    model = HybridModel(network(kind), World.from_env(devices="cpu", replicas=replicas))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> Tensor:
        for _ in range(steps):
            model.train_step(x, None, square_loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model.net)

    return run


def fixed(kind: str, steps: int) -> Callable[[], Tensor]:
    """This project's, bitwise the same on one process."""
    return hybrid(kind, steps, replicas=2)


def weights(net: nn.Module) -> Tensor:
    """All weights in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=[5, 400], help="steps per figure")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    processes = Processes(2)
    table = []
    for kind, steps in zip(MODELS, options.steps, strict=True):
        names = [
            f"{what} {kind}" for what in ("hand-written", "hybridtrain", "hybridtrain, replicas=2,")
        ]
        for name, build in zip(names, (by_hand, hybrid, fixed), strict=True):
            processes.add(name, build, kind, steps)
        # the same weights in both processes, and in both loops
        final = [tensor for name in names for tensor in processes.run(name)]
        for tensor in final[1:]:
            torch.testing.assert_close(tensor, final[0])
        jobs = {name: lambda name=name: processes.seconds(name) for name in names}
        results = interleave(jobs, options.repeats)
        hand = results[names[0]]
        for name, values in results.items():
            milliseconds = [1e3 * value / steps for value in values]
            ratio = statistics.median(b / a for a, b in zip(hand, values, strict=True))
            table.append([name, shown(milliseconds, "{:.3f}", min), f"{ratio:.3f}"])
    processes.close()
    print_table(["", "ms per step", "ratio"], table)
    print_footer(
        f"2 processes, gloo, SGD, chunks=1; median of {options.repeats}, in brackets the best; the "
        f"ratio is the median of those of neighbours in time."
    )


if __name__ == "__main__":
    main()
