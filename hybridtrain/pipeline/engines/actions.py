"""The execution of a schedule's actions, shared by all engines.

Only `engine="distributed"` needs this file.

An engine decides which thread or process runs which actions, in which order. Its transport (`Wire`)
carries values from one stage to the next:

          stage s        border s|s+1        stage s+1        border s+1|s+2
    F     sent + passing ---Wire----> [1] receive
                                      [2] own | passing
                                      [3] own -> forward -> sent
                                      [4] sent + passing ----Wire----> ...
    B, I                              [5] receive       <----Wire----- ...
                                      [6] own | passing
                                      [7] own -> backward -> sent
          ...      <-----Wire-------- [8] sent + passing
    W                                 [7] alone: nobody waits for it

One message per micro-batch crosses a border. The `Route` of a stage (see `links`) separates the
values that the stage takes from those that it passes on, outside of autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from hybridtrain._base.skip import skip_scope
from hybridtrain._base.torch_private import draws_here, leave_draws, profiled
from hybridtrain.launch import LaneActivity
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.links import Route
from hybridtrain.pipeline.run_ahead import RunAhead
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.timeline import Mark, mark
from hybridtrain.pipeline.transfer import Inputs
from hybridtrain.schedule import WORDS, Action


class Wire(Protocol):
    """Carries values over the borders between stages, in a process or between several.

    Each border has two directions, and in each of them messages arrive in the order of the
    micro-batches.
    """

    def send(self, to: Action, message: list[Any]) -> None:
        """Sends a message over a border to the action `to`, a forward or a backward.

        Does not wait for its arrival.

        Args:
            to: the action that needs the message; `B` also for a part of a backward.
            message: the values, or their gradients, of each link over the border.
        """

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        """Waits for the message to `action`, and returns it on the device of the action's stage.

        Args:
            action: a forward, a backward, or the first part of one.
            doing: notes that it waits.
        """


class Aborted(Exception):
    """Stops waiting for messages, because another thread has failed."""


class ActionRunner:
    """Runs actions of one step: receives a stage's messages, and sends its results.

    Attributes:
        values: the head's values by micro-batch.
        stopped: do not start further actions. Not an Event, because an interrupt inside its methods
            may leave its lock held forever.

    Args:
        step: the step.
        stages: the stages of this process, by their index.
        routes: the routes of stages that pass values on.
        wire: the transport between these stages and the stages of other processes.
    """

    def __init__(
        self, step: Step, stages: Mapping[int, Stage], routes: Mapping[int, Route], wire: Wire
    ) -> None:
        self.values: list[Any] = [None] * step.schedule.chunks
        self.stopped = False
        self._step = step
        self._stages = stages
        self._routes = routes
        self._wire = wire
        self._last = step.schedule.stages - 1
        self._run_ahead: RunAhead | None = None
        self._take = step.source
        accelerator = next(iter(stages.values())).accelerator
        if accelerator is not None:
            self._run_ahead = RunAhead(step.schedule, stages, accelerator)
            if 0 in stages:
                self._take = Inputs(step.source, step.schedule.chunks, stages[0].device).take

    def run_actions(self, actions: Iterable[tuple[int, Action]], doing: LaneActivity) -> None:
        """Executes `actions`, each with its lane, in this thread.

        Raises:
            Aborted: another thread has failed.
            Exception: the first exception of an action, with a note that names the action.
        """
        current: Action | None = None
        draws = draws_here()  # the draws of an enclosing layer
        try:
            # layers that stash something declare it, and get their own scope
            with skip_scope(None), self._step.thread_state.applied():
                for lane, action in actions:
                    if self.stopped:
                        break
                    current = action
                    doing.begin(action)
                    with profiled(action):
                        if action.kind == "F":
                            self._forward(lane, action, doing)
                        else:
                            self._backward(lane, action, doing)
                    current = None
        except Aborted:
            raise
        except BaseException as error:
            leave_draws(draws)  # Ctrl-C may interrupt a layer that enters or leaves its draws
            if current is not None:
                self.add_note(error, current)
            raise
        finally:
            doing.end()

    def add_note(self, error: BaseException, action: Action) -> None:
        """Adds a note to `error` that names the failed action."""
        stage = self._stages[action.stage]
        word = WORDS[action.kind]
        error.add_note(f"in the {word} of micro-batch {action.microbatch} on {stage}")

    def _forward(self, lane: int, action: Action, doing: LaneActivity) -> None:
        step = self._step
        _, index, microbatch = action
        stage = self._stages[index]
        passing: list[Any] = []
        if self._run_ahead is not None:
            doing.wait(True)
            self._run_ahead.before_forward(index)
            doing.wait(False)
        if index == 0:
            inputs = [(self._take(microbatch),)]
        else:
            inputs = message = self._wire.receive(action, doing)  # [1]
            if index in self._routes:
                inputs, passing = self._routes[index].own_values(message)  # [2]
        head = step.head if index == self._last else None
        start = mark(stage.device) if step.timeline else 0.0
        # autocast only around each forward: a backward runs without it
        with step.thread_state.autocast():
            sent = stage.forward(microbatch, inputs, head, microbatch in step.recomputed)  # [3]
        if step.timeline:
            step.timeline.record(lane, action, start, mark(stage.device))
        if self._run_ahead is not None:
            self._run_ahead.after(action)
        if head is None:
            # in this order: `links.crossing` puts the links that start at a later stage first
            self._wire.send(Action("F", index + 1, microbatch), sent + passing)  # [4]
        else:
            (self.values[microbatch],) = sent

    def _backward(self, lane: int, action: Action, doing: LaneActivity) -> None:
        step = self._step
        kind, index, microbatch = action
        stage = self._stages[index]
        gradients: Sequence[Any] = ()
        passing: Sequence[Any] = ()
        if kind == "I":
            stage.divide_backward(microbatch)  # before the wait
        if kind != "W" and index != self._last:
            gradients = message = self._wire.receive(action, doing)  # [5]
            if index in self._routes:
                gradients, passing = self._routes[index].own_gradients(message)  # [6]
        # the last micro-batch of a stage comes last, see `schedule.validate`
        reduce = step.reduce and microbatch + 1 == step.schedule.chunks
        sent: list[Any] = []
        start = mark(stage.device) if step.timeline else 0.0
        noting: AbstractContextManager[list[Mark]] = nullcontext([])
        if reduce and step.timeline and stage.reducer is not None:
            noting = stage.reducer.noting_computed(stage.device)
        with noting as computed:
            if kind == "B":  # [7]
                sent = stage.backward(microbatch, gradients, reduce)
            elif kind == "I":
                sent = stage.backward_to_input(microbatch, gradients, reduce)
            else:
                stage.backward_to_weights(microbatch, reduce)
        if step.timeline:
            end = mark(stage.device)
            step.timeline.record(lane, action, start, end, computed[-1] if computed else None)
        if self._run_ahead is not None:
            self._run_ahead.after(action)
        if kind != "W" and index:
            if index in self._routes:
                sent = self._routes[index].gradients_before(sent, passing)
            self._wire.send(Action("B", index - 1, microbatch), sent)  # [8]
