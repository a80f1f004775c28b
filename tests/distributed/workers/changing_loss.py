"""A loss that begins to use another output in its second step; first an inference."""

import copy
import sys

import torch
from support.nets import floats
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain import HybridModel, World


class TwoOutputs(nn.Module):
    """Returns a value of each stage; the first one is used by nothing else in the second stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.a(x)
        return self.c(self.b(first.tanh()).tanh()), first


def main(before: str) -> None:
    net = TwoOutputs()
    plain = copy.deepcopy(net).eval()
    world = World.from_env(2, "cpu", timeout_s=600, engine="distributed")
    x, y = floats(4, 4), floats(4, 2, seed=1)
    model = HybridModel(net, world, chunks=2, split=["b"], example_inputs=x)
    model.eval()
    with torch.inference_mode():
        output = model(x)
    if model.owns_output:
        torch.testing.assert_close(output, plain(x))
    model.train()

    def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        value = F.mse_loss(output[0], targets)
        return value if factor is None else value + factor * output[1].square().mean()

    factor = None if before == "unused" else 0.0
    model.train_step(x, y, loss)
    factor = 0.5
    model.train_step(x, y, loss)
    print("the end was reached")


if __name__ == "__main__":
    main(*sys.argv[2:])  # the first one is for the output
