"""Builds the stages of this process: layers on their devices, and the ends of ties.

Only `engine="distributed"` needs this file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import Parameter

from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer, Segment, SegmentGraph, VariantCut, works_in_place
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import RecomputePolicy, StageOwners
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.layer_runner import LayerRunner
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.reducer import LocalReducer, StageReducer
from hybridtrain.pipeline.stage import Connection, Stage
from hybridtrain.pipeline.ties import (
    AliasElsewhere,
    OwnerElsewhere,
    Tie,
    TiedUse,
    place_with_aliases,
)
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.pipeline.forward.stage import ForwardStage


def build_stages(
    net: nn.Module,
    parts: Sequence[Sequence[Layer]],
    links: Sequence[Link],
    uses: Sequence[Sequence[TiedUse]],
    world: World,
    options: PipelineOptions,
    groups: Sequence[ProcessGroup | None],
    rng: LayerRNG,
    policy: RecomputePolicy,
) -> list[Stage]:
    """Moves this process's layers to their devices, and broadcasts rank 0's values."""
    owners = world.stage_owners.placed(options.placement)
    owned = owners.stages_of(world.pipeline_rank, options.stages_per_device)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    tied = tied_parameters(uses)
    stages: list[Stage] = []
    own_parameters: list[dict[str, Parameter]] = []
    connections = connections_of(parts, links, world, options, groups, rng, policy, tied)
    for index, (part, connection) in enumerate(zip(parts, connections, strict=True)):
        if index not in owned:
            continue
        module = nn.ModuleList(layer.module for layer in part)
        device = world.devices[owners.local_index(index)]
        aliases = place_with_aliases(module, device, uses[index])
        # parameters of other stages are exact in one process, where all gradients are
        own_names = names if world.size > 1 else None
        stage = Stage(index, module, device, part, connection, aliases, own_names)
        alias_of = {id(alias.parameter): alias.alias for alias in stage.aliases}
        own_parameters.append(
            {
                names[id(p)]: alias_of.get(id(p), p)
                for p in module.parameters()
                if id(p) in names  # aliases have no names
            }
        )
        stages.append(stage)
    for stage, named in zip(stages, own_parameters, strict=True):
        group = groups[stage.index]
        unused = options.find_unused_parameters
        if group is not None:
            stage.reducer = StageReducer(stage.module, named, group, unused, world)
        elif world.logical_replicas > 1:
            stage.reducer = LocalReducer(named, world)
    return stages


def tied_parameters(uses: Sequence[Sequence[TiedUse]]) -> set[int]:
    """Returns the identities of the parameters that stages share."""
    return {id(use.parameter) for stage_uses in uses for use in stage_uses}


def connections_of(
    parts: Sequence[Sequence[Layer]],
    links: Sequence[Link],
    world: World,
    options: PipelineOptions,
    groups: Sequence[ProcessGroup | None],
    rng: LayerRNG,
    policy: RecomputePolicy,
    tied: Collection[int],
) -> list[Connection]:
    """Returns the runner of each stage's layers, with the links over its borders."""
    owners = world.stage_owners.placed(options.placement)
    in_place = any(works_in_place(layer.module) for part in parts for layer in part)
    clones = in_place and policy.is_active
    changers = [_changer(part) for part in parts]
    connections: list[Connection] = []
    first = 0
    for index, (part, group) in enumerate(zip(parts, groups, strict=True)):
        place = owners.process_of(index), owners.device_of(index)
        crosses = any(
            (owners.process_of(link.target), owners.device_of(link.target)) != place
            for link in links
            if link.source == index
        )
        module = nn.ModuleList(layer.module for layer in part)
        connections.append(
            Connection(
                LayerRunner(part, first, module, rng, policy.layers, clones, changers[index], tied),
                links,
                clone_outputs=clones,
                # DDP looks for unused parameters from the tensors
                hold_edges=crosses and not (options.find_unused_parameters and group),
                changers=changers,
            )
        )
        first += len(part)
    return connections


def _changer(layers: Sequence[Layer]) -> str | None:
    """Returns the first layer that may change another layer's result in place.

    A segment of a traced graph does not: no other segment has the tensors that it changes.
    """
    return next(
        (
            layer.name
            for layer in layers
            if works_in_place(layer.module) and type(layer.module) is not Segment
        ),
        None,
    )


def ties_of(
    stages: Sequence[Stage | ForwardStage],
    uses: Sequence[Sequence[TiedUse]],
    world: World,
    owners: StageOwners,
) -> list[Tie]:
    """Returns this process's ends of all ties, in stage order, the same on all processes."""
    here, process_of = world.pipeline_rank, owners.process_of
    stage_at = {stage.index: stage for stage in stages}
    ties: list[Tie] = []
    for index, stage_uses in enumerate(uses):
        user = process_of(index)
        for use in {id(use.parameter): use for use in stage_uses}.values():
            home = process_of(use.owner)
            if user == here:
                alias = next(a for a in stage_at[index].aliases if a.parameter is use.parameter)
                if home == here:
                    ties.append(alias)
                else:
                    ties.append(OwnerElsewhere(alias.alias, world, home))
            elif home == here:
                ties.append(AliasElsewhere(use.parameter, world, user))
    return ties


def check_variant(variant: VariantCut, parts: Sequence[Sequence[Layer]]) -> None:
    """Checks that the stages have the tensors that the graphs of another variant use.

    Raises:
        SplitError: a stage does not; the message names the layer.
    """
    cuts = zip(variant.graphs, variant.owners, strict=True)
    position = 0
    for index, part in enumerate(parts):
        if position in variant.no_cut_before:
            raise SplitError(f"a tensor is changed in place on both sides of {part[0].name!r}")
        position += len(part)
        stage = nn.ModuleList(layer.module for layer in part)
        held = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        for layer, (graphs, owners) in zip(part, cuts, strict=False):
            for graph in graphs:
                for tensor_name, tensor in _tensors_of_model(graph, owners).items():
                    if id(tensor) not in held:
                        raise SplitError(
                            f"it uses {tensor_name} in stage {index}, with layer {layer.name!r}, "
                            "but that stage does not have it"
                        )


def _tensors_of_model(graph: SegmentGraph, owners: Collection[str]) -> dict[str, Tensor]:
    """Returns the parameters and buffers of the model that a graph uses, by their names."""
    tensors: dict[str, Tensor] = {}
    for target, module in graph.modules.items():
        named = (*module.named_parameters(), *module.named_buffers())
        tensors |= {f"{target}.{name}": tensor for name, tensor in named}
    for target, name in graph.attrs.items():
        tensor = getattr(graph.module, name)
        if target in owners or isinstance(tensor, Parameter):
            tensors[target] = tensor
    return tensors
