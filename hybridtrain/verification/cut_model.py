"""A cut model, as the automatic checks compare it with the unsplit module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtrain._base.values import leaves_of
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Plan, PlannedLayers
from hybridtrain.world import World

SAMPLES = 2
"""The number of samples of a micro-batch that the check uses."""

MAX_BYTES = 4 * 2**30
"""Models with more bytes of parameters and buffers are never run on numbers. A run on numbers needs
about four times the memory of the model."""

MAX_SECONDS = 5.0
"""The check on numbers is skipped if one forward and backward of the cut model takes longer."""


class CutModel(NamedTuple):
    """A module and its cut into stages.

    Attributes:
        net: the module; parameters held by other processes are on the meta device.
        plan: the layers of each stage.
        planned: the layers.
        options: the pipeline options of the run.
        world: the processes and devices of the run.
    """

    net: nn.Module
    plan: Plan
    planned: PlannedLayers
    options: PipelineOptions
    world: World

    @property
    def is_partial(self) -> bool:
        """True if other processes hold some of the parameters or buffers."""
        return any(tensor.is_meta for tensor in (*self.net.parameters(), *self.net.buffers()))


def root_of(output: Any) -> Tensor | None:
    """Returns a scalar that depends on all outputs that require a gradient, or None without any."""
    # Fixed: both runs must weight the outputs alike, and no draw of the model may move.
    generator = torch.Generator().manual_seed(0)
    total: Tensor | None = None
    for leaf in leaves_of(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            # Random and not ones: a sum of a softmax, for example, is constant and has no gradient.
            weights = torch.rand(values.shape, generator=generator, dtype=torch.float64)
            product = (values * weights.to(values.device, values.dtype)).sum().float()
            total = product if total is None else total + product
    return total
