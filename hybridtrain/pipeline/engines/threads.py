"""The engines for pipelines within one process, and their transport, which consists of queues.

`ThreadEngine` has a worker thread for each device, which runs the device's lane of the schedule
from left to right. `InlineEngine` runs stages that share one device, in the caller's thread.

    caller     [1]                                              [4] all have ended
    thread 0       F0 [2]  F1 [2]  [3] . . . . . B0      F2 [2]  ...
    thread 1       [3] . . F0      B0 [2]        F1      B1 [2]  ...

[1] Each thread receives its lane of the step through an inbox and runs it in a copy of the caller's
context, under the caller's modes. [2] Messages go into queues, one per border and direction; if the
devices differ, the copy starts here. [3] A thread waits in the queue until its message arrives;
there is no barrier and no clock. [4] The first failure [5] stops the other threads after their
current action, wakes waiting threads, and leaves `run` once every thread has ended, so no thread
still works on a step that is over for the caller.

PyTorch releases the GIL inside its kernels, so the threads compute in parallel; on the CPU a
backward runs in the thread that calls it. In an evaluation no backward holds the first stage back,
so it waits while the pipeline holds `_MOST_INSIDE` micro-batches per stage, because messages queued
before a slow stage take memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import pairwise, repeat
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.torch_private import CallerModes
from hybridtrain.errors import ConfigError, setting
from hybridtrain.launch import LaneActivity, activity, ends_at_once
from hybridtrain.pipeline import transfer
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.engines.actions import Aborted, ActionRunner
from hybridtrain.pipeline.links import Link, Route, routes
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.transfer import sync_streams
from hybridtrain.schedule import Action, Schedule
from hybridtrain.world import World


class _Line(NamedTuple):
    """One direction of a border.

    Attributes:
        queue: the messages not yet received; None ends a wait.
        between: the devices on both sides, and the name; None: both sides share a device.
    """

    queue: SimpleQueue[Any]
    between: tuple[torch.device, torch.device, str] | None


class QueueWire:
    """Passes values on in memory, for one step; see `Wire`."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._aborted = False
        self._lines: dict[tuple[str, int], _Line] = {}
        for before, after in pairwise(stages):
            apart = before.device != after.device
            forth = (before.device, after.device, "F") if apart else None
            back = (after.device, before.device, "B") if apart else None
            self._lines["F", after.index] = _Line(SimpleQueue(), forth)
            # gradients use the same line for a whole backward and for its first part
            line = _Line(SimpleQueue(), back)
            self._lines["B", before.index] = self._lines["I", before.index] = line

    def send(self, to: Action, message: list[Any]) -> None:
        """Puts the message into a queue; starts the copy if it goes to another device."""
        queue, between = self._lines[to.kind, to.stage]
        queue.put(message if between is None else transfer.send(message, *between))  # [2]

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        """Takes the next message out of a queue.

        Raises:
            Aborted: the queue is empty and no message will come.
        """
        queue, between = self._lines[action.kind, action.stage]
        if queue.empty():
            doing.wait(True)
            message = queue.get()  # [3]
            doing.wait(False)
        else:
            message = queue.get()
        if message is None or self._aborted:
            raise Aborted
        if between is not None:  # on a GPU its stream waits for the copy, not this thread
            message = transfer.receive(message, between[1])
        return message  # type: ignore[no-any-return]

    def abort(self) -> None:
        """Ends current and future waits in `receive`."""
        self._aborted = True
        for queue, _ in self._lines.values():
            queue.put(None)  # after the flag, so that the receiver sees the flag


Inbox = SimpleQueue[Callable[[], None] | None]

# The actions of a thread in their order, each with its lane.
_Work = Iterable[tuple[int, Action]]

# The most micro-batches per stage in the pipeline during an evaluation: one is
# computed, one waits. At least a group of `schedule.forward_only`: the first stage must not
# wait for micro-batches whose later stages come after it on the same device.
_MOST_INSIDE = 2

# The longest wait of the main thread. A signal right before a wait does not end the wait, and
# Python calls the signal's handler only after it.
_LONGEST_WAIT_S = 0.5


