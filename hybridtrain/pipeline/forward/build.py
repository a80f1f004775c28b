"""Builds the stages of a pipeline that runs the model's own forward, and its engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridtrain._base.skip import popped_by
from hybridtrain._base.torch_private import prepare_compiler, repeat_compiled_results
from hybridtrain.graph import works_in_place
from hybridtrain.head import install as install_head
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import PlannedLayers, RecomputePolicy
from hybridtrain.pipeline.forward.engine import ForwardEngine
from hybridtrain.pipeline.forward.layers import LayersOfStage, install
from hybridtrain.pipeline.forward.part_engine import PartEngine
from hybridtrain.pipeline.forward.places import places_of
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.forward.values import Model
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.offload import DeviceMemory, StageOffload
from hybridtrain.pipeline.reducer import LocalReducer, StageReducer
from hybridtrain.pipeline.ties import Alias, TiedUse, place_with_aliases
from hybridtrain.world import World


def build_forward_stages(
    net: nn.Module,
    planned: PlannedLayers,
    world: World,
    options: PipelineOptions,
    groups: Sequence[ProcessGroup | None],
    rng: LayerRNG,
    policy: RecomputePolicy,
    ties: Sequence[Sequence[TiedUse]],
) -> list[ForwardStage]:
    """Moves the layers to the devices of this process's stages, and broadcasts rank 0's values.

    A parameter that several stages use belongs to the first of them, and one that only code between
    layers uses to the stage of that code.
    """
    parts = planned.stages
    layers = [layer for part in parts for layer in part]
    # the code must not depend on the shapes that a process has seen before, such as a short batch
    static = policy.is_active or world.repeats_bits
    if options.compile:
        prepare_compiler(len(layers), static)
        if world.repeats_bits:
            repeat_compiled_results()
    # Before `LayersOfStage`, which asks whether a layer's call is a head's.
    install_head(net, planned.head.names)
    owner = owners_of(planned, net, world.processes_per_replica > 1)
    owned_stages = owners_in(world, options)
    # within a process, a shared parameter crosses like any other value
    tied_in = [[] for _ in parts] if world.processes_per_replica == 1 else ties
    uses = [{id(p) for layer in part for p in layer.module.parameters()} for part in parts]
    # parameters that the code of their first stage uses, and no layer of it has
    of_code: list[list[nn.Parameter]] = [[] for _ in parts]
    for parameter in net.parameters():
        home = owner[id(parameter)]
        if id(parameter) not in uses[home]:
            of_code[home].append(parameter)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    # Of any stage: a tensor that one layer keeps for its recomputation may be changed by another.
    in_place = policy.is_active and any(works_in_place(layer.module) for layer in layers)
    tied = frozenset(number for number in names if sum(number in of_stage for of_stage in uses) > 1)
    placed: dict[int, tuple[Tensor, Tensor] | None] = {}
    memories: dict[torch.device, DeviceMemory] = {}
    stages: list[ForwardStage] = []
    firsts = [0, *accumulate(map(len, parts))]
    owners = world.stage_owners.placed(options.placement)
    for index in owned_stages:
        part = parts[index]
        device = world.devices[owners.local_index(index)]
        module = nn.ModuleList(layer.module for layer in part)
        if of_code[index]:
            module.append(nn.ParameterList(of_code[index]))
        aliases: list[Alias] = []
        # Before `_place`, which would otherwise move the owner's parameter.
        if tied_in[index]:
            aliases = place_with_aliases(module, device, tied_in[index])
            for alias in aliases:
                owner[id(alias.alias)] = index
                names[id(alias.alias)] = names[id(alias.parameter)]
        _place(module, device, placed)
        owned = [p for p in module.parameters() if owner.get(id(p)) == index]
        runs = LayersOfStage(
            part, firsts[index], rng, policy.layers, options.compile, static, in_place, tied
        )
        stage = ForwardStage(index, module, owned, device, runs, owner)
        stage.aliases = aliases
        if options.offload != "none":
            if device not in memories:
                memories[device] = DeviceMemory(device)
            stage.offload = StageOffload(memories[device])
        stages.append(stage)
    _place(net, world.devices[0], placed)  # what no layer has
    moves = len({stage.device for stage in stages}) > 1
    for stage in stages:
        install([layer.module for layer in stage.layers], stage.device if moves else None)
    elsewhere = [
        layer.module for k, part in enumerate(parts) if k not in owned_stages for layer in part
    ]
    install(elsewhere)
    install([net.get_submodule(name) for name in planned.opened.values()])
    # In the order of the stages: DDP's constructor is a collective call of the stage's group.
    for stage in stages:
        group = groups[stage.index]
        named = {
            names[id(p)]: p for p in stage.module.parameters() if owner.get(id(p)) == stage.index
        }
        if group is not None:
            unused = options.find_unused_parameters
            stage.reducer = StageReducer(stage.module, named, group, unused, world)
            stage.check_parameters(frozenset(map(id, named.values())), names)
        elif world.logical_replicas > 1:
            stage.reducer = LocalReducer(named, world)
    first = stages[0].reducer
    if isinstance(first, StageReducer):
        first.also_sync(_buffers_of_code(net, [layer.module for layer in layers]))
    return stages


def _buffers_of_code(
    net: nn.Module, layers: Sequence[nn.Module]
) -> list[tuple[dict[str, Tensor | None], str]]:
    """Returns the places of the buffers that no layer has, which code between layers uses."""
    inside = {id(buffer) for layer in layers for buffer in layer.buffers()}
    return [
        (module._buffers, name)
        for module in net.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, buffer in module._buffers.items()
        if buffer is not None and id(buffer) not in inside
    ]


def owners_of(planned: PlannedLayers, net: nn.Module, has_parts: bool = False) -> dict[int, int]:
    """Returns the stage that owns each parameter, by its `id`: the first that uses it.

    Its reducer averages the gradient, so the gradients of all later stages must reach it first. If
    processes have parts of the model, a layer's parameter belongs to the layer's stage even if
    earlier code uses it, which is then refused.
    """
    parts = planned.stages
    stage_of_layer = [stage for stage, part in enumerate(parts) for _ in part]
    owner: dict[int, int] = {}
    for index, part in enumerate(parts):
        for layer in part:
            for parameter in layer.module.parameters():
                owner.setdefault(id(parameter), index)
    for name, parameter in net.named_parameters():
        if has_parts and id(parameter) in owner:
            continue
        first = planned.first_uses.get(name)
        stage = owner.get(id(parameter), 0 if first is None else len(parts))
        owner[id(parameter)] = stage if first is None else min(stage, stage_of_layer[first])
    return owner


def of_other_code(net: nn.Module, planned: PlannedLayers, owned: Sequence[int]) -> set[int]:
    """Returns the `id`s of parameters that only code in stages of other processes uses."""
    inside = {id(p) for part in planned.stages for k in part for p in k.module.parameters()}
    homes = owners_of(planned, net, has_parts=True)
    return {k for k, home in homes.items() if k not in inside and home not in owned}


def containers_of(net: nn.Module, layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Returns the modules of a model, by name, that contain one of the layers."""
    modules = dict(net.named_modules(remove_duplicate=False))
    numbers = {id(layer) for layer in layers}
    paths = [name.split(".") for name, module in modules.items() if name and id(module) in numbers]
    names = {".".join(path[:length]) for path in paths for length in range(len(path))}
    return {name: modules[name] for name in names}


