"""The engine for a pipeline whose stages are in several processes, with a device each.

Each process runs its own lane of the schedule, in the caller's thread. PyTorch's pipelines put the
sends and receives into it (`_torch_private.lowered`), in an order in which no process can wait in a
circle:

    process 0   F0 send F1 send       receive B0      stages 0, 2, ...
    process 1   receive F0 receive send B0            stages 1, 3, ...

A send comes right after its action there, so that the wire begins it when it is given the message;
a receive is begun in its place, which may be long before the action that waits for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrain._torch_private import lowered
from hybridtrain.launch import activity
from hybridtrain.pipeline.engines.actions import ActionRunner, stage_thread
from hybridtrain.pipeline.engines.message_wire import Formats, MessageWire
from hybridtrain.pipeline.links import Link, routes
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import Step
from hybridtrain.schedule import WORDS, Action, Schedule
from hybridtrain.world import World

# Kinds of steps whose formats are kept, such as a whole batch and the last one of an epoch.
_KINDS = 64

_PLAIN = (bool, int, float, str, bytes, type(None))  # of which repr is the same in all processes


class ProcessEngine:
    """Executes steps on `stages`, those of this process; the others run their own part.

    A step that has failed in one process leaves the others waiting for it: all must end then.

    Args:
        stages: of this process.
        links: of the whole pipeline.
        world: the processes of the pipeline.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link], world: World) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._routes = routes(links)
        self._world = world
        self._orders: dict[Schedule, list[tuple[Any, int, int]]] = {}
        self._formats: dict[Hashable, Formats] = {}

    def forget(self) -> None:
        """Forgets the formats of messages; see `Engine.forget`."""
        self._formats.clear()

    def run(self, step: Step) -> list[Any]:
        """Executes this process's part of `step`; see `Engine.run`."""
        schedule, kind = step.schedule, _kind(step)
        if kind not in self._formats:
            if len(self._formats) == _KINDS:  # in all processes, which see the same kinds
                del self._formats[next(iter(self._formats))]
            self._formats[kind] = {}
        # a process has one device, so one lane
        peers = [schedule.lane_of[stage] for stage in range(schedule.stages)]
        (doing,) = activity.begin_step(1)
        wire = MessageWire(self._stages, peers, self._world, self._formats[kind], doing)
        runner = ActionRunner(step, self._stages, self._routes, wire)
        try:
            with stage_thread():
                runner.run_actions(self._actions(schedule, wire), doing)
        except BaseException:
            for stage in self._stages.values():
                stage.clear()
            raise
        return runner.values if schedule.stages - 1 in self._stages else []

    def _actions(self, schedule: Schedule, wire: MessageWire) -> Iterator[tuple[int, Action]]:
        """Yields the actions of this process; begins the receives between them."""
        lane = self._world.pipeline_rank
        if schedule not in self._orders:
            process_of = schedule.lane_of.__getitem__
            self._orders[schedule] = lowered(schedule.lanes, process_of, schedule.stages)[lane]
        for kind, stage, microbatch in self._orders[schedule]:
            if kind in WORDS:
                yield lane, Action(kind, stage, microbatch)
            elif kind.startswith("RECV"):
                wire.begin_receive(Action("F" if kind == "RECV_F" else "B", stage, microbatch))
        wire.finish()


def _kind(step: Step) -> Hashable:
    """Returns what the formats of a step's messages depend on, which all processes know."""
    inputs = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else "")
        for microbatch in range(step.schedule.chunks)
        for leaf in tree_leaves(step.source(microbatch))
    )
    return step.schedule.chunks, inputs, step.thread_state, step.training
