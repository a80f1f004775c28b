"""The making of the stages of this process: layers on their devices, and the ends of ties."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import Parameter

from hybridtrain.graph import Layer, Segment, works_in_place
from hybridtrain.machine import Cluster
from hybridtrain.options import PipelineOptions
from hybridtrain.pipeline.activation_checkpoint import CheckpointPolicy
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.layer_runner import LayerRunner
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.reducer import StageReducer
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.ties import (
    AliasElsewhere,
    OwnerElsewhere,
    Tie,
    TiedUse,
    place_with_aliases,
)
from hybridtrain.world import World


def build_stages(
    net: nn.Module,
    parts: Sequence[Sequence[Layer]],
    links: Sequence[Link],
    uses: Sequence[Sequence[TiedUse]],
    world: World,
    options: PipelineOptions,
    groups: Sequence[ProcessGroup | None],
    rng: LayerRNG,
    policy: CheckpointPolicy,
) -> list[Stage]:
    """Brings the layers of this process's stages to their devices, and rank 0's values to all."""
    cluster = world.cluster.placed(options.placement)
    owned = cluster.stages_of(world.pipeline_rank, options.stages_per_device)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    in_place = any(works_in_place(layer.module) for part in parts for layer in part)
    clones = in_place and policy.is_active
    changers = [_changer(part) for part in parts]
    tied = {id(use.parameter) for stage_uses in uses for use in stage_uses}
    stages: list[Stage] = []
    own: list[dict[str, Parameter]] = []
    first = 0
    for index, (part, group) in enumerate(zip(parts, groups, strict=True)):
        if index in owned:
            place = cluster.process_of(index), cluster.device_of(index)
            module = nn.ModuleList(layer.module for layer in part)
            device = world.devices[cluster.local_index(index)]
            crosses = any(
                (cluster.process_of(link.target), cluster.device_of(link.target)) != place
                for link in links
                if link.source == index
            )
            stage = Stage(
                index,
                module,
                device,
                LayerRunner(part, first, module, rng, policy.layers, clones, changers[index], tied),
                links,
                place_with_aliases(module, device, uses[index]),
                clone_outputs=clones,
                # DDP looks for unused parameters from the tensors
                hold_edges=crosses and not (options.find_unused_parameters and group),
                changers=changers,
            )
            aliases = {id(alias.parameter): alias.alias for alias in stage.aliases}
            own.append(
                {
                    names[id(p)]: aliases.get(id(p), p)
                    for p in module.parameters()
                    if id(p) in names  # an alias has no name
                }
            )
            stages.append(stage)
        first += len(part)
    for stage, named in zip(stages, own, strict=True):
        group = groups[stage.index]
        if group is not None:
            unused = options.find_unused_parameters
            stage.reducer = StageReducer(stage.module, named, group, unused)
    return stages


def _changer(layers: Sequence[Layer]) -> str | None:
    """Returns the first layer that may change what another one has made in place.

    A segment of a traced graph does not: what it changes is in no other segment.
    """
    return next(
        (
            one.name
            for one in layers
            if works_in_place(one.module) and type(one.module) is not Segment
        ),
        None,
    )


def ties_of(
    stages: Sequence[Stage], uses: Sequence[Sequence[TiedUse]], world: World, cluster: Cluster
) -> list[Tie]:
    """Returns this process's ends of all ties, in the order of the stages, as on all processes."""
    here, process_of = world.pipeline_rank, cluster.process_of
    own = {stage.index: stage for stage in stages}
    ties: list[Tie] = []
    for index, stage_uses in enumerate(uses):
        user = process_of(index)
        for use in {id(use.parameter): use for use in stage_uses}.values():
            home = process_of(use.owner)
            if user == here:
                alias = next(a for a in own[index].aliases if a.parameter is use.parameter)
                if home == here:
                    ties.append(alias)
                else:
                    ties.append(OwnerElsewhere(alias.alias, world, home))
            elif home == here:
                ties.append(AliasElsewhere(use.parameter, world, user))
    return ties
