"""The engine of a traced pipeline whose stages are all in this process, in the caller's thread.

Only for `engine="distributed"`: its self-check compares all stages with the model, and an uncut
model has one stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hybridtrain.launch import LaneActivity, activity
from hybridtrain.pipeline import transfer
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.engines.actions import ActionRunner
from hybridtrain.pipeline.links import Link, routes
from hybridtrain.pipeline.stage import Stage
from hybridtrain.schedule import Action
from hybridtrain.world import World


class _Memory:
    """Passes values on in memory, for one step; see `Wire`."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._devices = {stage.index: stage.device for stage in stages}
        self._messages: dict[tuple[bool, int], deque[Any]] = {}
        for before, after in pairwise(self._devices):
            self._messages[True, after] = deque()
            self._messages[False, before] = deque()

    def send(self, to: Action, message: list[Any]) -> None:
        forth = to.kind == "F"
        source = self._devices[to.stage - 1 if forth else to.stage + 1]
        target = self._devices[to.stage]
        if source != target:
            message = transfer.receive(transfer.send(message, source, target, to.kind), target)
        self._messages[forth, to.stage].append(message)

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        message: list[Any] = self._messages[action.kind == "F", action.stage].popleft()
        return message


class InlineEngine:
    """Executes steps on all `stages` of a traced pipeline, in the caller's thread."""

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link], world: World) -> None:
        self._stages = stages
        self._of_index = {stage.index: stage for stage in stages}
        self._routes = routes(links)
        # in the caller's thread `cuda` must mean this GPU
        if (accelerator := stages[0].accelerator) is not None:
            accelerator.set_device(stages[0].device)

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        runner = ActionRunner(step, self._of_index, self._routes, _Memory(self._stages))
        (doing,) = activity.begin_step(1)
        try:
            runner.run_actions(step.schedule.in_one_order, doing)
        except BaseException:
            for stage in self._stages:
                stage.clear()
            raise
        return runner.values
