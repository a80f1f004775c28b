"""The decorator `step`: its function runs once per micro-batch.

The file follows the order of a step. A body is one run of the function, for one micro-batch.

    step, _Step         starts a body per micro-batch, runs the pipeline, ends the bodies
    StepOutput          a tensor returned by the bodies, by micro-batch
    shared              sends the return values to all processes of the pipeline
    flags               saves and restores process-wide flags and random generators
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends import cuda
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hybridtrain._base import codec, objects
from hybridtrain._base.precision import ThreadState
from hybridtrain.errors import BatchError, UserError, naming
from hybridtrain.pipeline import HeadOutput, batch_digest, own_values
from hybridtrain.smp.bodies import Body, Call, Result, current_body
from hybridtrain.smp.config import NAMING
from hybridtrain.smp.microbatches import ArgumentCutter, CutArguments
from hybridtrain.smp.model import DistributedModel, inputs_of
from hybridtrain.smp.ranks import CommGroup, allgather, get_mp_group, pp_rank
from hybridtrain.smp.reads import (
    check_attributes,
    check_globals,
    check_unchanged,
    codes,
    names_in,
    plain_attributes,
    values_read,
)
from hybridtrain.smp.runtime import current
from hybridtrain.world import World

_SMALL = 1 << 16  # maximum bytes of a CPU tensor sent together with the enclosing structure


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    trains: bool | None = None,
) -> Any:
    """Decorates a function that is called with a batch and runs once per micro-batch.

        @smp.step
        def train_step(model, data, target):
            output = model(data)
            loss = F.nll_loss(output, target)
            model.backward(loss)
            return output, loss

    Before the model's call, the function runs in every process of the pipeline, for all
    micro-batches before the first forward. After the call, it runs only in the process of the last
    stage, once the output is available. Its return values are sent to the other processes: each
    tensor becomes a `StepOutput` and any other value a list, by micro-batch.

    The step trains if gradients are enabled where it calls the model and its code mentions
    `backward`; otherwise it evaluates.

    Args:
        function: calls the model once, then `model.backward` once if it trains.
        non_split_inputs: names of arguments passed whole to every micro-batch.
        input_split_axes: the batch axis of an argument, by name; 0 for all others.
        detach_outputs: detach the returned tensors.
        trains: whether the step trains, if its code does not show it; not in smp 1.x.

    Raises:
        ConfigError: the function has no such argument.
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