def forward_engine(
    net: nn.Module,
    planned: PlannedLayers,
    stages: Sequence[ForwardStage],
    world: World,
    options: PipelineOptions,
    rng: LayerRNG,
) -> ForwardEngine:
    """Returns the engine of a pipeline; see `build_forward_stages`."""
    owner = stages[0].owner_of
    own = {stage.index: stage for stage in stages}
    owners = world.stage_owners.placed(options.placement)
    devices = [world.devices[owners.local_index(k)] for k in range(len(planned.stages))]
    moves = len(own) == len(devices) and len(set(devices)) > 1
    if len(own) == len(devices):
        for stage in stages:
            for position, layer in enumerate(stage.layers):
                shares = any(owner[id(p)] < stage.index for p in layer.module.parameters())
                if moves:  # such as the buffer of a module that layers of several stages hold
                    tensors = (*layer.module.parameters(), *layer.module.buffers())
                    shares = shares or any(t.device != stage.device for t in tensors)
                if shares or popped_by(layer.module):
                    planned.look_inside.add(stage.first + position)
    leaf = torch.empty(0)
    model = Model(
        net,
        places_of(net, planned, {k: stage.runs for k, stage in own.items()}),
        owner,
        devices,
        planned.look_inside,
        [own[k].cut_leaf if k in own else leaf for k in range(len(devices))],
        moves,
        {id(t): name for name, t in (*net.named_parameters(), *net.named_buffers())},
        containers_of(net, [layer.module for part in planned.stages for layer in part]),
        planned.recast,
        bool(planned.head.names),
    )
    # DDP searches the graph from tensors; edges of the graph are no start for it.
    hold = options.find_unused_parameters and world.data_parallel_size > 1
    how = hold, options.compile, options.offload == "all"
    if world.processes_per_replica > 1:
        return PartEngine(model, stages, rng, planned, world, *how)
    return ForwardEngine(model, stages, rng, world.devices, *how)


def owners_in(world: World, options: PipelineOptions) -> Sequence[int]:
    """Returns the stages of this process."""
    owners = world.stage_owners.placed(options.placement)
    return owners.stages_of(world.pipeline_rank, options.stages_per_device)


def _place(
    module: nn.Module, device: torch.device, placed: dict[int, tuple[Tensor, Tensor] | None]
) -> None:
    """Moves the tensors of a module that no earlier stage has placed; parameters stay the same.

    Args:
        module: the layers of a stage, or the model.
        device: the device of the stage.
        placed: for each tensor with a place, by its `id`, the tensor and the placed one; None for
            parameters, which are not held, because PyTorch may swap them.
    """
    tensors = [*module.parameters(), *module.buffers()]

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) in placed:  # such as a buffer that two modules share
            pair = placed[id(tensor)]
            return tensor if pair is None else pair[1]
        if tensor.is_meta:
            return tensor
        result = tensor.to(device)
        if isinstance(tensor, nn.Parameter):
            placed[id(tensor)] = None
        else:
            placed[id(tensor)] = tensor, result
            placed[id(result)] = result, result
        return result

    if any(tensor.device != device for tensor in tensors if id(tensor) not in placed):
        module._apply(moved)  # as `module.to` does
    for tensor in tensors:
        is_parameter = isinstance(tensor, nn.Parameter)
        placed.setdefault(id(tensor), None if is_parameter else (tensor, tensor))
