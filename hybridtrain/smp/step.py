"""The decorator of a training or evaluation step: its function runs once for each micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain.errors import UserError
from hybridtrain.pipeline import HeadOutput
from hybridtrain.precision import ThreadState
from hybridtrain.smp.bodies import Body, Call, Result, current_body
from hybridtrain.smp.microbatches import ArgumentCutter, CutArguments
from hybridtrain.smp.model import DistributedModel
from hybridtrain.smp.model_inputs import inputs_of
from hybridtrain.smp.process_state import flags, random_states, set_flags
from hybridtrain.smp.runtime import current
from hybridtrain.smp.step_function import (
    check_attributes,
    check_globals,
    names_backward,
    plain_attributes,
)
from hybridtrain.smp.step_output import collected, shared


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    trains: bool | None = None,
) -> Any:
    """Makes `function` a step: it is called with a batch, and runs for each of its micro-batches.

        @smp.step
        def train_step(model, data, target):
            output = model(data)
            loss = F.nll_loss(output, target)
            model.backward(loss)
            return output, loss

    Up to the model's call it runs in every process of the pipeline, for all micro-batches before
    the first forward. From there on it runs in the process of the last stage alone, when the output
    is there; what it returns is sent to the others. Tensors that it returns become `StepOutput`s,
    and other values lists, by micro-batch.

    It trains if gradients are on where it calls the model and its code names `backward`; otherwise
    it evaluates.

    Args:
        function: calls the model once, then `model.backward` once if it trains.
        non_split_inputs: names of arguments that every micro-batch gets whole.
        input_split_axes: the batch's axis of an argument, by name; 0 for all others.
        detach_outputs: detach the tensors that it returns.
        trains: whether it trains, where its code does not show it; not in smp 1.x.

    Raises:
        ConfigError: there is no such argument.
    """
    if function is None:
        return partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
            trains=trains,
        )
    return functools.wraps(function)(
        _Step(function, non_split_inputs, input_split_axes or {}, detach_outputs, trains)
    )


class _Step:
    """A step's function; calling it runs the step."""

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Collection[str],
        input_split_axes: Mapping[str, int],
        detach_outputs: bool,
        trains: bool | None,
    ) -> None:
        self._function = function
        self._name = getattr(function, "__name__", "the step")
        self._cutter = ArgumentCutter(function, non_split_inputs, input_split_axes)
        self._detaches = detach_outputs
        self._trains = trains
        self._is_checked = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the step where it is a method."""
        return self if instance is None else partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step for a batch.

        Raises:
            UserError: the function does not keep to what a step may do; see `step`.
            Exception: an exception of the function, or of a layer.
        """
        runtime = current()
        model = runtime.model
        if model is None:
            raise UserError(f"{self._name} needs a model: wrap it in smp.DistributedModel first")
        if current_body() is not None:
            raise UserError(f"{self._name} is called in another step: call it outside of it")
        cut = self._cutter.cut(args, kwargs, runtime.config.microbatches)
        first_call = not self._is_checked
        attributes = plain_attributes(model.module) if first_call else {}
        if first_call:
            if self._trains is None:
                self._trains = names_backward(self._function)
            check_globals(self._function, model.module)
        state = ThreadState.capture()
        bodies = [
            Body(partial(self._function, *own_args, **own_kwargs), self._name, state)
            for own_args, own_kwargs in cut.calls
        ]
        flags_before, is_done = flags(), False
        try:
            calls = [self._begin(body) for body in bodies]
            self._check_flags(flags_before)
            trains = calls[0].state.grad and bool(self._trains)
            if trains:
                runtime.attendance.begin()
            if first_call:
                check_attributes(self._name, attributes, model.module)
            if not model.partitioned:
                model.partition(calls[0].args, calls[0].kwargs)
            if trains:
                runtime.attendance.finish()
            drawn_from = random_states(runtime.world)
            values = self._run(model, bodies, calls, cut, trains)
            is_done = True
        finally:
            for body in bodies:
                body.abandon()
            if not is_done:
                set_flags(flags_before)  # bodies that end in another order may leave them changed
        self._is_checked = True
        return collected(shared(values, runtime.world, drawn_from), cut.samples)

    def _check_flags(self, before: Mapping[str, Any]) -> None:
        """Refuses flags of the whole process that are changed where the model is called.

        Raises:
            UserError: the bodies of all micro-batches would change them under one another.
        """
        changed = [name for name, value in flags().items() if value != before[name]]
        if changed:
            raise UserError(
                f"{self._name} changes {', '.join(changed)} before it calls the model, for the "
                f"whole process: put it around the call of the step"
            )

    def _begin(self, body: Body) -> Call:
        answer = body.start()
        if isinstance(answer, Result):
            raise UserError(
                f"{self._name} does not call the model: a step is the forward of a "
                f"smp.DistributedModel, with what belongs to it"
            )
        return answer

    def _run(
        self,
        model: DistributedModel,
        bodies: Sequence[Body],
        calls: Sequence[Call],
        cut: CutArguments,
        trains: bool,
    ) -> list[Any]:
        """Runs the pipeline; returns what the bodies have returned, at the last stage."""
        state = calls[0].state
        if any(call.state != state for call in calls):
            raise UserError(
                f"{self._name} calls the model under another grad mode or autocast for some "
                f"micro-batches: they must be the same for all"
            )
        total = sum(cut.samples)
        averages = model.average_grads_across_microbatches
        gpu = next((t.device for t in cut.tensors if t.is_cuda), None)

        def head(microbatch: int, output: Any) -> HeadOutput:
            if gpu is not None:  # the last stage may be on another device of this process
                output = tree_map_only(Tensor, lambda t: t.to(gpu), output)
            result = bodies[microbatch].resume(output, trains)
            value = result.value
            if self._detaches:
                value = tree_map_only(Tensor, Tensor.detach, value)
            if not trains:
                return HeadOutput(value)
            if result.root is None:
                raise UserError(
                    f"{self._name} has returned without model.backward(loss): an evaluation runs "
                    f"under torch.no_grad()"
                )
            share = cut.samples[microbatch] / total if averages else 1.0
            gradient = result.gradient
            if gradient is None:
                gradient = torch.full_like(result.root, share, requires_grad=False)
            elif share != 1.0:
                gradient = gradient * share
            return HeadOutput(value, result.root, gradient)

        inputs = [inputs_of(model.module, call.args, call.kwargs) for call in calls]
        # an autocast inside of the step is on for the model's call alone
        with (
            torch.set_grad_enabled(trains),
            nullcontext() if state == ThreadState.capture() else (state.autocast()),
        ):
            return model.run(inputs, head, trains=trains, compared=cut.tensors)
