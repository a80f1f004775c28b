"""The engine for stages that all live in this process: one worker thread per device.

Each thread runs its lane of the schedule from left to right, or one thread runs all lanes where
that is faster (see `thread_trial`). A link between two stages is two queues, one for activations
and one for gradients:

    lane 0   F0 F1 .. B0 ..        stage 0 --activations--> stage 1
    lane 1      F0 B0 F1 ..                <---gradients---

A thread whose input is not there yet waits in the queue; there is no barrier and no clock. In an
evaluation, where no backward holds the first stage back, it waits while the pipeline has
`_MOST_INSIDE` micro-batches for each stage, since what waits before a slow stage is memory. PyTorch
releases the interpreter's lock inside its kernels, so the threads compute in parallel, and on the
CPU a backward runs in the thread that calls it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

import torch

from hybridtrain._torch_private import ThreadDraws
from hybridtrain.accelerator import accelerator_of
from hybridtrain.errors import ConfigError
from hybridtrain.launch.activity import Lane, activity
from hybridtrain.launch.signals import ends_at_once
from hybridtrain.pipeline.engines.actions import ActionRunner
from hybridtrain.pipeline.engines.thread_trial import ThreadTrial
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import StagePorts, Step
from hybridtrain.pipeline.transfer import receive, send, sync_streams
from hybridtrain.schedule import Action, Schedule
from hybridtrain.skip import skip_scope
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
        self._stages = stages
        self._gpus = {device for device in devices if accelerator_of(device) is not None}
        self._links = links
        ends = {link.source for link in links} | {link.target for link in links}
        if ends - {stage.index for stage in stages}:
            raise ConfigError("engine=local runs pipelines whose stages are all in one process")
        # None while they are in use, and after a step that has failed, whose messages are in them
        self._ports: _Ports | None = None
        self._inboxes: list[Inbox] = []
        self._trial = None
        if len(devices) == 1:
            # a single lane runs in the caller's thread, in which `cuda` must mean this GPU
            if (accelerator := accelerator_of(devices[0])) is not None:
                accelerator.set_device(devices[0])
            return
        if not self._gpus:
            self._trial = ThreadTrial(tells=world.is_main)
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
        work = _work_of(step.schedule, one_thread)
        ports, self._ports = self._ports or _Ports(self._stages, self._links), None
        run = _StepRun(step, self._stages, ports, work)
        begun = time.perf_counter()
        if self._inboxes:
            if self._gpus:
                sync_streams(self._gpus, before=True)
            try:
                self._dispatch(run)
                run.join()
            except BaseException as interrupt:  # Ctrl-C between two lanes: all must still end
                if run.stop.requested:
                    raise
                run.abort(interrupt)
                if ends_at_once():  # all ends: no step will follow
                    raise
                self._dispatch(run)
                run.join()
            if self._gpus:
                sync_streams(self._gpus, before=False, values=run.values)
        else:
            run.run_actions(0)
        failure, run.failure = run.failure, None
        if failure is None:
            self._ports = ports
            if trial is not None and step.timeline is None:
                trial.took(time.perf_counter() - begun, step.schedule)
            return run.values
        for stage in self._stages:
            stage.clear()
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, and so would keep the step alive

    def _dispatch(self, run: _StepRun) -> None:
        for thread, inbox in zip(range(run.threads), self._inboxes, strict=False):
            inbox.put(lambda thread=thread: run.run_actions(thread))  # type: ignore[misc]


def _work_of(schedule: Schedule, one_thread: bool) -> list[_Work]:
    """Returns the actions of each thread."""
    if one_thread:
        return [schedule.in_one_order]
    return [zip(repeat(device), lane) for device, lane in enumerate(schedule.lanes)]


class _PipelineAborted(Exception):
    """Another lane has failed: nothing more will come through the queues."""


class _Stop:
    """A request to all lanes of a step to stop.

    Not an Event: an interrupt on the way into its methods may leave its lock taken for ever.
    """

    requested = False


class _QueuePort:
    """Both ends of one direction of a link: a queue, with a copy between devices."""

    __slots__ = ("_between", "_queue", "_stop")

    def __init__(self, source: torch.device, target: torch.device, kind: str, stop: _Stop) -> None:
        self._between = (source, target, kind) if source != target else None
        self._stop = stop
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def send(self, message: Any) -> None:
        self._queue.put(send(message, *self._between) if self._between else message)

    def receive(self) -> Any:
        message = self._queue.get()
        if message is None or self._stop.requested:
            raise _PipelineAborted
        return receive(message, self._between[1]) if self._between else message

    def wake_receiver(self) -> None:
        """Ends the wait of a thread in `receive`, after the run was aborted."""
        self._queue.put(None)


class _Ports:
    """The queues between the stages; empty between two steps.

    Attributes:
        of_stage: the ports of each stage.
        stop: requested when a step has failed.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link]) -> None:
        self.stop = _Stop()
        device = [stage.device for stage in stages]
        activations = {
            link: _QueuePort(device[link.source], device[link.target], "F", self.stop)
            for link in links
        }
        gradients = {
            link: _QueuePort(device[link.target], device[link.source], "B", self.stop)
            for link in links
        }
        self.of_stage = {
            stage.index: StagePorts(
                receive=[activations[link] for link in stage.incoming],
                send=[activations[link] for link in stage.outgoing],
                receive_gradients=[gradients[link] for link in stage.outgoing],
                send_gradients=[gradients[link] for link in stage.incoming],
            )
            for stage in stages
        }
        self._queues = [*activations.values(), *gradients.values()]

    def wake_receivers(self) -> None:
        """Ends the waits in `receive`."""
        for queue in self._queues:
            queue.wake_receiver()