class ThreadEngine:
    """Executes steps on `stages`; lane `d` of a schedule runs in thread `d`.

    Raises:
        ConfigError: some stages are in another process.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link], world: World) -> None:
        devices = world.devices
        self._devices = devices
        self._stages = {stage.index: stage for stage in stages}
        self._routes = routes(links)
        self._gpus = {device for device in devices if accelerator_of(device) is not None}
        ends = {link.source for link in links} | {link.target for link in links}
        if ends - set(self._stages):
            raise ConfigError(
                f"{setting('engine', 'local')} requires all stages of the pipeline in one process"
            )
        # Not with replicas: two replicas with different numbers of micro-batches would run the last
        # backwards of their stages in different orders, and deadlock in the all-reduce.
        self._one_thread_for_modes = world.data_parallel_size == 1 and not self._gpus
        self._inboxes: list[Inbox] = []
        intra_op_threads = threads_per_lane(len(devices))
        for index, device in enumerate(devices):
            inbox: Inbox = SimpleQueue()
            # daemon threads: the interpreter must not wait for them at exit
            threading.Thread(
                target=_work,
                args=(inbox, device, intra_op_threads),
                name=f"stage-{index}",
                daemon=True,
            ).start()
            self._inboxes.append(inbox)
        weakref.finalize(self, _shut_down, self._inboxes)

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        modes = CallerModes.capture()
        # a mode is the caller's object and may have state, which two threads must not share
        one_thread = any(modes) and self._one_thread_for_modes
        run = _StepRun(step, self._stages, self._routes, _work_of(step.schedule, one_thread))
        if self._gpus:
            # the threads' streams wait for what the caller has queued, such as the optimizer's step
            sync_streams(self._gpus, before=True)
        try:
            self._dispatch(run, modes)  # [1]
            run.join()  # [4]
        except BaseException as interrupt:  # Ctrl-C between two lanes: all must still end
            if run.runner.stopped:
                raise
            run.abort(interrupt)
            if ends_at_once():  # the process exits: no step will follow
                raise
            self._dispatch(run, modes)
            run.join()
        if self._gpus:  # the caller's stream waits for the threads' streams
            sync_streams(self._gpus, before=False, values=run.runner.values)
        failure, run.failure = run.failure, None
        if failure is None:
            return run.runner.values
        for stage in self._stages.values():
            stage.clear()
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, and so would keep the step alive

    def _dispatch(self, run: _StepRun, modes: CallerModes) -> None:
        for thread, inbox in zip(range(run.threads), self._inboxes, strict=False):
            task = partial(run.run_thread, thread)
            if any(modes):
                task = partial(_with_modes, modes, self._devices[thread], task)
            # a context can run once at a time, so each thread has its own copy
            inbox.put(partial(copy_context().run, task))


def _with_modes(modes: CallerModes, device: torch.device, task: Callable[[], None]) -> None:
    with modes.applied(device):
        task()


def _work_of(schedule: Schedule, one_thread: bool) -> list[_Work]:
    """Returns the actions of each thread."""
    if one_thread:
        return [schedule.in_one_order]
    return [zip(repeat(device), lane, strict=False) for device, lane in enumerate(schedule.lanes)]


class _StepRun:
    """The state of one step while it runs.

    Attributes:
        threads: the number of threads that run it.
        runner: runs its actions; stopped after a failure.
        failure: the first exception, if any.
    """

    def __init__(
        self,
        step: Step,
        stages: Mapping[int, Stage],
        routes: Mapping[int, Route],
        work: Sequence[_Work],
    ) -> None:
        self.threads = len(work)
        self.failure: BaseException | None = None
        self._wire = QueueWire(list(stages.values()))
        self.runner = ActionRunner(step, stages, routes, self._wire)
        self._work = work
        self._last = step.schedule.stages - 1
        # an entry for each further micro-batch that may enter, in steps without backwards
        self._free: SimpleQueue[None] | None = None
        if not step.schedule.trains and self.threads > 1:
            self._free = SimpleQueue()
            for _ in range(_MOST_INSIDE * step.schedule.stages):
                self._free.put(None)
        self._running = set(range(self.threads))
        self._ends: SimpleQueue[int] = SimpleQueue()
        self._activity = activity.begin_step(self.threads)
        self._lock = threading.Lock()

    def run_thread(self, thread: int) -> None:
        """Executes the actions of one thread; never raises."""
        doing, work = self._activity[thread], self._work[thread]
        try:
            if self._free is not None:
                work = self._bounded(work, self._free, doing)
            self.runner.run_actions(work, doing)
        except Aborted:
            pass
        except BaseException as error:
            self.abort(error)
        finally:
            self._running.discard(thread)  # before the entry that wakes `join`, which checks it
            self._ends.put(thread)

    def _bounded(self, work: _Work, free: SimpleQueue[None], doing: LaneActivity) -> _Work:
        """Yields `work`, each micro-batch once the pipeline may take one more in."""
        for lane, action in work:
            if action.stage == 0:
                doing.begin(action)
                doing.wait(True)
                free.get()
                doing.wait(False)
            yield lane, action
            if action.stage == self._last:
                free.put(None)

    def join(self) -> None:
        """Waits until every thread has stopped; after a second signal it does not wait."""
        while self._running:
            try:
                self._ends.get(timeout=_LONGEST_WAIT_S)
            except Empty:
                continue
            except BaseException as interrupt:
                if self.runner.stopped:
                    raise
                self.abort(interrupt)
                if ends_at_once():
                    raise

    def abort(self, error: BaseException) -> None:
        """Makes the first `error` the outcome of the step, and wakes the waiting threads."""
        with self._lock:  # two threads may fail at once
            if not self.runner.stopped:
                self.failure = error
            self.runner.stopped = True  # [5]: before waking a thread, or it would continue
        self._wire.abort()
        if self._free is not None:
            self._free.put(None)


def threads_per_lane(lanes: int) -> int:
    """Returns a worker's share of the intra-op threads; PyTorch's setting is per thread."""
    return max(1, torch.get_num_threads() // lanes)


def _work(inbox: Inbox, device: torch.device, intra_op_threads: int) -> None:
    """Runs what comes into `inbox` until that is None; the body of a worker thread."""
    torch.set_num_threads(intra_op_threads)
    if (accelerator := accelerator_of(device)) is not None:
        accelerator.set_device(device)
    while (run_lane := inbox.get()) is not None:
        run_lane()
        del run_lane  # or this frame would keep the step's activations until the next one


def _shut_down(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class InlineEngine:
    """Executes steps on all `stages` of a pipeline, in the caller's thread.

    An uncut model is a single stage, with nothing to send.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link], world: World) -> None:
        self._stages = stages
        self._of_index = {stage.index: stage for stage in stages}
        self._routes = routes(links)
        # in the caller's thread `cuda` must mean this GPU
        if (accelerator := stages[0].accelerator) is not None:
            accelerator.set_device(stages[0].device)

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        runner = ActionRunner(step, self._of_index, self._routes, QueueWire(self._stages))
        (doing,) = activity.begin_step(1)
        try:
            runner.run_actions(step.schedule.in_one_order, doing)
        except BaseException:
            for stage in self._stages:
                stage.clear()
            raise
        return runner.values
