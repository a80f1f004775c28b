"""Averages a stage's gradients over its replicas; norm and scale of all stages' gradients.

Each stage has its own DistributedDataParallel and its own process group, so that the stages'
threads never wait for each other inside a collective. DDP expects one forward, then one backward. A
pipeline step has many of both, and must reduce gradients once, in the last micro-batch's backward.
So the layers are called without DDP, and DDP's reducer is prepared right before that backward, as
in PyTorch's `torch.distributed.pipelining.stage`:

    stage 1   F0  F1  [1] B0  F2  [1] B1  [2] B2 ...................... [3]
                                              bucket 1 full: all-reduce
                                                   bucket 0 full: all-reduce
                                                      [4] computed: waits for both

[1] An earlier backward adds to DDP's buckets, and its hooks do nothing. [2] The last backward is
prepared: its hooks mark complete gradients, and a full bucket's all-reduce overlaps with the rest
of the backward and with other stages. [3] Every gradient must have been reduced. [4] A recorded
step stores this time, to identify the rest of the action as waiting.

The norm is computed from the norms of single gradients, in the order of the parameters, so that it
is the same number for any placement of stages on devices and processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from hybridtrain._base import torch_private as private
from hybridtrain._base.accelerator import accelerator_of, put
from hybridtrain._base.torch_private import scaler_found_inf
from hybridtrain.errors import UserError, argument, setting
from hybridtrain.pipeline.replicas import GradientSums
from hybridtrain.pipeline.timeline import Mark, mark
from hybridtrain.world import World


class LocalReducer:
    """Sums a stage's gradients over logical replicas that are all in this process.

    Args:
        names: its own parameters under the user's names.
        world: the processes, with the number of logical replicas.
    """

    def __init__(self, names: Mapping[str, Parameter], world: World) -> None:
        self._names = names
        self._world = world
        self.build()

    def build(self) -> None:
        """Sums the gradients of parameters that currently require one."""
        # A new object: sums of another set of parameters would not fit together.
        trained = [parameter for parameter in self._names.values() if parameter.requires_grad]
        self._sums = GradientSums(trained, self._world, None)

    def begin(self, replica: int | None) -> None:
        """See `StageReducer.begin`."""
        self._sums.begin(replica)

    def sync_buffers(self) -> None:
        """Does nothing: there is no other process to copy buffers to."""

    def begin_step(self) -> None:
        """Does nothing: there are no buckets."""

    def add_up_in_buckets(self) -> None:
        """Does nothing: there are no buckets."""

    def prepare_for_backward(self, roots: Sequence[Any]) -> None:
        """Does nothing: gradients are summed after the backward."""

    @contextmanager
    def noting_computed(self, device: torch.device) -> Iterator[list[Mark]]:
        """Records nothing: no backward waits for other processes."""
        yield []

    def reset(self) -> None:
        """See `StageReducer.reset`."""
        self._sums.reset()

    def check_reduced(self) -> None:
        """Sums the gradients of a step."""
        # Here, because a step calls this at the end of the last backward, where DDP would be
        # complete.
        self._sums.add_alone()

    def finish(self) -> None:
        """See `StageReducer.finish`."""
        self._sums.finish()


class StageReducer:
    """Reduces a stage's gradients over the replicas; all start with replica 0's values.

    Gradients are averaged, as in DDP. With a fixed number of logical replicas they are summed, in
    the order of `GradientSums`. A stage without trainable parameters has no DDP, but its buffers
    may change.

    Args:
        module: the stage's layers.
        names: its own parameters under the user's names.
        group: the group of the processes with this stage, one per replica.
        find_unused_parameters: as in DDP.
        world: the processes, with the number of logical replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[str, Parameter],
        group: dist.ProcessGroup,
        find_unused_parameters: bool,
        world: World,
    ) -> None:
        self._names = names
        self._group = group
        self._world = world
        self._sums: GradientSums | None = None
        self._module = module
        self._find_unused = find_unused_parameters
        self._ddp: DistributedDataParallel | None = None
        # the parameters, each with the view of its gradient in DDP's buckets, once known
        self._in_buckets: list[tuple[Parameter, Tensor]] = []
        self._has_failed = False
        self._others: list[tuple[dict[str, Tensor | None], str]] = []
        use_in_sync_batch_norms(module, group)
        self.build()

    def build(self) -> None:
        """Averages the gradients of parameters that currently require one; a collective call."""
        self._stop()
        module, names = self._module, self._names
        parts = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        # Views of dictionaries: they show buffers that a forward replaces.
        self._tables = [part._buffers.values() for part in parts if part._buffers]
        self._buffers = list(chain.from_iterable(self._tables))
        if not any(parameter.requires_grad for parameter in names.values()):
            # DDP refuses a module without trainable parameters, and would have done this.
            broadcast([*names.values(), *module.buffers()], self._group)
            return
        own_ids = {id(parameter) for parameter in names.values()}
        tied = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) not in own_ids  # an earlier stage owns it; this stage has an alias
        ]
        private.ddp_ignore_parameters(module, tied)
        self._ddp = DistributedDataParallel(
            module,
            process_group=self._group,
            # Gradients live in the buckets, so they take their memory once, and an all-reduce needs
            # no copy.
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused,
        )
        if self._world.fixed_replicas is not None:
            trained = [parameter for parameter in names.values() if parameter.requires_grad]
            self._sums = GradientSums(trained, self._world, self._group)
            # a lambda: DDP refuses annotations that are strings
            self._ddp.register_comm_hook(self._sums, lambda sums, bucket: sums.reduce(bucket))

    def begin(self, replica: int | None) -> None:
        """Prepares a backward of a micro-batch of a logical replica; None: the first replica."""
        if self._sums is not None:
            self._sums.begin(replica)

    def _stop(self) -> None:
        if self._ddp is not None:
            # Otherwise its hooks on the parameters would reduce together with the next one's hooks.
            private.ddp_close(self._ddp)
            self._ddp = None
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        self._in_buckets = []

    def also_sync(self, buffers: Sequence[tuple[dict[str, Tensor | None], str]]) -> None:
        """Copies buffers of no stage, too, now and with the stage's own; a collective call.

        Args:
            buffers: for each of them, the dictionary of its module and its name there.
        """
        self._others = list(buffers)
        self._sync_others()

    def _sync_others(self) -> None:
        now = [buffers[name] for buffers, name in self._others]
        broadcast([buffer for buffer in now if buffer is not None], self._group)

    def sync_buffers(self) -> None:
        """Copies replica 0's buffers (running statistics) to all replicas; a collective call."""
        self._sync_others()
        if self._ddp is None:
            broadcast(list(self._module.buffers()), self._group)
            return
        now = list(chain.from_iterable(self._tables))
        # By identity: equal values of another tensor are not what DDP would broadcast.
        if len(now) != len(self._buffers) or not all(map(is_, now, self._buffers)):
            self._buffers = now  # a forward has replaced them
            private.ddp_find_buffers(self._ddp)
        private.ddp_sync_buffers(self._ddp)

    def begin_step(self) -> None:
        """Prepares a step that reduces the gradients; a collective call, stage by stage."""
        if self._has_failed:
            # An all-reduce that the failed step has begun may still wait for a process that has
            # failed before it: it would write into these buckets, or take part in the next one.
            self._has_failed = False
            # Collective: the members meet here again, because a failed step has failed in each of
            # them, in one that waited by its timeout.
            self._group = self._world.new_group_like(self._group)
            use_in_sync_batch_norms(self._module, self._group)
            self.build()
        elif self._ddp is not None:
            # DDP would do it in its forward, which is never called. Buckets are rebuilt once, in
            # the order in which gradients became ready.
            private.ddp_rebuild_buckets(self._ddp)

    def add_up_in_buckets(self) -> None:
        """Makes an earlier backward than the last add to DDP's buckets.

        Otherwise gradients would take twice their memory, until the last backward moves them.
        """
        for parameter, place in self._in_buckets:
            # After `zero_grad(set_to_none=True)`. A gradient of the user's own stays: autograd adds
            # to it.
            if parameter.grad is None:
                parameter.grad = place.zero_()  # [1]

    def prepare_for_backward(self, roots: Sequence[Any]) -> None:
        """Makes the next backward, which starts at `roots`, reduce the gradients."""
        if self._ddp is not None:
            # An empty list: DDP then searches no graph, and expects all gradients.
            private.ddp_prepare_for_backward(self._ddp, roots if self._find_unused else [])  # [2]

    @contextmanager
    def noting_computed(self, device: torch.device) -> Iterator[list[Mark]]:
        """Records in a list when the backward in the block has only all-reduces left to wait for.

        Args:
            device: the device of the stage, to record its time.
        """
        marks: list[Mark] = []
        if self._ddp is None:
            yield marks
            return
        parameters = self._names.values()
        with private.before_ddp_waits(parameters, lambda: marks.append(mark(device))):  # [4]
            yield marks

    def reset(self) -> None:
        """Resets after a prepared backward that failed, so that the next step can start."""
        if self._ddp is not None:
            private.ddp_reset(self._ddp)
            self._has_failed, self._in_buckets = True, []
        if self._sums is not None:
            self._sums.reset()

    def check_reduced(self) -> None:
        """Checks that the prepared backward has reduced every gradient.

        Raises:
            UserError: parameters got no gradient; the message names them.
        """
        if self._ddp is None:
            return
        try:
            private.ddp_check_reduced(self._ddp)  # [3]
        except RuntimeError as error:
            without = [
                name
                for name, parameter in self._names.items()
                # A bucket view is zero, not None, for a parameter that got no gradient.
                if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
            ]
            way_out = "remove the unused parameters or freeze them"
            if self._sums is None:  # otherwise the option is refused
                way_out += f", or set {setting('find_unused_parameters', True)}"
            raise UserError(
                f"the backward computed no gradient for {', '.join(without) or 'some parameters'}, "
                f"which the replicas must average: {way_out}"
            ) from error
        if not self._find_unused:  # otherwise parameters without a gradient keep None
            # After a complete backward each gradient is a view of its bucket. After a rebuild these
            # are the old views for one step: DDP then copies.
            self._in_buckets = [
                (parameter, parameter.grad)
                for parameter in self._names.values()
                if parameter.grad is not None and not parameter.grad.is_sparse
            ]

    def finish(self) -> None:
        """Waits, after the last backward of a step, until the gradients are complete."""
        if self._sums is not None:
            self._sums.finish()


