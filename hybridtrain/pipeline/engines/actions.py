"""The execution of one action of a schedule, which is the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.launch.activity import Lane
from hybridtrain.pipeline.run_ahead import run_ahead
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import StagePorts, Step
from hybridtrain.pipeline.timeline import mark
from hybridtrain.pipeline.transfer import Inputs
from hybridtrain.schedule import WORDS, Action


class ActionRunner:
    """Runs actions of one step: takes what has come to a stage, and hands on what it sends.

    Attributes:
        values: the head's values by micro-batch.

    Args:
        step: the step.
        stages: the stages of this process, by their index.
        ports: of each of these stages.
    """

    def __init__(
        self, step: Step, stages: Mapping[int, Stage], ports: Mapping[int, StagePorts]
    ) -> None:
        self.values: list[Any] = [None] * step.schedule.chunks
        self._step = step
        self._stages = stages
        self._ports = ports
        self._last = step.schedule.stages - 1
        self._run_ahead = run_ahead(step.schedule, stages)
        self._inputs: Inputs | None = None
        if self._run_ahead is not None and 0 in stages:
            self._inputs = Inputs(step.source, step.schedule.chunks, stages[0].device)

    def add_note(self, error: BaseException, action: Action) -> None:
        """Adds to `error` which action has failed."""
        stage = self._stages[action.stage]
        word = WORDS[action.kind]
        error.add_note(f"in the {word} of micro-batch {action.microbatch} on {stage}")

    def forward(self, lane: int, action: Action, doing: Lane) -> None:
        """Runs `action`, a forward of `lane`, when its input has come."""
        step = self._step
        _, index, microbatch = action
        stage, ports = self._stages[index], self._ports[index]
        if self._run_ahead is not None:
            doing.wait(True)
            self._run_ahead.before_forward(index)
            doing.wait(False)
        if index:
            doing.wait(True)
            messages = [port.receive() for port in ports.receive]
            doing.wait(False)
        else:
            take = step.source if self._inputs is None else self._inputs.take
            messages = [(take(microbatch),)]
        head = step.head if index == self._last else None
        start = mark(stage.device) if step.timeline else 0.0
        with step.thread_state.autocast():
            sent = stage.forward(microbatch, messages, head, microbatch in step.checkpointed)
        if step.timeline:
            step.timeline.record(lane, action, start, mark(stage.device))
        if self._run_ahead is not None:
            self._run_ahead.after(action)
        if head is not None:
            (self.values[microbatch],) = sent
            return
        for port, message in zip(ports.send, sent, strict=True):
            port.send(message)

    def backward(self, lane: int, action: Action, doing: Lane) -> None:
        """Runs `action`, a backward of `lane` or a part of one, when its gradients have come."""
        step = self._step
        kind, index, microbatch = action
        stage, ports = self._stages[index], self._ports[index]
        gradients: list[Any] = []
        if action.sends_gradient:
            doing.wait(True)
            gradients = [port.receive() for port in ports.receive_gradients]
            doing.wait(False)
        reduce = step.reduce and microbatch + 1 == step.schedule.chunks
        sent: list[Any] = []
        start = mark(stage.device) if step.timeline else 0.0
        if kind == "B":
            sent = stage.backward(microbatch, gradients, reduce)
        elif kind == "I":
            sent = stage.backward_to_input(microbatch, gradients, reduce)
        else:
            stage.backward_to_weights(microbatch, reduce)
        if step.timeline:
            step.timeline.record(lane, action, start, mark(stage.device))
        if self._run_ahead is not None:
            self._run_ahead.after(action)
        if action.sends_gradient:
            for port, message in zip(ports.send_gradients, sent, strict=True):
                port.send(message)
