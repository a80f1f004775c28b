"""A process of a measured cell: `torchrun ... -m scripts.bench.grid.worker TASK RESULT`.

TASK is JSON, see `measure.py`; rank 0 writes the median time of a step into the file RESULT.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain._base.files import write_atomically
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.components import build_model_optimizer
from hybridtrain.data.loader import TrainLoader
from hybridtrain.model import HybridModel
from hybridtrain.world import World
from scripts.bench.common import mean_loss
from scripts.bench.grid.predict import RECIPE
from scripts.bench.grid.reviews import load_reviews

Step = Callable[[], object]


class Sleep(nn.Module):
    """A stage that takes so many seconds and computes nothing."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.seconds = forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the same values, later."""
        slept: Tensor = _Sleep.apply(x, self.weight, *self.seconds)
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], torch.zeros(()), None, None


def emulated(task: Mapping[str, Any]) -> tuple[World, Step, dict[str, Any]]:
    """Returns a step on devices that sleep."""
    nb_part, chunks = task["nb_part"], task["cell"]["chunks"]
    world = World.from_env(nb_part, devices="cpu")
    scale = task["stretch"] / 1e3
    stages = zip(*task["stage_ms"], strict=True)
    net = nn.Sequential(*(Sleep(f * scale, b * scale) for f, b in stages))
    model = HybridModel(net, world, chunks=chunks, schedule=task["schedule"])
    x = torch.ones(chunks, 1)
    return world, lambda: model.train_step(x, None, mean_loss), {}


def real(task: Mapping[str, Any]) -> tuple[World, Step, dict[str, Any]]:
    """Returns an optimizer step of the recipe's model on its reviews."""
    cell = task["cell"]
    config = compose_config([RECIPE, *task["overrides"]])
    world = World.from_env(task["nb_part"], devices=config.world.devices)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high" if config.trainer.tf32 else "highest")
    data, synthetic = load_reviews(config, world)
    model = HybridModel(
        instantiate.build("model", config.model, nn.Module, defaults=data.metadata),
        world,
        chunks=cell["chunks"],
        schedule=task["schedule"],
        split=task["layers"],
        precision=config.trainer.precision,
    )
    optimizer = build_model_optimizer(config.optim, model)
    samples = cell["devices"] * cell["batch_per_device"]
    batches = TrainLoader(data.train, samples, world).stream()

    def step() -> None:
        batch = next(batches)
        model.train_step(batch.inputs, batch.targets, nn.functional.cross_entropy)
        model.clip_grad_norm_(config.trainer.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        for device in world.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    on_gpus = world.devices[0].type == "cuda"
    name = torch.cuda.get_device_name(world.devices[0]) if on_gpus else "CPU stages"
    return world, step, {"device": name, "synthetic": synthetic}


def main() -> None:
    """Runs one step to warm up and some that are timed."""
    task = json.loads(sys.argv[1])
    world, step, facts = (emulated if task["kind"] == "emulated" else real)(task)
    times = []
    for _ in range(1 + task["steps"]):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    if world.is_main:
        step_ms = statistics.median(times[1:]) * 1e3 / task.get("stretch", 1.0)
        found = {"step_ms": step_ms, "facts": facts}
        write_atomically(Path(sys.argv[2]), json.dumps(found))
    world.close()


if __name__ == "__main__":
    main()
