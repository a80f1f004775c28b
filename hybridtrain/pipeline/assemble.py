"""From layers in runs to stages on devices, linked, tied and replicated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hybridtrain.graph.layer import Layer
from hybridtrain.pipeline.activation_checkpoint import CheckpointPolicy, works_in_place
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.links import links_between
from hybridtrain.pipeline.reducer import replicate
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.ties import tied_uses
from hybridtrain.world import World


def build_stages(
    net: nn.Module,
    parts: Sequence[Sequence[Layer]],
    world: World,
    draws: LayerRNG,
    recompute: CheckpointPolicy,
    find_unused_parameters: bool,
) -> list[Stage]:
    """A stage for each of `parts`; stage `s` is on device `s % world.nb_part`.

    A collective call: the layers are brought to their devices, and rank 0's values to all ranks.

    Args:
        net: the model whose layers they are.
        parts: the layers of each stage.
        world: the devices and the replicas.
        draws: what seeds the random draws of the layers.
        recompute: what is recomputed.
        find_unused_parameters: as in DDP.

    Raises:
        SplitError: values that the parts share cannot be shared so.
    """
    links = links_between(parts)
    slots = tied_uses([[layer.module for layer in part] for part in parts])
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    devices = [world.devices[index % world.nb_part] for index in range(len(parts))]
    in_place = any(works_in_place(layer.module) for part in parts for layer in part)
    keeps_apart = in_place and recompute != CheckpointPolicy()
    stages: list[Stage] = []
    first = 0
    for index, part in enumerate(parts):
        stage = Stage(
            index,
            part,
            first,
            devices,
            draws,
            links,
            slots[index],
            recompute.layers,
            names,
            keeps_apart=keeps_apart,
        )
        stage.replica = replicate(
            stage.module,
            dict(stage.named_parameters()),
            world.new_group(),
            find_unused_parameters=find_unused_parameters,
        )
        stages.append(stage)
        first += len(part)
    return stages
