"""Builds the part of a model that a process owns, without the rest.

With stages in several processes, no step below holds the whole model:

    rank 0       build() without values  ->  plan, which all processes receive
    each process build() without values  ->  the layers of the plan  ->  the names that it owns
    each process construct_part(build)   ->  the values of its stages

Layers measured for the plan get random values.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from hybridtrain._base.construction import (
    construct_on_meta,
    construct_part,
    default_generators,
    drop_values,
    give_back_memory,
    rewind,
)
from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Plan, PlannedLayers, Planner, needs_costs
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")


class OwnStages(NamedTuple):
    """A model with the values of this process's stages; other tensors are meta tensors.

    Attributes:
        net: the model.
        plan: the stages.
        planned: the layers of each stage.
    """

    net: nn.Module
    plan: Plan
    planned: PlannedLayers


def construct_own_stages(
    build: Callable[[], nn.Module], world: World, options: PipelineOptions, example_inputs: Any
) -> OwnStages | None:
    """Returns `build()` with the values of this process's stages; a collective call.

    None if all stages are in this process, or if the model cannot be built in parts. Then it must
    be built as a whole; the default generators are unchanged.

    Args:
        build: builds a new model on the CPU at each call.
        world: the processes.
        options: the pipeline options.
        example_inputs: see `Planner`.

    Raises:
        SplitError, ConfigError: the model cannot be divided like this.
    """
    if world.processes_per_replica == 1:
        return None
    # The values of each stage must be those that one build of the whole model draws.
    draws = default_generators()
    make_planner = partial(
        Planner, options=options, example_inputs=example_inputs, owners=world.stage_owners
    )
    plan = world.from_main(lambda: plan_without_values(build, options, make_planner))
    rewind(draws)
    own_stages, problem = None, ""
    try:
        own_stages = _own_part(build, plan, world, options, make_planner)
    except Exception as error:  # building the whole model works, or raises the error
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Before the next build: two models at once may not fit into the memory.
    gc.collect()  # modules may have reference cycles
    give_back_memory()
    # Collective, so a process whose part could not be built joins as well; then all build the
    # whole.
    if problems := [problem for problem in world.gather(problem) if problem]:
        if world.is_main:
            log.info("each process first builds the whole model: %s", problems[0])
        rewind(draws)
        return None
    return own_stages


def plan_without_values(
    build: Callable[[], nn.Module],
    options: PipelineOptions,
    make_planner: Callable[[nn.Module], Planner],
) -> Plan:
    """Returns the plan for a model; builds as little of the model as the split allows.

    Args:
        build: see `construct_own_stages`.
        options: the pipeline options.
        make_planner: returns a planner for a model.

    Raises:
        SplitError, ConfigError: the model cannot be divided like this.
    """
    draws = default_generators()
    try:
        return make_planner(_without_values(build, options)).plan()
    except Exception as error:
        log.debug("no plan for a model without values: %r", error)
    rewind(draws)
    gc.collect()
    return make_planner(build()).plan()


def _without_values(build: Callable[[], nn.Module], options: PipelineOptions) -> nn.Module:
    """Returns `build()` on the meta device; buffers have values if layers are measured."""
    outline = construct_on_meta(build)
    if not needs_costs(options):
        return outline
    parameters = dict(outline.named_parameters(remove_duplicate=False))
    return construct_part(build, lambda name: name not in parameters)


def _own_part(
    build: Callable[[], nn.Module],
    plan: Plan,
    world: World,
    options: PipelineOptions,
    make_planner: Callable[[nn.Module], Planner],
) -> OwnStages:
    outline = construct_on_meta(build)
    # From the plan alone, without values: it says which names this process needs.
    expected = make_planner(outline).layers_of(plan)
    owners = world.stage_owners.placed(options.placement)
    owned = owners.stages_of(world.pipeline_rank, options.stages_per_device)
    kept_ids = {id(tensor) for tensor in _kept(outline, expected.stages, owned)}
    named = (outline.named_parameters, outline.named_buffers)
    names = {
        name
        for named_tensors in named
        for name, tensor in named_tensors(remove_duplicate=False)
        if id(tensor) in kept_ids
    }
    net = construct_part(build, names.__contains__)
    planned = make_planner(net).layers_of(plan)
    # The names were taken from the outline, so they would name other layers.
    if planned.units != expected.units:
        raise SplitError("its layers depend on values")
    return OwnStages(net, plan, planned)


def drop_other_stages(
    net: nn.Module,
    parts: Sequence[Sequence[Layer]],
    owned: Sequence[int],
    of_code: Collection[int] = (),
) -> None:
    """Replaces tensors of other processes' stages by meta tensors.

    Args:
        net: the model.
        parts: the layers of all its stages.
        owned: the stages of this process.
        of_code: the `id`s of further parameters that other processes have, because code between
            layers uses them there.
    """
    layers = [layer.module for part in parts for layer in part]
    kept = [tensor for tensor in _kept(net, parts, owned) if id(tensor) not in of_code]
    drop_values([net, *layers], kept)


def _kept(net: nn.Module, parts: Sequence[Sequence[Layer]], owned: Sequence[int]) -> list[Tensor]:
    """Returns the parameters and buffers of the stages `owned`, and tensors that no stage uses."""
    owned_tensors: dict[int, Tensor] = {}
    others: set[int] = set()
    for index, part in enumerate(parts):
        modules = nn.ModuleList(layer.module for layer in part)
        for tensor in (*modules.parameters(), *modules.buffers()):
            # the first stage with a parameter owns it; every stage with a buffer has it
            if index in owned and not (isinstance(tensor, nn.Parameter) and id(tensor) in others):
                owned_tensors[id(tensor)] = tensor
            elif id(tensor) not in owned_tensors:
                others.add(id(tensor))
    unused = [t for t in (*net.parameters(), *net.buffers()) if id(t) not in others]
    return [*owned_tensors.values(), *unused]
