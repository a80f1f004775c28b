"""The engine for stages that all live in this process: one worker thread a device.

Each thread walks its lane of the schedule from left to right. Every link between two stages is
two queues, one for activations and one for gradients:

    lane 0   F0 F1 .. B0 ..        stage 0 --activations--> stage 1
    lane 1      F0 B0 F1 ..                <---gradients---

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
from torch import Tensor

from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.stage import Head, Stage
from hybridtrain.pipeline.thread_state import ThreadState
from hybridtrain.pipeline.timeline import Timeline, mark
from hybridtrain.pipeline.transfer import receive, send, sync_streams
from hybridtrain.schedule import Action
from hybridtrain.skip import skip_scope

Lanes = Sequence[Sequence[Action]]


@dataclass
class Step:
    """One run of the pipeline over the micro-batches of one batch.

    TraceGuards:
        lanes: what each device does.
        inputs: the micro-batches that stage 0 gets.
        head: what the last stage does with each output.
        loss_gradients: what the backward of each micro-batch begins with: its share in the loss.
        recompute: for each micro-batch, whether its backward recomputes the activations.
        reduce: whether the gradients are averaged over the replicas, at the last micro-batch.
        trace: where to record what ran when.
    """

    lanes: Lanes
    inputs: Sequence[Any]
    head: Head
    recompute: Sequence[bool]
    loss_gradients: Sequence[Tensor | None] = ()
    reduce: bool = False
    trace: Timeline | None = None
    ambient: ThreadState = field(default_factory=ThreadState.capture)


class LocalEngine:
    """Executes steps on `stages`; lane `d` of every step runs in thread `d`."""

    def __init__(self, stages: Sequence[Stage], devices: Sequence[torch.device]) -> None:
        self._stages = stages
        self._devices = devices
        self._links = sorted({link for stage in stages for link in stage.outgoing}, key=str)
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = []
        if len(devices) == 1:
            return  # a single lane needs no thread of its own
        intra_op = threads_per_lane(len(devices))
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
        run = _Run(step, self._stages, self._links)
        if self._inboxes:
            sync_streams(self._devices, before=True)
            try:
                self._hand_out(run)
            except BaseException as interrupt:  # Ctrl-C between two lanes: all must still end
                run.fail(interrupt)
                self._hand_out(run)
            run.join()
            sync_streams(self._devices, before=False)
        else:
            run.walk(0)
        failure, run.failure = run.failure, None
        if failure is not None:
            for stage in self._stages:
                stage.clear()
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, and so would keep the step alive

    def _hand_out(self, run: _Run) -> None:
        for lane, inbox in enumerate(self._inboxes):
            inbox.put(lambda lane=lane: run.walk(lane))  # type: ignore[misc]


class _Stopped(Exception):
    """Another lane failed; nothing will come through the queues any more."""


@dataclass(frozen=True)
class _Ports:
    """The queues of one stage, in the order of its links."""

    receive: list[SimpleQueue[Any]]
    send: list[SimpleQueue[Any]]
    receive_gradients: list[SimpleQueue[Any]]
    send_gradients: list[SimpleQueue[Any]]


class _Run:
    """The state of one step while it runs."""

    def __init__(self, step: Step, stages: Sequence[Stage], links: Sequence[Link]) -> None:
        self.failure: BaseException | None = None
        self._stopped = False
        self._step = step
        self._stages = stages
        self._activations: dict[Link, SimpleQueue[Any]] = {link: SimpleQueue() for link in links}
        self._gradients: dict[Link, SimpleQueue[Any]] = {link: SimpleQueue() for link in links}
        self._ports = [
            _Ports(
                receive=[self._activations[link] for link in stage.incoming],
                send=[self._activations[link] for link in stage.outgoing],
                receive_gradients=[self._gradients[link] for link in stage.outgoing],
                send_gradients=[self._gradients[link] for link in stage.incoming],
            )
            for stage in stages
        ]
        self._finished = [threading.Event() for _ in step.lanes]
        self._lock = threading.Lock()

    def walk(self, lane: int) -> None:
        """Executes one lane; never raises."""
        step = self._step
        action: Action | None = None
        try:
            with step.ambient.entered(), skip_scope(None):
                for action in step.lanes[lane]:
                    if self._stopped:
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
            self._finished[lane].set()

    def join(self) -> None:
        """Waits until every lane has stopped; a second Ctrl-C does not wait."""
        for finished in self._finished:
            while not finished.is_set():
                try:
                    finished.wait()
                except BaseException as interrupt:
                    if self._stopped:
                        raise
                    self.fail(interrupt)

    def fail(self, error: BaseException) -> None:
        """Makes `error` the outcome, unless there is one, and wakes the waiting lanes."""
        with self._lock:
            if not self._stopped:
                self.failure = error
            self._stopped = True
        for queue in (*self._activations.values(), *self._gradients.values()):
            queue.put(_Stopped)

    def _forward(self, lane: int, action: Action) -> None:
        step = self._step
        _, index, microbatch = action
        stage, ports = self._stages[index], self._ports[index]
        messages = (
            [receive(self._take(queue), stage.device) for queue in ports.receive]
            if index
            else [(step.inputs[microbatch],)]
        )
        head = step.head if index + 1 == len(self._stages) else None
        start = mark(stage.device) if step.trace else 0.0
        with step.ambient.forward():
            sent = stage.forward(microbatch, messages, head, step.recompute[microbatch])
        if step.trace:
            step.trace.record(lane, action, start, mark(stage.device))
        for link, queue, message in zip(stage.outgoing, ports.send, sent, strict=True):
            queue.put(send(message, stage.device, self._stages[link.target].device))

    def _backward(self, lane: int, action: Action) -> None:
        step = self._step
        _, index, microbatch = action
        stage, ports = self._stages[index], self._ports[index]
        gradients = (
            [receive(self._take(queue), stage.device) for queue in ports.receive_gradients]
            if index + 1 < len(self._stages)
            else [[step.loss_gradients[microbatch]]]
        )
        reduce = step.reduce and microbatch + 1 == len(step.inputs)
        start = mark(stage.device) if step.trace else 0.0
        sent = stage.backward(microbatch, gradients, reduce)
        if step.trace:
            step.trace.record(lane, action, start, mark(stage.device))
        for link, queue, gradient in zip(stage.incoming, ports.send_gradients, sent, strict=True):
            queue.put(send(gradient, stage.device, self._stages[link.source].device))

    def _take(self, queue: SimpleQueue[Any]) -> Any:
        value = queue.get()
        if value is _Stopped or self._stopped:
            raise _Stopped
        return value


def threads_per_lane(lanes: int) -> int:
    """The cores of this process, shared out: PyTorch counts intra-op threads per thread."""
    return max(1, torch.get_num_threads() // lanes)


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
