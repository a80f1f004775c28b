"""A model in stages on their devices: divided, brought there, and ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from hybridtrain.graph.mode_graphs import TraceGuards
from hybridtrain.graph.segment import Segment
from hybridtrain.pipeline.activation_checkpoint import (
    CheckpointPolicy,
    CheckpointSpec,
    checkpoint_policy,
)
from hybridtrain.pipeline.assemble import build_stages
from hybridtrain.pipeline.engines.threads import LocalEngine
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.stage import Stage
from hybridtrain.planning.plan import Plan
from hybridtrain.planning.planner import Ask, divide
from hybridtrain.world import World


@dataclass(frozen=True)
class Placement:
    """The stages of a model, and how they came to be so.

    TraceGuards:
        stages: the stages.
        plan: how they were decided on.
        attributes: what they have taken from the model's modules once and for all.
        copies: buffers, and their copies on other stages' devices.
        policy: what is recomputed.
        engine: runs the stages.
        trained: which parameters require a gradient.
    """

    stages: list[Stage]
    plan: Plan
    attributes: TraceGuards
    copies: list[tuple[Tensor, Tensor]]
    policy: CheckpointPolicy
    engine: LocalEngine
    trained: list[bool]

    def refresh(self) -> None:
        """Brings up to date what the stages have of the model's state.

        Raises:
            ConfigError: the model has changed in a way that they cannot follow.
        """
        self.attributes.check()
        for stage in self.stages:
            for alias in stage.aliases:
                alias.refresh()
        for own, copy in self.copies:
            copy.copy_(own, non_blocking=True)


class PlacementOptions(TypedDict):
    """What of `HybridModel`'s arguments `place` takes."""

    checkpoint: CheckpointSpec
    compile: bool
    find_unused_parameters: bool


@torch.inference_mode(False)  # parameters may be made here
def place(
    net: nn.Module,
    ask: Ask,
    draws: LayerRNG,
    example_inputs: Any,
    *,
    checkpoint: CheckpointSpec,
    compile: bool,
    find_unused_parameters: bool,
) -> Placement:
    """Divides `net` and brings its stages to their devices; a collective call.

    Args:
        net: any module.
        ask: what it is divided for, and where.
        draws: what seeds the random draws of its layers.
        example_inputs: the inputs of a micro-batch, or None.
        checkpoint, compile, find_unused_parameters: as for `HybridModel`.

    Raises:
        ExampleInputsNeeded: `example_inputs` is None, and needed.
        SplitError, ConfigError: an argument does not fit.
    """
    division = divide(net, ask, example_inputs)
    layers = [layer for part in division.parts for layer in part]
    policy = checkpoint_policy(checkpoint, [layer.name for layer in layers])
    draws.guard_all = policy != CheckpointPolicy()
    draws.set_units(division.units)
    stages = build_stages(net, division.parts, ask.world, draws, policy, find_unused_parameters)
    _share_rest(net, stages, ask.world)
    if compile:
        for layer in layers:
            layer.module.compile()
    segments = [layer.module for layer in layers if isinstance(layer.module, Segment)]
    return Placement(
        stages=stages,
        plan=division.plan,
        attributes=division.attributes,
        copies=[pair for segment in segments for pair in segment.copies()],
        policy=policy,
        engine=LocalEngine(stages, ask.world.devices),
        trained=requiring_grad(net, ask.world),
    )


def requiring_grad(net: nn.Module, world: World) -> list[bool]:
    """Which parameters require a gradient; not looked at where there is one replica only."""
    if world.size == 1:
        return []
    return [parameter.requires_grad for parameter in net.parameters()]


def _share_rest(net: nn.Module, stages: list[Stage], world: World) -> None:
    """Gives all replicas rank 0's values of what no layer uses."""
    used = {id(t) for s in stages for t in (*s.module.parameters(), *s.module.buffers())}
    for tensor in (*net.parameters(), *net.buffers()):
        if id(tensor) not in used:
            world.broadcast_tensor(tensor.data)
