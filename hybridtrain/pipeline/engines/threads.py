"""The engines for stages that all live in this process, and their wire, of queues.

`ThreadEngine` has a worker thread for each device, which runs its lane of the schedule from left to
right. `InlineEngine` is for stages that are all on one device, which it runs in the caller's
thread.

    caller     [1]                                              [4] all have ended
    thread 0       F0 [2]  F1 [2]  [3] . . . . . B0      F2 [2]  ...
    thread 1       [3] . . F0      B0 [2]        F1      B1 [2]  ...

[1] Each thread has an inbox, which gets the step's lane, to run in a copy of the caller's context
and under the caller's modes. [2] A message goes into a queue, of which each border has one in each
direction; where the devices differ, its copy begins. [3] A thread whose message is not there yet
waits in the queue; there is no barrier and no clock. [4] The first failure [5] stops the others
after their action, wakes those that wait, and comes out of `run` once every thread has ended: no
thread works on a step that the caller believes to be over.

PyTorch releases the interpreter's lock inside its kernels, so the threads compute in parallel, and
on the CPU a backward runs in the thread that calls it. In an evaluation, where no backward holds
the first stage back, it waits while the pipeline has `_MOST_INSIDE` micro-batches for each stage,
since what waits before a slow stage is memory.
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
        queue: the messages that nobody has taken yet; None ends a wait.
        between: the devices on its two sides, and its name; None: they are one.
    """

    queue: SimpleQueue[Any]
    between: tuple[torch.device, torch.device, str] | None


class QueueWire:
    """Hands on values in memory; see `Wire`. It is one step's."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._aborted = False
        self._lines: dict[tuple[str, int], _Line] = {}
        for before, after in pairwise(stages):
            apart = before.device != after.device
            forth = (before.device, after.device, "F") if apart else None
            back = (after.device, before.device, "B") if apart else None
            self._lines["F", after.index] = _Line(SimpleQueue(), forth)
            # which part of a backward takes the gradients is the same to the line
            line = _Line(SimpleQueue(), back)
            self._lines["B", before.index] = self._lines["I", before.index] = line

    def send(self, to: Action, message: list[Any]) -> None:
        """Puts the message into a queue; begins the copy if it goes to another device."""
        queue, between = self._lines[to.kind, to.stage]
        queue.put(message if between is None else transfer.send(message, *between))  # [2]

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        """Takes the next message out of a queue.

        Raises:
            Aborted: there is none, and none will come.
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
        """Ends the waits in `receive`, and those to come."""
        self._aborted = True
        for queue, _ in self._lines.values():
            queue.put(None)  # after the flag: who takes it, or a message before it, sees that


Inbox = SimpleQueue[Callable[[], None] | None]

# The actions of a thread in their order, each with its lane.
_Work = Iterable[tuple[int, Action]]

# Micro-batches for each stage that are in the pipeline at one time, in an evaluation: one is
# computed, one waits. No fewer than a group of `schedule.forward_only`: the first stage must not
# wait for micro-batches whose later stages come after it on the same device.
_MOST_INSIDE = 2

# How long a wait of the main thread may last. A signal that comes just before a wait does not end
# it, and Python calls the signal's handler when the wait is over.
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
                f"{setting('engine', 'local')} runs pipelines whose stages are all in one process"
            )
        # Not with replicas: two that have other numbers of micro-batches would take the last
        # backwards of their stages in another order each, and wait for one another's all-reduce.
        self._one_thread_for_modes = world.data_parallel_size == 1 and not self._gpus
        self._inboxes: list[Inbox] = []
        intra_op_threads = threads_per_lane(len(devices))
        for index, device in enumerate(devices):
            inbox: Inbox = SimpleQueue()
            # daemons: the interpreter must not wait for them at its exit
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
        # a mode is the caller's object, and may count: two threads would disturb one another
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
            if ends_at_once():  # all ends: no step will follow
                raise
            self._dispatch(run, modes)
            run.join()
        if self._gpus:  # and the caller's stream for theirs
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
        threads: how many run it.
        runner: of its actions, which is stopped when one has failed.
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
        # an entry for each micro-batch that may be taken in, where no backward holds that back
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
            self._running.discard(thread)  # before the entry that wakes `join`, which looks there
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
        """Makes `error` the outcome, unless there is one already, and wakes the waiting threads."""
        with self._lock:  # two threads may fail at one time
            if not self.runner.stopped:
                self.failure = error
            self.runner.stopped = True  # [5]: before a thread is woken, or it would go on
        self._wire.abort()
        if self._free is not None:
            self._free.put(None)


def threads_per_lane(lanes: int) -> int:
    """Returns this process's intra-op threads, shared out; PyTorch counts them per thread."""
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
    """Executes steps on `stages`, all of a pipeline, in the caller's thread.

    A model that is not cut is a single stage, with nothing to send.
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
