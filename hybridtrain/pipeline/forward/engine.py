"""The engine that runs the model's own forward; `part_engine` is for stages in other processes.

    caller        [1] hands out the first micro-batches                          [5] all have ended
    a thread          [2] F0@0 . F0@1 [3] B0@1 . . . B0@0
    another one           [2] F1@0 . . . F1@1 [3]
    a third one                                   [4] B1@1 . B1@0

[1] A micro-batch is a `Trip`, which runs the whole forward in one thread. [2] Before each stage it
waits for its turn (`Turns`), in the order of the schedule, so a device does one thing at a time.
[3] Its thread goes on with the backwards, stage by stage, as long as it is their turn; otherwise
[4] a free thread takes them up at their turn. [5] The first failure wakes and ends all.

Threads are kept, and as few as keep all devices busy, because OpenMP keeps a pool of threads for
each thread that computes. A pipeline of one stage has no threads: no forward waits, so the caller
runs every action itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.intra_op_threads import threads_per_lane
from hybridtrain._base.skip import skip_scope
from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import (
    CallerModes,
    compiled_call,
    draws_here,
    is_profiled,
    leave_draws,
    profiled,
    saved_hooks,
    without_fast_attention,
    without_torch_function,
)
from hybridtrain.errors import ConfigError, UserError, argument, setting
from hybridtrain.graph import arguments_of
from hybridtrain.head import lazily
from hybridtrain.launch import activity, ends_at_once
from hybridtrain.pipeline import transfer
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.forward.buffer_writers import BufferWriters
from hybridtrain.pipeline.forward.glue import watch_autograd
from hybridtrain.pipeline.forward.layers import LayerCall
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.forward.trip import Trip
from hybridtrain.pipeline.forward.turns import Stopped, Turns
from hybridtrain.pipeline.forward.values import Model
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.offload import StepCopies, saving, stop_saving
from hybridtrain.pipeline.recomputation_proof import is_compared
from hybridtrain.pipeline.run_ahead import RunAhead
from hybridtrain.pipeline.timeline import Mark, mark
from hybridtrain.pipeline.transfer import Inputs, sync_streams
from hybridtrain.schedule import WORDS, Action, ActionKind, Schedule, peak_in_flight

# The longest wait of the main thread. A signal right before a wait does not end the wait, and
# Python calls the signal's handler only after it.
_LONGEST_WAIT_S = 0.5

_NONE: AbstractContextManager[Any] = nullcontext()


class ForwardEngine:
    """Executes steps by running the model's forward for each micro-batch.

    Args:
        model: what trips know of the model.
        stages: all stages of the pipeline.
        rng: seeds random operations.
        devices: the devices of the lanes.
        hold_roots: keep the tensors where backwards start; DDP looks for unused parameters there.
        compiles: whether layers are compiled.
        moves_saved: whether what autograd saves may leave the devices.

    Attributes:
        moves_saved: the same.
    """

    run_type: type[StepRun]

    def __init__(
        self,
        model: Model,
        stages: Sequence[ForwardStage],
        rng: LayerRNG,
        devices: Sequence[torch.device],
        hold_roots: bool,
        compiles: bool,
        moves_saved: bool,
    ) -> None:
        watch_autograd()
        self.moves_saved = moves_saved
        self._model = model
        self._stages = stages
        self._rng = rng
        self._devices = devices
        self._hold_roots = hold_roots
        self._compiles = compiles
        self._gpus = {device for device in devices if accelerator_of(device) is not None}
        self._by_index = {stage.index: stage for stage in stages}
        self._offloads = {k: stage.offload for k, stage in self._by_index.items() if stage.offload}
        self._is_cut = len(model.devices) > 1
        self._threads = 0
        self._inbox: SimpleQueue[_Task | None] = SimpleQueue()
        if len(stages) == 1 and stages[0].accelerator is not None:
            stages[0].accelerator.set_device(stages[0].device)

    def run(self, step: Step) -> list[Any]:
        """Executes `step`; see `Engine.run`."""
        with without_fast_attention():
            return self._run(step)

    def _run(self, step: Step) -> list[Any]:
        for stage in self._stages:
            stage.runs.follow_compiled()
        if len(self._stages) == 1:
            return self._run_here(step)
        for name, module in self._model.containers.items():
            if not isinstance(compiled_call(module), LayerCall | None):
                raise ConfigError(
                    f"{name or type(module).__name__} has been compiled, but the model is cut "
                    f"inside it: compile its layers, or set {argument('compile')}"
                )
        modes = CallerModes.capture()
        # a mode is the caller's object and may have state, which two threads must not share
        run = self.run_type(self, step, modes, serial=any(modes))
        if self._gpus:
            # the threads' streams wait for what the caller has queued, such as the optimizer's step
            sync_streams(self._gpus, before=True)
        try:
            self._start(run)  # [1]
            run.join()  # [5]
        except BaseException as interrupt:  # Ctrl-C: all must still end
            if not run.stopped:
                run.abort(interrupt)
            if ends_at_once():  # the process exits: no step will follow
                raise
            self._start(run)  # what was not handed out yet must end too
            run.join()
        if self._gpus:
            sync_streams(self._gpus, before=False, values=run.values)
        failure, run.failure = run.failure, None
        del run.first  # a reference cycle, which would keep the outputs
        if failure is None:
            run.finish()
            return run.values
        for stage in self._stages:
            stage.clear()
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame, and so would keep the step alive

    def _is_observed(self, step: Step) -> bool:
        """Returns whether trips look inside all layers: in some steps of each kind.

        Not where layers are compiled: those that the self-check has seen run uncompiled, always,
        because a resumed run must compute what the uninterrupted one does.
        """
        return self._is_cut and is_compared(step.number) and not self._compiles

    def _run_here(self, step: Step) -> list[Any]:
        """Runs a pipeline of one stage in the caller's thread."""
        run = self.run_type(self, step, CallerModes(), serial=False, is_alone=True)
        draws = draws_here()
        (stage,) = self._stages
        ((number, doing),) = run.activity.items()
        try:
            with step.thread_state.applied():
                for action in step.schedule.lanes[number]:
                    kind, _, microbatch = action
                    doing.begin(action)
                    if kind == "F":
                        run.forward(microbatch)
                    elif kind == "W":
                        run.backward(action, ())
                    else:
                        run.backward(action, run.gradients_from_after(stage.index, microbatch))
            run.finish()
        except BaseException:
            leave_draws(draws)
            stage.clear()
            raise
        finally:
            doing.end()
        return run.values

    def _start(self, run: StepRun) -> None:
        schedule, lanes = run.step.schedule, len(self._devices)
        # while all trips that may run wait, each device may still run a backward
        wanted = trips_at_once(run.step) + lanes * schedule.trains
        while self._threads < wanted:
            # a daemon thread: the interpreter must not wait for it at exit
            threading.Thread(
                target=_work,
                args=(self._inbox, threads_per_lane(lanes)),
                name=f"stages-{self._threads}",
                daemon=True,
            ).start()
            weakref.finalize(self, self._inbox.put, None)
            self._threads += 1
        self._inbox.put(run.first)


