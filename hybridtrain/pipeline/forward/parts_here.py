"""All parts of a pipeline over processes in this process, a thread for each, for comparisons."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain._base.precision import ThreadState
from hybridtrain.launch import LaneActivity
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import PlannedLayers, recompute_policy
from hybridtrain.pipeline.agreement import BatchCheck
from hybridtrain.pipeline.engine import Head, Source, Step
from hybridtrain.pipeline.forward.build import build_forward_stages, forward_engine, of_other_code
from hybridtrain.pipeline.forward.part_engine import PartEngine
from hybridtrain.pipeline.forward.part_transport import KindsOf, Wire, outline
from hybridtrain.pipeline.forward.rehearsal import Rehearsal
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.message_wire import Lane
from hybridtrain.pipeline.messages import as_received
from hybridtrain.pipeline.own_stages import drop_other_stages
from hybridtrain.pipeline.ties import tied_uses
from hybridtrain.schedule import Action, Schedule
from hybridtrain.world import World


class _Failed(Exception):
    """Another part has failed."""


class _Queues:
    """What the parts send to one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Action, SimpleQueue[Any]] = {}
        self.failure: BaseException | None = None

    def __getitem__(self, action: Action) -> SimpleQueue[Any]:
        with self._lock:
            # Under the lock: sender and receiver ask for the same one, at any time.
            return self._queues.setdefault(action, SimpleQueue())


class _QueueTransport:
    """Connects a part to the others; a `Transport` and its own `Wire`."""

    def __init__(self, is_first: bool, queues: _Queues, device: torch.device) -> None:
        self._is_first = is_first
        self._queues = queues
        self._device = device

    def begin_step(self, step: Step, kinds_of: KindsOf) -> tuple[list[Any], Sequence[Hashable]]:
        chunks = range(step.schedule.chunks)
        # Of each process: a layer may change them in place.
        inputs = [tree_map_only(Tensor, torch.clone, step.source(number)) for number in chunks]
        outlines = list(map(outline, inputs))
        return inputs if self._is_first else outlines, kinds_of(step, outlines)

    def agree(self, rehearsals: Sequence[Rehearsal]) -> None:
        pass

    def wire(
        self,
        stages: Mapping[int, ForwardStage],
        lane: Lane,
        doing: LaneActivity,
        batch_check: BatchCheck | None,
    ) -> Wire:
        return self

    def end_step(self) -> None:
        pass

    def begin_receives(self, count: int) -> None:
        pass

    def send(self, to: Action, message: list[Any]) -> None:
        # In the sender's thread, before it can change a value in place.
        self._queues[to].put(as_received(message, to.kind == "F", self._device))

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        if action.kind == "I":
            action = action._replace(kind="B")
        while True:
            try:
                # Polled: a part that has failed will never put what this one waits for.
                message: list[Any] = self._queues[action].get(timeout=0.05)
                return message
            except Empty:
                if self._queues.failure is not None:
                    raise _Failed from None

    def finish(self) -> None:
        pass


class PartsHere:
    """A pipeline of a process per stage, in threads of this process.

    Args:
        parts: for each stage a copy of the model, and the planned layers in the copy. Values of
            other stages are dropped from each copy.
        device: the device of all parts.
        options: the pipeline options.

    Attributes:
        rngs: the random numbers of each part.
    """

    def __init__(
        self,
        parts: Sequence[tuple[nn.Module, PlannedLayers]],
        device: torch.device,
        options: PipelineOptions,
    ) -> None:
        options = replace(options, stages_per_device=1)
        self._queues = _Queues()
        self._nets = [net for net, _ in parts]
        self._stages: list[ForwardStage] = []
        self._engines: list[PartEngine] = []
        self.rngs: list[LayerRNG] = []
        for index, (net, planned) in enumerate(parts):
            size = len(parts)
            world = World(
                rank=index,
                size=size,
                devices=(device,),
                engine="distributed",
                processes_per_replica=size,
            )
            layers = [layer for of_stage in planned.stages for layer in of_stage]
            policy = recompute_policy(options.recompute, [layer.name for layer in layers])
            rng = LayerRNG.of_world(options.seed, world)
            rng.follow(planned.units)
            drop_other_stages(net, planned.stages, [index], of_other_code(net, planned, [index]))
            uses = tied_uses([[layer.module for layer in part] for part in planned.stages])
            groups = [None] * size
            stages = build_forward_stages(net, planned, world, options, groups, rng, policy, uses)
            engine = forward_engine(net, planned, stages, world, options, rng)
            assert isinstance(engine, PartEngine)
            engine.transport = _QueueTransport(not index, self._queues, device)
            # Shared, because a rehearsal is the same in all parts.
            engine.known = self._engines[0].known if self._engines else engine.known
            names = {id(parameter): name for name, parameter in net.named_parameters()}
            for alias in stages[0].aliases:  # between processes, a message has the owner's value
                owner = next(
                    p
                    for other in self._nets
                    for name, p in other.named_parameters()
                    if name == names[id(alias.parameter)] and not p.is_meta
                )
                alias.alias.data.copy_(owner)
            self._stages += stages
            self._engines.append(engine)
            self.rngs.append(rng)

    def run(self, schedule: Schedule, source: Source, head: Head, training: bool) -> None:
        """Runs a step in all parts; the grad mode and autocast are the caller's.

        Raises:
            Exception: the first exception of a part.
        """
        step = Step(schedule, source, head, ThreadState.capture(), training=training)
        for rng in self.rngs:
            rng.begin_step(training)
        for stage in self._stages:
            stage.runs.begin_step(step.number, frozenset())
        self._engines[0].rehearse(step)  # for all, and in one thread
        threads = [
            threading.Thread(target=self._run, args=(engine, step)) for engine in self._engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # After all threads have ended, so nobody else touches it.
        failure, self._queues.failure = self._queues.failure, None
        if failure is not None:
            raise failure

    def _run(self, engine: PartEngine, step: Step) -> None:
        try:
            engine.run(step)
        except _Failed:
            pass
        except BaseException as error:
            # Perhaps two at the same time: either may be the one that is raised.
            if self._queues.failure is None:
                self._queues.failure = error

    def counts(self) -> dict[tuple[int, int], int]:
        """Returns how often each unit has drawn, see `LayerRNG.counts`."""
        counts: dict[tuple[int, int], int] = {}
        for rng in self.rngs:
            for place, count in rng.counts.items():
                counts[place] = max(counts.get(place, 0), count)
        return counts

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients by name; those of a tied parameter are added up."""
        gradients: dict[str, Tensor | None] = {}
        for net, stage in zip(self._nets, self._stages, strict=True):
            names = {id(parameter): name for name, parameter in net.named_parameters()}
            for name, parameter in net.named_parameters():
                if not parameter.is_meta:
                    gradients[name] = parameter.grad
            for alias in stage.aliases:
                name, gradient = names[id(alias.parameter)], alias.alias.grad
                before = gradients.get(name)
                if before is None:
                    gradients[name] = gradient
                elif gradient is not None:
                    gradients[name] = before + gradient
        return gradients

    @property
    def tied(self) -> set[str]:
        """The names of the parameters that several stages have."""
        return {
            name
            for net, stage in zip(self._nets, self._stages, strict=True)
            for name, parameter in net.named_parameters()
            if any(alias.parameter is parameter for alias in stage.aliases)
        }

    def buffers(self) -> dict[str, Tensor]:
        """Returns the buffers by name, each from the last part that has it."""
        return {
            name: buffer
            for net in self._nets
            for name, buffer in net.named_buffers()
            if not buffer.is_meta
        }