_DIFFERENT_BATCHES = (
    "ranks {} form one pipeline, but passed different batches to {}: samples that are divided over "
    "the processes, for example by a sampler of accelerate or of transformers' Trainer, never "
    "reach the model in all but one. Divide them over the replicas, with DistributedSampler("
    "dataset, num_replicas=smp.dp_size(), rank=smp.dp_rank()) or SplitDataset, and seed shuffling "
    "and augmentation identically in all processes of a pipeline. If only the order of the samples "
    'differs, "hybridtrain": {{"broadcast_batch": true}} in the configuration makes all of them '
    "use the batches of smp.mp_rank() 0"
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
        """Binds the step to `instance` if its first parameter is `self`.

        Steps of smp are never bound. AWS's trainers define a step with the model as its first
        argument in a class body, and call it as `self.train_step(model, ...)`.
        """
        if instance is None or self._cutter.first_parameter != "self":
            return self
        return partial(self, instance)

    @naming(NAMING)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step for a batch.

        Raises:
            UserError: the function does something that is not allowed in a step.
            Exception: raised by the function or a layer.
        """
        runtime = current()
        model = runtime.model
        if model is None:
            raise UserError(f"{self._name} needs a model: wrap it in smp.DistributedModel first")
        if current_body() is not None:
            raise UserError(f"{self._name} is called inside another step: call it outside")
        args, kwargs = self._same_batch(args, kwargs)
        cut = self._cutter.cut(args, kwargs, runtime.config.microbatches)
        first_call = not self._is_checked
        attributes = plain_attributes(model.net) if first_call else {}
        read = values_read(model.net) if first_call else {}
        if first_call:
            if self._trains is None:
                self._trains = names_backward(self._function)
            check_globals(self._function, model.net)
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
                runtime.attendance.begin()  # overlaps with the code below
            if first_call:
                check_attributes(self._name, attributes, model.net)
                check_unchanged(self._name, read, model.net)
            if not model.partitioned:
                model.partition(calls[0].args, calls[0].kwargs)
            if trains:
                runtime.attendance.finish()  # before the first message to another replica
            drawn_from = random_states(runtime.world)
            read = values_read(model.net) if first_call else {}
            values = self._run(model, bodies, calls, cut, trains)
            if first_call:  # of the lines after the model's call
                names = names_in(self._function)
                check_unchanged(self._name, read, model.net, names)
            is_done = True
        finally:
            for body in bodies:
                body.abandon()
            if not is_done:
                set_flags(flags_before)  # bodies that end out of order may leave them changed
        self._is_checked = True
        model.run_post_step_hooks()
        return collected(shared(values, runtime.world, drawn_from), cut.samples)

    def _same_batch(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments, which must be the same in all processes of a pipeline.

        With `broadcast_batch`, they have the tensors of the first process. Otherwise the tensors of
        the first call are compared here, also those on GPUs; the pipeline compares later ones.

        Raises:
            BatchError: the processes passed different batches.
        """
        runtime = current()
        if runtime.world.pipeline_group is None:
            return args, kwargs
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if runtime.config.broadcasts_batch:
            sent = allgather(tensors if pp_rank() == 0 else len(tensors), CommGroup.MP_GROUP)
            first, *counts = sent
            if any(count != len(first) for count in counts):
                raise BatchError(
                    f"{self._name} got {len(first)} tensors in the process of smp.mp_rank() 0, but "
                    f"not in another process of its pipeline: pass the same arguments"
                )
            remaining = iter(first)
            received: tuple[Any, Any] = tree_map_only(
                Tensor, lambda _: next(remaining), (args, kwargs)
            )
            return received
        if not self._is_checked:
            digest = batch_digest([tensor.cpu() for tensor in tensors])
            if len(set(allgather(digest, CommGroup.MP_GROUP))) > 1:
                raise BatchError(_DIFFERENT_BATCHES.format(get_mp_group(), self._name))
        return args, kwargs

    def _check_flags(self, before: Mapping[str, Any]) -> None:
        """Refuses process-wide flags that the function changes before it calls the model.

        Raises:
            UserError: a flag has changed; the bodies of other micro-batches would see the change.
        """
        changed = [name for name, value in flags().items() if value != before[name]]
        if changed:
            raise UserError(
                f"{self._name} changes {', '.join(changed)} for the whole process before it calls "
                f"the model: change it outside the step, around its call"
            )

    def _begin(self, body: Body) -> Call:
        answer = body.start()
        if isinstance(answer, Result):
            raise UserError(
                f"{self._name} does not call the model: a step must contain the forward of a "
                f"smp.DistributedModel"
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
        """Runs the pipeline; returns the values of the bodies in the last stage's process."""
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
            result = bodies[microbatch].resume(own_values(output), trains)
            value = result.value
            if self._detaches:
                value = tree_map_only(Tensor, Tensor.detach, value)
            if not trains:
                return HeadOutput(value)
            if result.root is None:
                raise UserError(
                    f"{self._name} returned without calling model.backward(loss): call it instead "
                    f"of loss.backward(), which does not reach the other stages, or run an "
                    f"evaluation under torch.no_grad()"
                )
            share = cut.samples[microbatch] / total if averages else 1.0
            gradient = result.gradient
            if gradient is None:
                gradient = torch.full_like(result.root, share, requires_grad=False)
            elif share != 1.0:
                gradient = gradient * share
            return HeadOutput(value, result.root, gradient)

        inputs = [inputs_of(model.net, call.args, call.kwargs) for call in calls]
        # autocast inside the step applies only to the model's call
        with (
            torch.set_grad_enabled(trains),
            nullcontext() if state == ThreadState.capture() else (state.autocast()),
        ):
            return model.run(inputs, head, trains=trains, compared=cut.tensors)


class StepOutput:
    """The values of one tensor, by micro-batch.

    Args:
        outputs: the tensors.
        samples: the number of samples of each micro-batch.
    """

    def __init__(self, outputs: Sequence[Tensor], samples: Sequence[int] | None = None) -> None:
        self._outputs = list(outputs)
        self._samples = list(samples) if samples else [1] * len(self._outputs)

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors, by micro-batch."""
        return self._outputs

    def reduce_mean(self) -> Tensor:
        """Returns the mean over the micro-batches, weighted by their sample counts."""
        if len(set(self._samples)) == 1:
            return _floating(torch.stack(self._outputs)).mean(dim=0)
        total = sum(self._samples)
        parts = zip(self._outputs, self._samples, strict=True)
        return torch.stack([_floating(t) * (n / total) for t, n in parts]).sum(dim=0)

    def reduce_sum(self) -> Tensor:
        """Returns the sum over the micro-batches."""
        return torch.stack(self._outputs).sum(dim=0)

    def concat(self) -> Tensor:
        """Returns the tensors joined along dim 0; 0-dim tensors are stacked."""
        return torch.cat(self._outputs) if self._outputs[0].dim() else self.stack()

    def stack(self) -> Tensor:
        """Returns the tensors stacked along a new dim 0."""
        return torch.stack(self._outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs})"


def _floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()


def collected(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Returns the values of all micro-batches in one structure.

    Each tensor in it becomes a `StepOutput`, and any other value a list; None stays None.

    Raises:
        BatchError: the values differ in structure.
    """
    first, spec = tree_flatten(values[0])
    columns = [first]
    for value in values[1:]:
        leaves, other = tree_flatten(value)
        if other != spec:
            raise BatchError(
                f"a step must return the same structure for each micro-batch: {spec}, {other}"
            )
        columns.append(leaves)

    def gathered(column: tuple[Any, ...]) -> Any:
        if all(isinstance(leaf, Tensor) for leaf in column):
            return StepOutput(column, samples)
        return None if all(leaf is None for leaf in column) else list(column)

    return tree_unflatten([gathered(column) for column in zip(*columns, strict=True)], spec)


def shared(values: list[Any], world: World, drawn_from: Sequence[Tensor]) -> list[Any]:
    """Returns the last stage's `values` in all processes of the pipeline; a collective call.

    If the step has drawn random numbers in the last stage, it also copies the states of that
    stage's generators, so that later draws of the script are the same in all processes.

    Args:
        values: the values by micro-batch; ignored in processes without the last stage.
        world: the processes.
        drawn_from: the result of `random_states` before the forward.

    Raises:
        UserError: a value cannot be sent.
    """
    group = world.pipeline_group
    if group is None:
        return values
    last = world.processes_per_replica - 1
    here = world.pipeline_rank == last
    large: list[Tensor] = []

    def described(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL:
            return tensor.clone() if tensor.untyped_storage().nbytes() > _SMALL else tensor
        large.append(tensor.contiguous())
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    message: Any = None
    if here:
        states = random_states(world)
        has_drawn = not all(map(torch.equal, states, drawn_from))
        described_values = tree_map_only(Tensor, described, values)
        message = described_values, states if has_drawn else None
    try:  # the object group, because reading objects must not wait for a GPU
        structure, drawn = objects.broadcast(message, world.pipeline_object_group, last)
    except codec.CodecError as error:
        raise UserError(
            f"{error}: return tensors, numbers, strings, and lists and dictionaries of them"
        ) from error
    if drawn is not None and not here:
        set_random_states(world, drawn)

    def received(tensor: Tensor) -> Tensor:
        # one broadcast per large tensor, in tree order, which is the same in all processes
        if not tensor.is_meta:
            return tensor
        buffer = large.pop(0) if here else torch.empty_like(tensor, device=world.devices[0])
        sent = buffer.to(world.wire_device)
        dist.broadcast(sent.view(torch.uint8) if sent.dim() else sent, group=group, group_src=last)
        return sent.to(world.devices[0])

    result: list[Any] = tree_map_only(Tensor, received, structure)
    return values if here else result


def names_backward(function: Callable[..., Any]) -> bool:
    """Returns whether `function`, or a function that it calls, mentions an attribute `backward`.

    It finds functions by their global or enclosed names, and as attributes of modules with such
    names.
    """
    return any("backward" in code.co_names for code in codes(function))


_FLAGS: dict[str, tuple[Any, Any]] = {
    "anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "cudnn.enabled": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "cudnn.benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "cudnn.deterministic": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "sdpa_kernel (flash)": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "sdpa_kernel (efficient)": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "sdpa_kernel (math)": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "sdpa_kernel (cudnn)": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}


def flags() -> dict[str, Any]:
    """Returns the flags that PyTorch's context managers change for all threads, by name."""
    return {name: get() for name, (get, _) in _FLAGS.items()}


def set_flags(values: dict[str, Any]) -> None:
    """Sets the flags that differ from `values`."""
    for name, value in values.items():
        get, put = _FLAGS[name]
        if get() != value:
            put(value)


def random_states(world: World) -> list[Tensor]:
    """Returns the states of the generators that a script uses: the CPU's, and its GPU's."""
    states = [torch.get_rng_state()]
    if world.devices[0].type == "cuda":
        states.append(torch.cuda.get_rng_state(world.devices[0]))
    return states


def set_random_states(world: World, states: Sequence[Tensor]) -> None:
    """Sets the generators to a result of `random_states` from any process."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, world.devices[0])
