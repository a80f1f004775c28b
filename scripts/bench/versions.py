"""Measures one version of hybridtrain, to be compared with another one in turn.

    for i in 1 2 3 4 5; do for clone in old new; do
        PYTHONPATH=$clone python new/scripts/bench/versions.py | tee -a $clone.jsonl
    done; done

Prints a line of JSON: host cost in microseconds per stage and micro-batch, the loop in microseconds
per step, real compute in seconds per step. It uses the part of the API that all versions have.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import splits
from hybridtrain.data.loader import TrainLoader

CHUNKS, STEPS = 64, 2000


def median_s(step: Callable[[], object], repeats: int, warm_up: int = 5) -> float:
    """Returns the median seconds of `step`."""
    times = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def host_us(stages: int, schedule: str) -> float:
    """Returns the cost of stages that compute next to nothing."""
    net, world = nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages)]), World.from_env(stages)
    model, x = HybridModel(net, world, chunks=CHUNKS, schedule=schedule), torch.randn(CHUNKS, 4)
    step_s = median_s(lambda: model.train_step(x, None, lambda output, _: output.mean()), 40)
    return 1e6 * step_s / CHUNKS / stages


def loop_us() -> float:
    """Returns the time of a step of the training loop on a small MLP."""
    net = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    model = HybridModel(net, World.from_env(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    in_memory = getattr(splits, "InMemoryDataset", None) or splits.TensorRows  # words: ok
    data = in_memory(torch.randn(2048, 32), torch.randint(10, (2048,)))
    loader = TrainLoader(data, 32, model.world)
    trainer = Trainer(model, optimizer, F.cross_entropy, loader, steps=STEPS, log_every=10)
    return 1e6 * median_s(trainer.fit, 1, 0) / STEPS


def real_compute_s(chunks: int) -> float:
    """Returns the time of a step of eight encoder layers in two stages."""
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(8)]
    torch.set_num_threads(2)  # one per stage
    model = HybridModel(nn.Sequential(*layers), World.from_env(2), chunks=chunks)
    torch.set_num_threads(1)
    x, y = torch.randn(16, 112, 256), torch.randn(16, 112, 256)
    return median_s(lambda: model.train_step(x, y, F.mse_loss), 7, 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = {f"host P={p} {s}": host_us(p, s) for p in (1, 2, 4, 8) for s in ("gpipe", "1f1b")}
    figures |= {"loop": min(loop_us() for _ in range(3))}
    figures |= {f"real compute m={chunks}": real_compute_s(chunks) for chunks in (4, 8)}
    print(json.dumps(figures))
