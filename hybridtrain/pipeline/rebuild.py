"""A pipeline that follows a model which was changed after it was wrapped."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.options import PipelineOptions
from hybridtrain.pipeline.model_watch import Change, Kind
from hybridtrain.pipeline.pipeline import Pipeline
from hybridtrain.pipeline.ties import remove_aliases
from hybridtrain.planning import Plan, PlannedLayers, Planner
from hybridtrain.schedule import BOUND_OF
from hybridtrain.world import World

log = logging.getLogger(__name__)

# A process whose model has not changed is in the step already, and never comes.
_AGREEMENT_S = 30.0


@torch.inference_mode(False)
def follow(
    change: Change,
    pipeline: Pipeline,
    net: nn.Module,
    world: World,
    options: PipelineOptions,
    example_inputs: Any,
) -> Pipeline:
    """Returns a pipeline of `net` as it is now, whose stages begin where they did.

    New modules are moved to their stage's device, and get replica 0's values.

    Raises:
        ConfigError: a layer that a stage begins with is gone, or the replicas have not all changed
            in the same way.
    """
    _check_replicas(change, world)
    if change.kind is Kind.FROZEN:
        pipeline.follow_requires_grad()
        return pipeline
    if change.kind is Kind.MOVED and pipeline.shards_weights:
        raise ConfigError(
            f"{change.text}: with shard=full a model cannot be converted or moved after it was "
            f"wrapped. Convert it before, or set precision="
        )
    plan, planned = pipeline.plan, pipeline.planned
    pipeline.unshard()
    remove_aliases(net)
    if change.kind is Kind.REPLACED:
        plan, planned = _planned(change, plan, net, options, example_inputs, world)
        if world.is_main:
            log.warning(
                "the model was changed after HybridModel was made: %s. The stages follow; an "
                "optimizer that was made before trains only the parameters that it was given",
                change.text,
            )
    pipeline.close()
    step = pipeline.rng.step
    pipeline = Pipeline(net, plan, planned, world, options, pipeline.groups)
    pipeline.rng.step = step
    return pipeline


def _planned(
    change: Change,
    plan: Plan,
    net: nn.Module,
    options: PipelineOptions,
    example_inputs: Any,
    world: World,
) -> tuple[Plan, PlannedLayers]:
    """Returns the plan for the layers of now: the same, or with stages that begin where they did.

    Nothing is measured again, so that all processes come to the same. An order that was searched
    stays, since the stages have the same places; one for fewer micro-batches is searched as if the
    stages were equal.
    """
    begins = [names[0] for names in plan.layer_names[1:]]
    schedule = BOUND_OF.get(options.schedule, options.schedule)  # is not searched
    settings = replace(options, split=begins, schedule=schedule)
    planner = Planner(net, settings, example_inputs, world.cluster)
    with suppress(SplitError):
        return plan, planner.layers_of(plan)
    try:
        found = planner.plan()
        stages = [
            replace(stage, in_flight=alive)
            for stage, alive in zip(found.stages, plan.in_flight, strict=True)
        ]
        found = replace(found, schedule=plan.schedule, order=plan.order, stages=stages)
        return found, planner.layers_of(found)
    except SplitError as error:
        raise ConfigError(
            f"the model was changed after HybridModel was made ({change.text}), and its stages "
            f"cannot begin at {', '.join(begins)} any more: make a new HybridModel ({error})"
        ) from error


def _check_replicas(change: Change, world: World) -> None:
    if world.size == 1:
        return
    if not world.all_arrive(min(_AGREEMENT_S, world.timeout_s / 2)):
        raise ConfigError(
            f"the model was changed on rank {world.rank} ({change.text}), but not on all ranks: "
            f"change it on all of them before the same step"
        )
    # a parameter of another process is on meta here
    texts = world.gather(re.sub(r" on (cuda:\d+|cpu|meta)", "", change.text))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ConfigError(
                f"the model was changed in different ways: on rank 0 {texts[0]}, on rank {rank} "
                f"{text}; change it alike on all of them"
            )
