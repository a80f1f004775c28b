"""Message formats between the stages of a plan, without values, devices or processes.

Only `engine="distributed"` needs this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import nn

from hybridtrain._base import codec
from hybridtrain._base.precision import autocast
from hybridtrain.graph import Layer
from hybridtrain.partitioning import LossOfStep, chain_inputs
from hybridtrain.pipeline.boundary import check_sendable
from hybridtrain.pipeline.links import PRIMARY_OUTPUT, crossing, links_between
from hybridtrain.pipeline.messages import MessageFormat, pack, to_bytes


def message_formats(
    net: nn.Module,
    stages: Sequence[Sequence[Layer]],
    inputs: Any,
    loss: LossOfStep,
    precision: str,
    samples: int,
) -> list[MessageFormat]:
    """Returns the format of the message over each border between two stages, in the forward.

    The layers and the loss run on fake tensors, forward and backward. A backward sends a gradient
    of the same shape for each tensor that requires one.

    Args:
        net: the model, also on the meta device.
        stages: the layers of each stage.
        inputs: the inputs of a micro-batch; only shapes and types matter.
        loss: the loss that ends the last stage.
        precision: `fp32`, `bf16` or `fp16`.
        samples: the number of samples in the micro-batch.

    Raises:
        NotOnFakesError: a layer, or the loss, fails for these shapes.
        SplitError: a value cannot be sent to another process.
    """
    layers = [layer for stage in stages for layer in stage]
    context = partial(autocast, precision, "cpu")  # fake tensors are on the CPU
    received = chain_inputs(layers, inputs, precision=context, loss=loss.layer(samples))
    skipped = {name: value for _, popped in received for name, value in popped.items()}
    codec.allow(codec.classes_around({type(module) for module in net.modules()}))
    links = links_between(stages)
    formats = []
    for border, first in enumerate(list(accumulate(map(len, stages)))[:-1]):
        message = []
        for link in crossing(links, border):
            skipped[PRIMARY_OUTPUT] = received[first][0]
            part = tuple(skipped[name] for name in link.names)
            check_sendable(part, link, stages[link.source][-1].name)
            message.append(part)
        form, _ = pack(message, unique=True)
        to_bytes(form)
        formats.append(form)
    return formats
