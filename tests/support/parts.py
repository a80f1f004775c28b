"""A pipeline over processes, all of them as threads of this one, for tests of its engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain import World
from hybridtrain._base.microbatch import chunk_sizes, split
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Planner
from hybridtrain.pipeline import HeadOutput, LayerRNG, PartsHere
from hybridtrain.schedule import make_schedule
from hybridtrain.verification import CutModel, ForwardCheck

CHUNKS = 3


class Parts:
    """A model of which each of several processes has a stage.

    The options are those of a pipeline. With `checks`, the stages are first compared with the model
    itself, as `HybridModel` does.
    """

    def __init__(
        self, net: nn.Module, stages: int, inputs: Any, *, checks: bool = False, **options: Any
    ) -> None:
        self.options = PipelineOptions(**{"chunks": CHUNKS} | options)
        world = World(
            size=stages,
            devices=(torch.device("cpu"),),
            engine="distributed",
            processes_per_replica=stages,
        )
        planner = Planner(net, self.options, inputs, world.stage_owners)
        plan = planner.plan()
        planned = planner.layers_of(plan)
        if checks:
            check = ForwardCheck(CutModel(net, plan, planned, self.options, world))
            check.check_at_construction(inputs)
        copies = [copy.deepcopy((net, planned.stages)) for _ in range(stages)]
        self.nets = [own for own, _ in copies]
        self._parts = PartsHere(
            [(own, replace(planned, stages=layers, net=own)) for own, layers in copies],
            torch.device("cpu"),
            self.options,
        )
        self._schedule = make_schedule(self.options.schedule, stages, self.options.chunks, 1)

    def step(
        self, inputs: Any, targets: Tensor, loss: Callable[[Any, Tensor], Tensor] = F.mse_loss
    ) -> list[Tensor]:
        """A training step; returns the loss of each micro-batch."""
        rows, losses = len(targets), [torch.zeros(())] * self.options.chunks
        sizes = chunk_sizes(len(tree_leaves(inputs)[0]), self.options.chunks)
        parts, wanted = split(inputs, sizes), targets.split(sizes)

        def head(microbatch: int, output: Any) -> HeadOutput:
            value = loss(output, wanted[microbatch])
            losses[microbatch] = value.detach()
            share = sizes[microbatch] / rows
            return HeadOutput(value.detach() * share, value, torch.full_like(value, share))

        self._parts.run(self._schedule, parts.__getitem__, head, training=True)
        for rng in self._parts.rngs:
            rng.end_step()
        return losses

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients so far, by name."""
        return self._parts.gradients()

    def buffers(self) -> dict[str, Tensor]:
        """The buffers, by name."""
        return self._parts.buffers()

    @property
    def rngs(self) -> list[LayerRNG]:
        """The random numbers of each process."""
        return self._parts.rngs
