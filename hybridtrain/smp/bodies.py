"""The body of a step, run once per micro-batch and suspended at its call of the model.

The engine needs the model's inputs from the first half of a body, and runs the second half when the
output is available, much later and in another thread. So each body has its own thread, which waits
in between; only one of the two threads runs at a time:

    engine     start --.                .-- inputs      resume --.            .-- value, root
    body               '-- ... model(x) -'                       '-- ... return

A body starts with the caller's thread-local PyTorch state (grad mode, autocast, default device),
and changes of it stay local to the body: `with autocast():` around the model's call works.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.precision import ThreadState
from hybridtrain.errors import UserError


@dataclass(frozen=True)
class Call:
    """A body that waits in its call of the model.

    Attributes:
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        state: grad mode and autocast at the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: ThreadState


@dataclass(frozen=True)
class Result:
    """A body that has returned.

    Attributes:
        value: its return value.
        root: the tensor to start the backward from; None if the body did not call backward.
        gradient: the gradient of `root`; None for ones.
    """

    value: Any
    root: Tensor | None
    gradient: Tensor | None


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _Abandoned(BaseException):
    """Ends a body if its step has failed elsewhere, so that its `with` and `finally` run."""


class Body:
    """One run of a step's function, for one micro-batch.

    Args:
        function: the function, with its arguments bound.
        name: the name of the function, for errors.
        state: the caller's thread-local state.
    """

    def __init__(self, function: Callable[[], Any], name: str, state: ThreadState) -> None:
        self.name = name
        self.trains = False
        self._function: Callable[[], Any] | None = function
        self._state = state
        self._context = contextvars.copy_context()
        self._to_body: SimpleQueue[Any] = SimpleQueue()
        self._from_body: SimpleQueue[Any] = SimpleQueue()
        self._default_device = torch.get_default_device()
        self._called = self._answered = self._waits = self._runs = False
        self._root: Tensor | None = None
        self._gradient: Tensor | None = None
        self._has_backward = False

    @property
    def has_called_model(self) -> bool:
        """Whether the body is past its call of the model: only the last stage's process runs it."""
        return self._answered

    def start(self) -> Call | Result:
        """Runs the body up to its call of the model, or to its end if it does not call it."""
        worker = _idle.pop() if _idle else _Worker()
        self._runs = True
        worker.jobs.put((self, _thread_facts()))
        return self._answer()

    def resume(self, output: Any, trains: bool) -> Result:
        """Makes the call of the model return `output`, and runs the body to its end."""
        self.trains = trains
        self._waits, self._runs = False, True
        self._to_body.put((output, _thread_facts()))
        result = self._answer()
        assert isinstance(result, Result)
        return result

    def abandon(self) -> None:
        """Ends a waiting body; does nothing if it has ended.

        A body that is still running, because the wait for it was interrupted, ends at its call of
        the model.
        """
        if self._runs:
            self._to_body.put((_Abandoned(), _thread_facts()))
        elif self._waits:
            self._to_body.put((_Abandoned(), _thread_facts()))
            self._from_body.get()
            self._waits = False

    def call_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Waits for the model's output; called in the body's thread."""
        if self._called:
            raise UserError(
                f"{self.name} calls the model a second time, but a step pipelines one call: put "
                f"both into one module's forward, or each into its own step"
            )
        self._called = True
        self._from_body.put(Call(args, kwargs, ThreadState.capture()))
        output, facts = self._to_body.get()
        if isinstance(output, _Abandoned):
            raise output
        _take_over(facts)
        self._answered = True
        return output

    def backward(self, root: Tensor, gradient: Tensor | None) -> None:
        """Records where the backward starts; called in the body's thread."""
        if not self._answered:
            raise UserError(f"{self.name} calls model.backward before it calls the model")
        if self._has_backward:
            raise UserError(
                f"{self.name} calls model.backward twice: sum the losses, and call it once"
            )
        if not self.trains:
            raise UserError(
                f"{self.name} calls model.backward, but the step started as an evaluation: "
                f"{_WHY_NOT}"
            )
        self._has_backward = True
        self._root, self._gradient = root, gradient

    def run(self) -> None:
        """Runs the function in the body's thread."""
        function, self._function = self._function, None
        assert function is not None
        device = self._default_device
        try:
            with (
                self._state.applied(),
                self._state.autocast(),
                nullcontext() if device.type == "cpu" else device,
            ):
                value = self._context.run(function)
            answer: Any = Result(value, self._root, self._gradient)
        except BaseException as error:
            answer = _Failure(error)
        self._root = self._gradient = None
        self._from_body.put(answer)

    def _answer(self) -> Call | Result:
        answer: Any = self._from_body.get()
        self._runs = False
        self._waits = isinstance(answer, Call)
        if isinstance(answer, _Failure):
            try:
                raise answer.error
            finally:
                del answer  # its traceback references this frame
        return answer  # type: ignore[no-any-return]


_WHY_NOT = (
    "gradients were disabled, or neither the function nor the functions it calls mention "
    "`backward` in a detectable way; pass @smp.step(trains=True)"
)


class _Current(threading.local):
    body: Body | None = None


_current = _Current()


def current_body() -> Body | None:
    """Returns the body that runs in this thread; None outside a step."""
    return _current.body


_ADVICE = {
    "after": "would run for every micro-batch, before its backward: call it after the step, which "
    "completes the gradients of all micro-batches",
    "before": "would run for every micro-batch: call it before the step",
    "outside": "would run for every micro-batch, and after the model's call only in the process of "
    "the last stage: call it before or after the step",
}


def refuse_in_body(call: str, where: str = "outside") -> None:
    """Refuses a call in a step; to be called before anything that waits for another process.

    Args:
        call: the call, as a script has it.
        where: `before`, `after` or `outside`: the place of the call, for the message.

    Raises:
        UserError: this thread runs a body.
    """
    if current_body() is not None:
        raise UserError(f"{call} inside a step {_ADVICE[where]}")


class _Worker:
    """A thread that runs bodies one after the other."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Body, Any]] = SimpleQueue()
        threading.Thread(target=self._work, name="step-body", daemon=True).start()

    def _work(self) -> None:
        while True:
            body, facts = self.jobs.get()
            _take_over(facts)
            _current.body = body
            body.run()
            _current.body = None
            del body
            _idle.append(self)


_idle: list[_Worker] = []


def _thread_facts() -> tuple[int, Any]:
    """Returns the state that the continuing thread adopts: intra-op threads and CUDA stream."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    return torch.get_num_threads(), stream


def _take_over(facts: tuple[int, Any]) -> None:
    threads, stream = facts
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if stream is not None:
        torch.cuda.set_stream(stream)
