"""The engine for stages that are all on one device: they run in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from hybridtrain.launch import activity
from hybridtrain.pipeline.engines.actions import ActionRunner, stage_thread
from hybridtrain.pipeline.engines.queue_wire import QueueWire
from hybridtrain.pipeline.links import Link, routes
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import Step
from hybridtrain.world import World


class InlineEngine:
    """Executes steps on `stages`, all of a pipeline: nobody waits for another.

    A model that is not cut is a single stage, with nothing to send.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link], world: World) -> None:
        self._stages = stages
        self._of_index = {stage.index: stage for stage in stages}
        self._routes = routes(links)
        # in the caller's thread `cuda` must mean this GPU
        if (accelerator := stages[0].accelerator) is not None:
            accelerator.set_device(stages[0].device)

    def forget(self) -> None:
        """Nothing to forget; see `Engine.forget`."""

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        runner = ActionRunner(step, self._of_index, self._routes, QueueWire(self._stages))
        (doing,) = activity.begin_step(1)
        try:
            with stage_thread():
                runner.run_actions(zip(repeat(0), step.schedule.lanes[0], strict=False), doing)
        except BaseException:
            for stage in self._stages:
                stage.clear()
            raise
        return runner.values
