"""The engine for stages that all live in this process: one worker thread a device.

Each thread walks its lane of the schedule from left to right. Between two neighbouring stages
there are two queues, one for activations and one for gradients:

    lane 0   F0 F1 .. B0 ..        stage 0 --activations[1]--> stage 1
    lane 1      F0 B0 F1 ..                <--gradients[0]----

A thread that needs what is not there yet waits in the queue; there is no barrier and no clock.
PyTorch releases the interpreter's lock inside its kernels, so the threads compute side by side,
and on the CPU a backward runs in the thread that calls it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from hybridtrain.pipeline.ambient import Ambient
from hybridtrain.pipeline.schedule import Action
from hybridtrain.pipeline.stage import Head, Stage
from hybridtrain.pipeline.trace import Trace, mark

Lanes = Sequence[Sequence[Action]]


@dataclass
class Step:
    """One run of the pipeline over the micro-batches of one batch.

    Attributes:
        lanes: what each device does.
        inputs: the micro-batches that stage 0 gets.
        head: what the last stage does with each output.
        recompute: for each micro-batch, whether its backward recomputes the activations.
        reduce: whether the gradients are averaged over the replicas, at the last micro-batch.
        trace: where to record what ran when.
    """

    lanes: Lanes
    inputs: Sequence[Any]
    head: Head
    recompute: Sequence[bool]
    reduce: bool = False
    trace: Trace | None = None
    ambient: Ambient = field(default_factory=Ambient.capture)


class LocalEngine:
    """Executes steps on `stages`; lane `d` of every step runs in thread `d`."""

    def __init__(self, stages: Sequence[Stage], devices: Sequence[torch.device]) -> None:
        self._stages = stages
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = []
        if len(devices) == 1:
            return  # a single lane needs no thread of its own
        # the cores of this process, shared out: intra-op threads are counted per thread
        intra_op = max(1, torch.get_num_threads() // len(devices))
        for index, device in enumerate(devices):
            inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            # a daemon: an exit of the program must not wait for it
            threading.Thread(
                target=_work, args=(inbox, device, intra_op), name=f"stage-{index}", daemon=True
            ).start()
            self._inboxes.append(inbox)
        weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, step: Step) -> None:
        """Executes `step`.

        Raises:
            Exception: whatever a layer, the head or a collective raised, as itself, with a note
                that names the stage, its layers and the micro-batch. By then all threads have
                stopped and forgotten the step; the next one can run.
        """
        run = _Run(step, self._stages)
        if not self._inboxes:
            run.walk(0)
        else:
            for lane, inbox in enumerate(self._inboxes):
                inbox.put(lambda lane=lane: run.walk(lane))  # type: ignore[misc]
            run.join()
        if run.failure is not None:
            for stage in self._stages:
                stage.clear()
            raise run.failure


class _Stopped(Exception):
    """Another lane failed; nothing will come through the queues any more."""


class _Run:
    """The state of one step while it runs."""

    def __init__(self, step: Step, stages: Sequence[Stage]) -> None:
        self.failure: BaseException | None = None
        self._step = step
        self._stages = stages
        self._activations: list[SimpleQueue[Any]] = [SimpleQueue() for _ in stages]
        self._gradients: list[SimpleQueue[Any]] = [SimpleQueue() for _ in stages]
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()

    def walk(self, lane: int) -> None:
        """Executes one lane; never raises."""
        step = self._step
        action: Action | None = None
        try:
            with step.ambient.entered():
                for action in step.lanes[lane]:
                    if self.failure is not None:
                        break
                    if action.kind == "F":
                        self._forward(lane, action)
                    else:
                        self._backward(lane, action)
        except _Stopped:
            pass
        except BaseException as error:
            if action is not None:
                kind = "forward" if action.kind == "F" else "backward"
                stage = self._stages[action.stage]
                error.add_note(f"in the {kind} of micro-batch {action.microbatch} on {stage}")
            self.fail(error)
        finally:
            self._finished.put(None)

    def join(self) -> None:
        """Waits until every lane has stopped."""
        for _ in self._step.lanes:
            while True:
                try:
                    self._finished.get()
                    break
                except BaseException as interrupt:  # Ctrl-C: stop the lanes, then wait on
                    self.fail(interrupt)

    def fail(self, error: BaseException) -> None:
        """Makes `error` the outcome, unless there is one, and wakes the waiting lanes."""
        with self._lock:
            if self.failure is None:
                self.failure = error
        for queue in (*self._activations, *self._gradients):
            queue.put(_Stopped)

    def _forward(self, lane: int, action: Action) -> None:
        step = self._step
        _, index, microbatch = action
        value = self._take(self._activations[index]) if index else step.inputs[microbatch]
        stage = self._stages[index]
        last = index + 1 == len(self._stages)
        start = mark(stage.device) if step.trace else 0.0
        with step.ambient.forward():
            output = stage.forward(
                microbatch, value, step.head if last else None, step.recompute[microbatch]
            )
        if step.trace:
            step.trace.record(lane, action, start, mark(stage.device))
        if not last:
            self._activations[index + 1].put(output)

    def _backward(self, lane: int, action: Action) -> None:
        step = self._step
        _, index, microbatch = action
        last = index + 1 == len(self._stages)
        grads = None if last else self._take(self._gradients[index])
        stage = self._stages[index]
        reduce = step.reduce and microbatch + 1 == len(step.inputs)
        start = mark(stage.device) if step.trace else 0.0
        grads = stage.backward(microbatch, grads, reduce)
        if step.trace:
            step.trace.record(lane, action, start, mark(stage.device))
        if index:
            self._gradients[index - 1].put(grads)

    def _take(self, queue: SimpleQueue[Any]) -> Any:
        value = queue.get()
        if value is _Stopped or self.failure is not None:
            raise _Stopped
        return value


def _work(
    inbox: SimpleQueue[Callable[[], None] | None], device: torch.device, intra_op: int
) -> None:
    torch.set_num_threads(intra_op)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (walk := inbox.get()) is not None:
        walk()
        del walk  # or this frame would keep the step's activations until the next one


def _dismiss(inboxes: Sequence[SimpleQueue[Callable[[], None] | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)