class _StepRun:
    """The state of one step while it runs.

    Attributes:
        threads: how many run it.
        failure: the first exception, if any.
        stop: requested when there is one.
    """

    def __init__(
        self, step: Step, stages: Sequence[Stage], ports: _Ports, work: Sequence[_Work]
    ) -> None:
        self.threads = len(work)
        self.failure: BaseException | None = None
        self._step = step
        self._work = work
        self._ports = ports
        self.stop = ports.stop
        own = {stage.index: stage for stage in stages}
        self._runner = ActionRunner(step, own, ports.of_stage)
        schedule = step.schedule
        self._last = schedule.stages - 1
        # an entry for each micro-batch that may be taken in, where no backward holds that back
        self._free: SimpleQueue[None] | None = None
        if not schedule.trains:
            self._free = SimpleQueue()
            for _ in range(_MOST_INSIDE * schedule.stages):
                self._free.put(None)
        self._running = set(range(self.threads))
        self._ends: SimpleQueue[int] = SimpleQueue()
        self._activity = activity.begin_step(self.threads)
        self._lock = threading.Lock()

    @property
    def values(self) -> list[Any]:
        """The head's values by micro-batch."""
        return self._runner.values

    def run_actions(self, thread: int) -> None:
        """Executes the actions of one thread; never raises."""
        step, runner = self._step, self._runner
        action: Action | None = None
        doing = self._activity[thread]
        try:
            with step.thread_state.applied(), skip_scope(None), ThreadDraws():
                for lane, action in self._work[thread]:
                    if self.stop.requested:
                        break
                    doing.begin(action)
                    if self._free is not None and action.stage == 0:
                        self._wait_until_free(self._free, doing)
                    run = runner.forward if action.kind == "F" else runner.backward
                    run(lane, action, doing)
                    if self._free is not None and action.stage == self._last:
                        self._free.put(None)
        except _PipelineAborted:
            pass
        except BaseException as error:
            if action is not None:
                runner.add_note(error, action)
            self.abort(error)
        finally:
            doing.end()
            self._running.discard(thread)
            self._ends.put(thread)

    def _wait_until_free(self, free: SimpleQueue[None], doing: Lane) -> None:
        """Waits until the first stage may take one more micro-batch in."""
        doing.wait(True)
        free.get()
        doing.wait(False)
        if self.stop.requested:
            raise _PipelineAborted

    def join(self) -> None:
        """Waits until every thread has stopped; after a second signal it does not wait."""
        while self._running:
            try:
                self._ends.get(timeout=_LONGEST_WAIT_S)
            except Empty:
                continue
            except BaseException as interrupt:
                if self.stop.requested:
                    raise
                self.abort(interrupt)
                if ends_at_once():
                    raise

    def abort(self, error: BaseException) -> None:
        """Makes `error` the outcome, unless there is one already, and wakes the waiting threads."""
        with self._lock:
            if not self.stop.requested:
                self.failure = error
            self.stop.requested = True
        self._ports.wake_receivers()
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