@contextmanager
def explaining_ready_twice() -> Iterator[None]:
    """Explains DDP's error about a second gradient of a parameter in the backward in the block.

    Raises:
        UserError: DDP got a second gradient.
    """
    try:
        yield
    except RuntimeError as error:
        if "ready only once" not in str(error):
            raise
        raise UserError(
            "a parameter got its gradient more than once in one backward, but the replicas average "
            "it after the first time. This happens if a layer uses a checkpoint with "
            "use_reentrant=True around a module that runs twice: set use_reentrant=False, or "
            f"remove the checkpoint and set {argument('recompute')}"
        ) from error


def use_in_sync_batch_norms(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes the SyncBatchNorms of a stage use its own group, which no other thread uses."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            part.process_group = group


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Copies replica 0's `tensors` to all replicas; a collective call."""
    # one by one: in the order of the module, which is the same in all processes of the group
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=0)


_ALIGNED_BYTES = 16


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each gradient.

    On GPUs, the kernel adds up in a different order if a tensor does not begin at a multiple of 16
    bytes (PyTorch's ForeachReduceOp.cu). In DDP's buckets that depends on the other gradients of a
    bucket, and so on the stages and processes. So such gradients are copied: memory of their own is
    aligned.
    """
    if accelerator_of(gradients[0].device) is not None:
        gradients = [
            gradient.clone()
            if gradient.storage_offset() * gradient.element_size() % _ALIGNED_BYTES
            else gradient
            for gradient in gradients
        ]
    return list(torch._foreach_norm(gradients))


def norm_over_devices(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all `gradients`, with one copy for each device.

    The gradients' norms are combined in the order of the parameters, so that the last operation is
    the same as on one device. PyTorch's `get_total_norm` copies each separately.
    """
    places: dict[torch.device, list[int]] = {}
    for place, gradient in enumerate(gradients):
        places.setdefault(gradient.device, []).append(place)
    norms: list[Tensor] = [gradients[0]] * len(gradients)
    for positions in places.values():
        device_norms = torch.stack(norms_of([gradients[place] for place in positions]))
        for place, norm in zip(
            positions, put(device_norms, gradients[0].device).unbind(), strict=True
        ):
            norms[place] = norm
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def norm_over_processes(
    parameters: Sequence[Parameter],
    group: dist.ProcessGroup,
    device: torch.device,
    wire_device: torch.device,
) -> Tensor:
    """Returns the L2 norm of all gradients, as one process with the whole model would compute it.

    Processes exchange the norm of each gradient, not a sum of squares, so that the last operation
    is the same on the same numbers, and the result is bitwise equal. A collective call of the
    pipeline.

    Args:
        parameters: the parameters of the whole model; meta tensors for other processes.
        group: the processes of the pipeline.
        device: the device of the result, a 0-dim tensor.
        wire_device: the device of tensors in collectives.
    """
    positions = [i for i, p in enumerate(parameters) if p.grad is not None]
    # The same on all processes, because each has all parameters; if another process owns one, it is
    # a meta tensor here.
    dtype = reduce(torch.promote_types, [p.dtype for p in parameters], parameters[0].dtype)
    # one process writes each entry, which is added to zeros. The entries are stacked from 0-dim
    # tensors, because an index tensor would be copied to the GPU, and the host would wait for it
    zero = torch.zeros((), dtype=dtype, device=wire_device)
    places, there = [zero] * len(parameters), torch.zeros(len(parameters))
    if positions:
        local_norms = norms_of([p.grad for p in parameters if p.grad is not None])
        moved = torch.stack(local_norms).to(dtype).to(wire_device)
        for place, norm in zip(positions, moved.unbind(), strict=True):
            places[place] = norm
        there[positions] = 1
    norms = torch.stack(places)
    # both in this order on all processes, also on processes without gradients
    dist.all_reduce(norms, group=group)
    dist.all_reduce(there, group=group)  # on the CPU, so that the host waits for no GPU
    # Entries without a gradient are left out, not added as zeros, as one process would do.
    flags = there.tolist()
    chosen = [
        norm for norm, is_present in zip(norms.unbind(), flags, strict=True) if is_present
    ] or [zero]
    return put(torch.linalg.vector_norm(torch.stack(chosen)), device)


def unscale_(scaler: GradScaler, optimizer: Optimizer, world: World) -> None:
    """Unscales the gradients; an overflow in any stage counts for all stages.

    A plain GradScaler would skip the step only in that process, and the scales would diverge. A
    collective call of the pipeline.
    """
    if not scaler.is_enabled() or world.pipeline_group is None:
        scaler.unscale_(optimizer)
        return
    # creates the scale where no loss was scaled
    scaler.scale(torch.zeros((), device=world.devices[0]))
    scaler.unscale_(optimizer)
    overflows = scaler_found_inf(scaler, optimizer)
    # It must take part in the collective all the same.
    if not overflows:  # no parameter here had a gradient
        overflows[world.devices[0]] = torch.zeros((), device=world.devices[0])
    for device, value in overflows.items():
        # Parameters of one process are on one device, so each process calls this once.
        agreed = value.to(world.wire_device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.pipeline_group)
        overflows[device] = agreed.to(device)
