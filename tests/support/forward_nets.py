"""A small model with code between its layers, for tests of pipelines that run its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain import HybridModel, World

ROWS, CHUNKS = 7, 3


class Net(nn.Module):
    """Four layers with code between them; in two or three stages, `a` and `d` are far apart.

    Subclasses add members in `prepare`, and replace `forward`, or its part between `a` and `d`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.prepare()

    def prepare(self) -> None:
        pass

    def forward(self, x: Tensor) -> Any:
        return self.d(self.middle(self.a(x).tanh()))

    def middle(self, x: Tensor) -> Tensor:
        return self.c(self.b(x).tanh()).tanh()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 8, generator=generator)


def pipeline(net: nn.Module, nb_part: int = 2, **options: Any) -> HybridModel:
    world = World.from_env(nb_part=nb_part, devices="cpu")
    return HybridModel(net, world, **{"chunks": CHUNKS, "example_inputs": batch()[0]} | options)


def plain_step(
    net: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Any, Tensor], Tensor] = F.mse_loss
) -> None:
    """Adds to the gradients what `train_step` of a pipeline adds."""
    for part, target in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True):
        (loss(net(part), target) * (len(part) / len(x))).backward()
