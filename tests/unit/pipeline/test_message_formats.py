"""The formats of messages between stages, found on fake tensors, compared with a real forward."""

import torch
from torch import nn

from hybridtrain.loss import LOSSES, resolve
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LossOfStep, Planner, StageOwners
from hybridtrain.pipeline import message_formats


class Skipping(nn.Module):
    """Its first value is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        return self.third(self.second(early)) + early


def test_messages_have_the_shapes_of_a_real_forward_and_carry_what_skips_stages() -> None:
    with torch.device("meta"):
        net = Skipping()
    planner = Planner(net, PipelineOptions(), None, StageOwners.of_cpus(3))
    stages = planner.layers_of(planner.plan()).stages
    loss = LossOfStep(resolve(LOSSES["mse"], net).function, torch.zeros(7, 6))
    formats = message_formats(net, stages, torch.zeros(7, 4), loss, "fp32", 7)
    shapes = [sorted(tensor.shape for tensor in form.tensors) for form in formats]
    assert shapes == [[(7, 6)], [(7, 5), (7, 6)]]
    assert all(tensor.requires_grad for form in formats for tensor in form.tensors)
