"""The engine for a model that is not cut: its only stage runs in the caller's thread."""

from __future__ import annotations

from typing import Any

from hybridtrain._torch_private import ThreadDraws
from hybridtrain.accelerator import accelerator_of
from hybridtrain.launch.activity import activity
from hybridtrain.pipeline.engines.actions import ActionRunner
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import StagePorts, Step
from hybridtrain.schedule import Action
from hybridtrain.skip import skip_scope


class OneStageEngine:
    """Executes steps on `stage`, the only one: there is nothing to send, and nobody to wait for."""

    def __init__(self, stage: Stage) -> None:
        self._stages = {0: stage}
        self._ports = {0: StagePorts([], [], [], [])}
        # in the caller's thread `cuda` must mean this GPU
        if (accelerator := accelerator_of(stage.device)) is not None:
            accelerator.set_device(stage.device)

    def forget(self) -> None:
        """Nothing to forget; see `Engine.forget`."""

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        runner = ActionRunner(step, self._stages, self._ports)
        (doing,) = activity.begin_step(1)
        action: Action | None = None
        try:
            with step.thread_state.applied(), skip_scope(None), ThreadDraws():
                for action in step.schedule.lanes[0]:
                    doing.begin(action)
                    run = runner.forward if action.kind == "F" else runner.backward
                    run(0, action, doing)
        except BaseException as error:
            if action is not None:
                runner.add_note(error, action)
            self._stages[0].clear()
            raise
        finally:
            doing.end()
        return runner.values