def trips_at_once(step: Step) -> int:
    """Returns how many micro-batches may be in their forwards at the same time."""
    if step.schedule.made_before:
        return 0
    return step.schedule.chunks if step.furthest_ahead else _trips_at_once(step.schedule)


@cache
def _trips_at_once(schedule: Schedule) -> int:
    # as many as the first stage holds, but at most two per stage: one is computed, one waits
    held = peak_in_flight(schedule)[0] if schedule.trains else schedule.chunks
    most = max(suspended_at_once(schedule), min(held, 2 * schedule.stages))
    return min(schedule.chunks, most)


def suspended_at_once(schedule: Schedule) -> int:
    """Returns how many forwards are between their first and last stage at the same time.

    Counted in an order that satisfies all dependencies. With as many threads, every action of that
    order finds its trip running: those before it are over or hold a thread, and trips begin in one
    order: the order of the first stage.
    """
    under_way = most = 0
    for _, action in schedule.in_one_order:
        if action.kind == "F":
            under_way += action.stage == 0
            most = max(most, under_way)
            under_way -= action.stage == schedule.stages - 1
    return most


@cache
def kinds_of_backwards(schedule: Schedule) -> Mapping[tuple[int, int], ActionKind]:
    """Returns, by stage and micro-batch, whether a backward is whole (`B`) or divided (`I`)."""
    return {
        (action.stage, action.microbatch): action.kind
        for lane in schedule.lanes
        for action in lane
        if action.kind in ("B", "I")
    }


