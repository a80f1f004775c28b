"""The reference: the unsplit model in plain PyTorch, in one process, over the same micro-batches.

A step minimizes the mean over everything that the loss counts in the whole step. Gradients are
added up micro-batch by micro-batch for each replica, and then over the replicas, as data
parallelism does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scripts.bench.exactness.cases import (
    LEARNING_RATE,
    MOMENTUM,
    Case,
    Dropout,
    Masks,
    Replayed,
    share,
)

WEIGHINGS = ("mean times share", "sum over count")


def train(
    case: Case, weighing: str = WEIGHINGS[0], masks: Masks | None = None
) -> dict[str, Tensor]:
    """Returns the weights and buffers after all steps.

    Args:
        case: the model and its data.
        weighing: the two ways to write the loss of a micro-batch, which round differently: its mean
            times its share in the count of the step, or its sum over that count.
        masks: of the dropout layers by position, in the order of steps, replicas and micro-batches.
    """
    layers = case.model()
    for position, layer in enumerate(layers):
        if isinstance(layer, Dropout):
            layers[position] = Replayed((masks or {})[str(position)])
    net = nn.Sequential(*layers).train()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM)
    first_buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    for batches in case.steps():
        total = case.count(torch.cat([targets for _, targets in batches]))
        replica_buffers, gradients = [], []
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for replica in range(case.logical_replicas):
            _load(net, buffers)  # of replica 0
            optimizer.zero_grad()
            for batch in batches:
                part = share(batch, replica, case.logical_replicas)
                for number in range(case.microbatches):
                    inputs, targets = share(part, number, case.microbatches)
                    if weighing == WEIGHINGS[0]:
                        fraction = case.count(targets) / total
                        case.loss()(net(inputs), targets).backward(fraction)
                    else:
                        (case.loss_sum()(net(inputs), targets) / total).backward()
            gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
            replica_buffers.append({name: b.clone() for name, b in net.named_buffers()})
        _load(net, replica_buffers[0])
        for parameter, *sums in zip(parameters, *gradients, strict=True):
            parameter.grad = sum(sums[1:], sums[0])
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
    assert first_buffers.keys() == dict(net.named_buffers()).keys()
    return values(layers)


def first_weights(case: Case) -> dict[str, Tensor]:
    """Returns the weights and buffers before the first step."""
    return values(case.model())


def values(layers: list[nn.Module], first: int = 0) -> dict[str, Tensor]:
    """Returns the weights and buffers of layers by position, of which the first one is `first`."""
    return {
        f"{position}.{name}": value.detach().clone()
        for position, layer in enumerate(layers, first)
        for name, value in layer.state_dict().items()
    }


def _load(net: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
