"""The engine for stages that all live in this process: one worker thread per device.

Each thread runs its lane of the schedule from left to right, or one thread runs all lanes where
that is faster (see `thread_trial`); between the stages there are queues (see `queue_wire`). In an
evaluation, where no backward holds the first stage back, it waits while the pipeline has
`_MOST_INSIDE` micro-batches for each stage, since what waits before a slow stage is memory. PyTorch
releases the interpreter's lock inside its kernels, so the threads compute in parallel, and on the
CPU a backward runs in the thread that calls it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

import torch

from hybridtrain.accelerator import accelerator_of
from hybridtrain.errors import ConfigError
from hybridtrain.launch.activity import Lane, activity
from hybridtrain.launch.second_signal import ends_at_once
from hybridtrain.pipeline.engines.actions import Aborted, ActionRunner, of_stages
from hybridtrain.pipeline.engines.queue_wire import QueueWire
from hybridtrain.pipeline.engines.thread_trial import ThreadTrial
from hybridtrain.pipeline.links import Link, Route, routes
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import Step
from hybridtrain.pipeline.transfer import sync_streams
from hybridtrain.schedule import Action, Schedule
from hybridtrain.world import World

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
        self._stages = {stage.index: stage for stage in stages}
        self._routes = routes(links)
        self._gpus = {device for device in devices if accelerator_of(device) is not None}
        ends = {link.source for link in links} | {link.target for link in links}
        if ends - set(self._stages):
            raise ConfigError("engine=local runs pipelines whose stages are all in one process")
        self._trial = None if self._gpus else ThreadTrial(tells=world.is_main)
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

    def forget(self) -> None:
        """Nothing to forget; see `Engine.forget`."""

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        trial = self._trial if step.schedule.trains else None
        one_thread = trial is not None and trial.one_thread_for(recorded=step.timeline is not None)
        run = _StepRun(step, self._stages, self._routes, _work_of(step.schedule, one_thread))
        begun = time.perf_counter()
        if self._gpus:
            sync_streams(self._gpus, before=True)
        try:
            self._dispatch(run)
            run.join()
        except BaseException as interrupt:  # Ctrl-C between two lanes: all must still end
            if run.runner.stopped:
                raise
            run.abort(interrupt)
            if ends_at_once():  # all ends: no step will follow
                raise
            self._dispatch(run)
            run.join()
        if self._gpus:
            sync_streams(self._gpus, before=False, values=run.runner.values)
        failure, run.failure = run.failure, None
        if failure is None:
            if trial is not None and step.timeline is None:
                trial.took(time.perf_counter() - begun, step.schedule)
            return run.runner.values
        for stage in self._stages.values():
            stage.clear()
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, and so would keep the step alive

    def _dispatch(self, run: _StepRun) -> None:
        for thread, inbox in zip(range(run.threads), self._inboxes, strict=False):
            inbox.put(partial(run.run_thread, thread))


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
        if not step.schedule.trains:
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
            self._running.discard(thread)
            self._ends.put(thread)

    def _bounded(self, work: _Work, free: SimpleQueue[None], doing: Lane) -> _Work:
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
        with self._lock:
            if not self.runner.stopped:
                self.failure = error
            self.runner.stopped = True
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
    with of_stages():
        while (run_lane := inbox.get()) is not None:
            run_lane()
            del run_lane  # or this frame would keep the step's activations until the next one


def _shut_down(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)