class StepRun:
    """The state of one step while it runs.

    Attributes:
        step: the step.
        values: the head's values by micro-batch.
        failure: the first exception, if any.
        stopped: whether it has failed.
        first: the task that begins the step.
        activity: what each device of this process does, by its lane.
        only_arguments: the types of inputs that are the only argument of a forward.
    """

    only_arguments: tuple[type, ...] = (Tensor,)

    first: _Task

    def __init__(
        self,
        engine: ForwardEngine,
        step: Step,
        modes: CallerModes,
        serial: bool,
        is_alone: bool = False,
    ) -> None:
        schedule = step.schedule
        self.step = step
        self.values: list[Any] = [None] * schedule.chunks
        self.failure: BaseException | None = None
        self.stopped = False
        self._engine = engine
        self._stages = engine._by_index
        self._first, self._last = engine._stages[0].index, engine._stages[-1].index
        self._model = engine._model
        self._modes = modes
        self._lane_of = schedule.lane_of
        self._is_alone = is_alone
        self._makes_graphs = step.makes_graphs
        self._is_profiled = is_profiled()
        self._starts: dict[int, Mark] = {}
        self._spans: dict[int, AbstractContextManager[object]] = {}  # in a profiler's trace
        # where values are copied, an evaluation looks for them too
        self._learns = (self._makes_graphs or self._model.moves) and engine._is_observed(step)
        self._take = step.source
        self._copies = self._new_copies() if engine._offloads else None
        if self._copies is not None:
            self._take = self._own_source
        # In the self-check's step, in which no two stages run at the same time.
        one_by_one = step.furthest_ahead and not is_alone
        self._writers = BufferWriters(self._model.net) if one_by_one else None
        self._run_ahead: RunAhead | None = None
        if self._stages[self._first].accelerator is not None:
            self._take = Inputs(self._take, schedule.chunks, self._model.devices[0]).take
        if engine._gpus:
            self._run_ahead = RunAhead(schedule, self._stages)
        saves = self._copies is not None and engine.moves_saved
        self._has_contexts = saves or self._model.is_lazy or bool(step.thread_state.autocast_dtypes)
        if is_alone:
            self.activity = {self._lane_of[self._first]: activity.begin_step(1)[0]}
        else:
            self._begin_turns(serial)

    def _begin_turns(self, serial: bool) -> None:
        """Prepares what threads share, and queues the tasks that begin micro-batches."""
        step, schedule = self.step, self.step.schedule
        lanes = sorted({self._lane_of[stage] for stage in self._stages})
        self.activity = dict(zip(lanes, activity.begin_step(len(lanes)), strict=True))
        # where gradients come from the loss, or from another process
        self._tops = [k for k in sorted(self._stages, reverse=True) if k + 1 not in self._stages]
        self._under_way = 0  # trips in their forwards
        self._most_under_way = trips_at_once(step)
        self._delayed: _Task | None = None  # a trip, because so many are under way
        self._lock = threading.Lock()
        self._left = 1  # tasks
        self._all_ended: SimpleQueue[None] = SimpleQueue()
        self._following: dict[int, _Task] = {}  # by the micro-batch that has just left a device
        self._kinds = kinds_of_backwards(schedule)
        self._context = copy_context()
        self._turns: dict[int, Turns[_Task]]
        if len(lanes) > 1 and (serial or step.furthest_ahead):
            order = schedule.furthest_ahead if step.furthest_ahead else schedule.in_one_order
            self._turns = dict.fromkeys(lanes, Turns([action for _, action in order]))
        else:
            self._turns = {lane: Turns(schedule.lanes[lane]) for lane in lanes}
        for action, begin in self._beginnings():
            if self._turns[self._lane_of[action.stage]].has_come(action, begin):
                self.first = begin

    def _new_copies(self) -> StepCopies | None:
        """Returns the copies of activations to the host and back, if there are any.

        Raises:
            ConfigError: the caller's hooks decide where saved tensors are.
        """
        offloads = self._engine._offloads
        if not (self._makes_graphs or self.step.schedule.made_before):
            return None
        if self._makes_graphs and (self._modes.saved or saved_hooks() is not None):
            raise ConfigError(
                "hooks on saved tensors around the step (torch.autograd.graph.saved_tensors_hooks) "
                f"decide where activations wait, so {argument('offload')} would move nothing: "
                f"remove the hooks, or set {setting('offload', 'none')}"
            )
        net = self._model.net
        stays = {storage_id(tensor) for tensor in (*net.parameters(), *net.buffers())}
        counts, timeline = is_compared(self.step.number), self.step.timeline
        return StepCopies(self.step.schedule, offloads, stays, counts, timeline)

    def _own_source(self, microbatch: int) -> Any:
        """Returns the inputs of a micro-batch, which stay on their device."""
        assert self._copies is not None
        return self._copies.stays(self.step.source(microbatch))

    # --- tasks

    def _beginnings(self) -> Iterator[tuple[Action, _Task]]:
        """Yields the action with which each micro-batch begins, and its task."""
        schedule = self.step.schedule
        for microbatch in range(schedule.chunks):
            if schedule.made_before:  # their forwards have run, so the backwards begin
                gradients = self._stages[self._last].gradients_of_loss(microbatch)
                task = self._task(self._go_back, self._last, microbatch, gradients)
                yield Action(self._kinds[self._last, microbatch], self._last, microbatch), task
            else:
                yield Action("F", self._first, microbatch), self._task(self._begin_trip, microbatch)

    def _begin_trip(self, microbatch: int) -> _Task | None:
        """Runs the forward of a micro-batch, and its backwards as long as it is their turn."""
        with self._lock:
            if self._under_way == self._most_under_way:
                self._delayed = self._task(self._begin_trip, microbatch)
                return None
            self._under_way += 1
        following = self.forward(microbatch)
        with self._lock:
            self._under_way -= 1
            delayed, self._delayed = self._delayed, None
        if delayed is not None:
            self._hand_out(delayed)
        if not self.step.schedule.trains:
            return following
        for top in self._tops:
            gradients = self.gradients_from_after(top, microbatch)
            following = self._go_back(top, microbatch, gradients, following)
        return following

    def gradients_from_after(self, stage: int, microbatch: int) -> Any:
        """Returns the gradients with which the backwards of a micro-batch begin, in a stage."""
        return self._stages[stage].gradients_of_loss(microbatch)

    def _go_back(
        self, stage: int, microbatch: int, gradients: Any, following: _Task | None = None
    ) -> _Task | None:
        """Runs the backwards of a micro-batch from a stage on, as long as it is their turn.

        Args:
            stage: the index of the stage.
            microbatch: the index of the micro-batch.
            gradients: the gradients from the stage after it.
            following: what runs next on the device that this thread has left.

        Returns:
            what runs next on the last device that it has left.
        """
        for index in range(stage, -1, -1):
            if index not in self._stages:
                break
            action = Action(self._kinds[index, microbatch], index, microbatch)
            turns = self._turns[self._lane_of[index]]
            if not turns.has_come(action, self._task(self._go_back, *action[1:], gradients)):
                break
            if following is not None:
                self._hand_out(following)
            gradients, following = self.backward(action, gradients)
            if action.kind == "I":
                rest = Action("W", index, microbatch)
                task = self._task(self._run_rest, rest)
                if turns.has_come(rest, task):
                    following = task
        return following

    def _run_rest(self, action: Action) -> _Task | None:
        """Runs the part of a backward that nothing waits for."""
        return self.backward(action, ())[1]

    def _task(self, function: Callable[..., _Task | None], *arguments: Any) -> _Task:
        return _Task(self, function, arguments)

    def _hand_out(self, task: _Task) -> None:
        with self._lock:
            self._left += 1
        self._engine._inbox.put(task)

    def run(
        self, function: Callable[..., _Task | None], arguments: tuple[Any, ...]
    ) -> _Task | None:
        """Runs a task in this thread, and returns the next one for it; never raises."""
        draws, following = draws_here(), None
        try:
            applied: AbstractContextManager[object] = _NONE
            if any(self._modes):
                # without an index, a default device is the device of the stage
                applied = self._modes.applied(torch.device(self._model.devices[0].type))
            with applied, self.step.thread_state.applied():
                following = function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            leave_draws(draws)
            self.abort(error)
        finally:
            if following is None:
                with self._lock:
                    self._left -= 1
                    is_last = not self._left
                if is_last:
                    self._all_ended.put(None)
        return following

    def forward(self, microbatch: int) -> _Task | None:
        """Runs the forward of a micro-batch through all stages.

        Returns:
            what runs next on the device of the last stage.
        """
        trip = self._new_trip(microbatch)
        try:
            with skip_scope({}):
                self.values[microbatch] = trip.run(
                    partial(self._arguments, microbatch),
                    partial(self.step.head, microbatch),
                    self._contexts() if self._has_contexts else _NONE,
                    self._hold if self._makes_graphs else None,
                )
        except Exception as error:
            stage = self._stages.get(trip.stage, f"stage {trip.stage}")
            error.add_note(f"in the forward of micro-batch {microbatch} on {stage!r}")
            raise
        finally:
            if self._copies is not None:
                stop_saving()
            if self._spans and (span := self._spans.pop(microbatch, None)):  # of a failed forward
                span.__exit__(None, None, None)
        return None if self._is_alone else self._following.pop(microbatch, None)

    @contextmanager
    def _contexts(self) -> Iterator[None]:
        """Surrounds a forward and its head."""
        saves = self._copies is not None and self._engine.moves_saved
        with (
            saving() if saves else _NONE,
            self.step.thread_state.autocast(),
            lazily() if self._model.is_lazy else _NONE,
        ):
            yield

    def _hold(self, trip: Trip) -> None:
        """Gives the stages what they need for the backwards of a micro-batch.

        Raises:
            UserError: there is nothing to train.
        """
        with without_torch_function():
            if not trip.is_trainable:
                raise UserError(
                    "the loss depends on no trainable parameter, so there is nothing to train"
                )
        stages = self._stages.values()
        whole = [stage.runs.recomputes(trip.microbatch) for stage in stages]
        for stage, in_flight in zip(stages, trip.in_flight(whole), strict=True):
            stage.hold(trip.microbatch, in_flight)

    def _new_trip(self, microbatch: int) -> Trip:
        return Trip(
            self._model,
            microbatch,
            self._engine._rng.drawing_in(microbatch),
            self._enter,
            self._leave,
            self._makes_graphs,
            self._engine._hold_roots,
            self._learns,
        )

    def _arguments(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = self._take(microbatch)
        if type(inputs) in self.only_arguments:
            return (inputs,), {}
        return arguments_of(self._model.net, inputs)

    def _enter(self, stage: int, microbatch: int) -> None:
        if not self._is_alone:
            action, lane = Action("F", stage, microbatch), self._lane_of[stage]
            self._turns[lane].wait(action)
            self.activity[lane].begin(action)
            if self._run_ahead is not None:
                self._run_ahead.before_forward(stage)
            self.activity[lane].wait(False)
        elif self._run_ahead is not None:
            self._run_ahead.before_forward(stage)
        part = self._stages[stage]
        if part.accelerator is not None:
            part.accelerator.set_device(part.device)
        self._take_message(stage, microbatch)
        if self._copies is not None:
            self._copies.before(Action("F", stage, microbatch))
        if part.replica_states is not None:
            part.enter(microbatch)
        if self._is_profiled:
            self._spans[microbatch] = span = profiled(Action("F", stage, microbatch))
            span.__enter__()
        if self._writers is not None:
            self._writers.enter()
        if self.step.timeline is not None:
            self._starts[microbatch] = mark(part.device)

    def _leave(self, stage: int, microbatch: int) -> None:
        lane = self._lane_of[stage]
        if self._writers is not None:
            self._writers.leave(stage)
        if self._spans and (span := self._spans.pop(microbatch, None)):
            span.__exit__(None, None, None)
        if self.step.timeline is not None:
            start, device = self._starts[microbatch], self._stages[stage].device
            self.step.timeline.record(lane, Action("F", stage, microbatch), start, mark(device))
        if self._copies is not None:
            self._copies.after(Action("F", stage, microbatch))
        if self._run_ahead is not None:
            self._run_ahead.after(Action("F", stage, microbatch))
        self._send_message(stage, microbatch)
        if not self._is_alone:
            self.activity[lane].wait(True)  # until the next action of the lane begins
            following = self._turns[lane].leave()
            if following is None:
                return
            if stage == self._last:
                self._following[microbatch] = following
            else:  # this thread goes on to the next stage
                self._hand_out(following)

    def _take_message(self, stage: int, microbatch: int) -> None:
        """Takes what other processes send to a forward."""

    def _send_message(self, stage: int, microbatch: int) -> None:
        """Sends what other processes get from a forward."""

    # --- backwards

    def backward(self, action: Action, gradients: Any) -> tuple[Any, _Task | None]:
        """Runs a backward, or a part of it, at its turn.

        Args:
            action: the action.
            gradients: the gradients from the stage after it, or of the loss; none for `W`.

        Returns:
            the gradients for the stage before it, and what runs next on the device.
        """
        step, (kind, index, microbatch) = self.step, action
        stage, lane = self._stages[index], self._lane_of[index]
        if not self._is_alone:
            self.activity[lane].begin(action)
            self.activity[lane].wait(False)
        if stage.accelerator is not None:
            stage.accelerator.set_device(stage.device)
        if self._copies is not None:
            self._copies.before(action)
        if isinstance(gradients, transfer.Transfer):
            gradients = transfer.receive(gradients, stage.device)
        # the last micro-batch of a stage comes last, see `schedule.validate`
        reduce = step.reduce and microbatch + 1 == step.schedule.chunks
        start = 0.0 if step.timeline is None else mark(stage.device)
        noting: Any = None
        if reduce and step.timeline is not None and stage.reducer is not None:
            noting = stage.reducer.noting_computed(stage.device)
        if kind == "W":
            run: Callable[[], Any] = partial(stage.backward_to_weights, microbatch, reduce)
        else:
            run = partial(stage.backward, kind, microbatch, gradients, reduce)
        computed = None
        try:
            if noting is None and not self._is_profiled:
                sent = run()
            else:
                with profiled(action), noting or _NONE as computed:
                    sent = run()
        except Exception as error:
            error.add_note(f"in the {WORDS[kind]} of micro-batch {microbatch} on {stage!r}")
            raise
        if step.timeline is not None:
            end = mark(stage.device)
            step.timeline.record(lane, action, start, end, computed[-1] if computed else None)
        if self._copies is not None:
            self._copies.after(action)
        if self._run_ahead is not None:
            self._run_ahead.after(action)
        if kind != "W" and index:
            sent = self._sent_back(sent, index, microbatch)
        if not self._is_alone:
            self.activity[lane].wait(True)  # until the next action of the lane begins
            return sent, self._turns[lane].leave()
        return sent, None

    def _sent_back(self, gradients: Any, stage: int, microbatch: int) -> Any:
        """Returns what the stage before gets of a backward."""
        here, there = self._stages[stage].device, self._stages[stage - 1].device
        return gradients if here == there else transfer.send(gradients, here, there, "B")

    # --- the end

    def finish(self) -> None:
        """Ends a step in which nothing has failed."""
        if self._copies is not None:
            self._copies.finish()

    def join(self) -> None:
        """Waits until every task has ended; after a second signal it does not wait."""
        while self._left:
            try:
                self._all_ended.get(timeout=_LONGEST_WAIT_S)
            except Empty:
                continue
            except BaseException as interrupt:
                if self.stopped:
                    raise
                self.abort(interrupt)
                if ends_at_once():
                    raise
        for doing in self.activity.values():
            doing.end()

    def abort(self, error: BaseException) -> None:
        """Makes the first `error` the outcome of the step, and wakes the waiting threads."""
        with self._lock:  # two threads may fail at once
            if not self.stopped:
                self.failure = error
            self.stopped = True
        if not self._is_alone:
            for turns in self._turns.values():
                turns.stop()


ForwardEngine.run_type = StepRun


class _Task:
    """A call in a copy of the caller's context, for a thread; a second run does nothing.

    So an interrupted caller, which does not know what it has handed out, may hand it out again.
    """

    __slots__ = ("_arguments", "_function", "_once", "_run")

    def __init__(
        self, run: StepRun, function: Callable[..., _Task | None], arguments: tuple[Any, ...]
    ) -> None:
        self._run, self._function, self._arguments = run, function, arguments
        self._once = threading.Lock()

    def __call__(self) -> _Task | None:
        if not self._once.acquire(blocking=False):
            return None
        context = self._run._context.copy()
        return context.run(self._run.run, self._function, self._arguments)


def _work(inbox: SimpleQueue[_Task | None], intra_op_threads: int) -> None:
    """Runs the tasks in an inbox until one is None; the body of a thread."""
    torch.set_num_threads(intra_op_threads)
    # For an autocast of the forward itself. The cache of cast weights is one for all threads, so
    # another micro-batch would clear it, and change at random which gradients are added up before
    # the cast.
    torch.set_autocast_cache_enabled(False)
    while (task := inbox.get()) is not None:
        while task is not None:
            task = task()  # without a reference, which would keep the step's activations
