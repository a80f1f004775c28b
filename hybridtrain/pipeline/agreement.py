"""Checks that the processes of a run agree on batches, weights, frozen parameters and schedule.

The checks catch errors that would silently corrupt training. The first stage takes the inputs and
the last stage the targets, so the processes of a pipeline must receive the same batch
(`BatchCheck`). Replicas start with equal weights, and averaged gradients keep them bitwise equal
unless a replica skips a step or changes a weight on its own (`check_replicas`). All processes must
freeze the same parameters before the same step (`check_frozen_alike`). A process with a different
schedule table would wait for a message that nobody sends (`check_schedule`). With a fixed number of
logical replicas, hardware, libraries and settings must be equal (`check_same_bits`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtrain._base.microbatch import Unread, first_share
from hybridtrain._base.rank_differences import check_same, differences, facts_here
from hybridtrain._base.repeatable import facts_of_bits
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import (
    BatchError,
    ConfigError,
    ScheduleError,
    UserError,
    argument,
    phrase,
    setting,
)
from hybridtrain.options import PipelineOptions
from hybridtrain.pipeline.point_to_point import Pending, begin_receive, begin_send, wait
from hybridtrain.schedule import make_schedule
from hybridtrain.world import World

_COMPARED = 64  # compared numbers of each tensor
_ABOVE_DIGESTS = 1 << 62  # above every digest of a batch
_TAG = 1  # of messages that are not in the order of the stages' messages

# A process with unchanged parameters is already in the step and never joins.
_AGREEMENT_S = 30.0

# Integer dtypes by size in bytes.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BatchCheck:
    """Compares the batches of the processes of a pipeline.

    Compares shapes and some numbers of each tensor while the step runs. For tensors on a GPU it
    compares only shapes, because reading numbers would block the host. A process without a batch
    (`Unread`) takes part but compares nothing. `begin` and `finish` are collective calls.

    With the first message of a step, each process passes on the maxima so far of three values: the
    digest, its negative, and whether there are targets. The last process sends the maxima over all
    processes to the others, and each compares them in `finish`. So no process waits until another
    one has run its step.

        process 0     values --.                        .-> maxima
        process 1              '-> maxima --.           |-> maxima
        process 2                           '-> maxima -'

    The first batch and `has_targets` need the result before the step: they use an all-reduce.
    """

    NO_BATCH = (-_ABOVE_DIGESTS,) * 3
    """The values of a process without a batch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_pending = False  # a batch was read, and the result is not known
        self._digest: int | None = None  # None for a batch that is not read here
        self._targets_here = 0
        self._is_merged = False
        # the maxima over the processes up to this one; in the end over all
        self._values = torch.tensor(self.NO_BATCH)
        self._works: list[Pending] | None = None
        self._has_targets: bool | None = None
        self._is_first = True

    def begin(self, inputs: Any, targets: Any) -> None:
        """Reads the batch of a step; compares the first batch immediately, before it runs.

        It reads the batch here because a layer or loss of the step may change its inputs in place.

        Raises:
            BatchError: see `finish`.
        """
        if self._world.pipeline_group is None:
            return
        self._is_pending, self._is_merged, self._works = True, False, None
        self._has_targets = None
        is_unread = isinstance(first_share(inputs), Unread)
        self._digest = None if is_unread else batch_digest(inputs, targets)
        self._targets_here = int(targets is not None)
        if self._is_first:
            self.finish()
            self._is_first = False

    def merge(self, values: Sequence[int]) -> Sequence[int]:
        """Returns the maxima of this process's values and `values`, for the next process.

        Args:
            values: the maxima from the previous process; `NO_BATCH` in the first one.
        """
        if not self._is_pending:
            return values
        self._is_merged = True
        if (digest := self._digest) is not None:
            # The largest, and as a negative number the smallest: equal for one common digest.
            values = tuple(map(max, values, (digest, -digest, self._targets_here)))
        # A new tensor: the last one may still be on its way from the step before.
        self._values = torch.tensor(values)
        return values

    def share_result(self) -> None:
        """Starts sending or receiving the maxima over all processes; does so once after `merge`.

        A process that calls this where it waits for another one loses no time.
        """
        # Called in every wait of a step; only the first call does something.
        if not self._is_merged or self._works is not None:
            return
        world, last = self._world, self._world.processes_per_replica - 1
        if world.pipeline_rank == last:
            self._works = []
            for peer in range(last):
                self._works += begin_send([self._values], world, peer, _TAG)
        else:
            self._works = begin_receive([self._values], world, last, _TAG)

    def has_targets(self, targets: Any) -> bool:
        """Returns whether the batch has targets, also for an `Unread` one; a collective call.

        Raises:
            BatchError: see `finish`.
        """
        self.finish()
        if isinstance(first_share(targets), Unread):
            assert self._has_targets is not None
            return self._has_targets
        return targets is not None

    def finish(self) -> None:
        """Waits for the result of the comparison.

        Raises:
            BatchError: the processes received different batches.
        """
        if not self._is_pending:
            return
        if self._is_merged:
            assert self._works is not None, "the step has not shared the result"
            wait(self._works)
        else:
            self.merge(self.NO_BATCH)
            group = self._world.pipeline_group
            dist.all_reduce(self._values, dist.ReduceOp.MAX, group)
        self._is_pending, self._is_merged, self._works = False, False, None
        largest, minus_smallest, has_targets = self._values.tolist()
        self._has_targets = bool(has_targets)
        if largest != -minus_smallest:
            world = self._world
            places = range(world.processes_per_replica)
            ranks = [str(world.rank_of(world.data_parallel_rank, place)) for place in places]
            share = phrase("world.data_parallel_rank of world.data_parallel_size")
            raise BatchError(
                f"ranks {', '.join(ranks)} form one pipeline, but received different batches: "
                f"with {setting('engine', 'distributed')}, divide samples over the replicas "
                f"({share}), not over the processes, and use the same order in each process"
            )


def batch_digest(*batches: Any) -> int:
    """Returns a 62-bit digest of shapes and of some numbers of tensors on the CPU."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in chain.from_iterable(map(leaves_of, batches)):
        if not isinstance(leaf, Tensor):
            digest.update(type(leaf).__name__.encode())
            continue
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        # The stored numbers of a sparse or nested tensor are not read.
        if leaf.device.type == "cpu" and leaf.numel() and leaf.layout == torch.strided:
            step = max(1, leaf.numel() // _COMPARED)
            numbers = leaf.detach().reshape(-1)[::step].resolve_conj().resolve_neg()
            # a single number counts as contiguous with any stride
            numbers = numbers.clone(memory_format=torch.contiguous_format)
            digest.update(numbers.view(torch.uint8).numpy().data)
    # 62 bits, so that its negative, and a bound above it, are int64 too.
    return int.from_bytes(digest.digest(), "little") >> 2


def check_replicas(net: nn.Module, world: World) -> None:
    """Compares a checksum of each parameter over the replicas; all processes call it together.

    Reads the weights once, and waits for the devices.

    Raises:
        UserError: a parameter differs; the message names the first one and the ranks.
    """
    if world.data_parallel_size == 1:
        return
    # Meta tensors are parameters of other processes of the pipeline.
    mine = {name: int(checksum(p)) for name, p in net.named_parameters() if not p.is_meta}
    # Numbers of a few bytes per parameter, not the weights.
    everyones = world.gather((world.data_parallel_rank, mine))
    first: dict[str, int] = {}
    # Several processes of replica 0 have a part of the parameters each.
    for replica, sums in everyones:
        if replica == 0:
            first |= sums
    for name, expected in first.items():
        ranks = [
            rank for rank, (_, sums) in enumerate(everyones) if sums.get(name, expected) != expected
        ]
        if ranks:
            raise UserError(
                f"the replicas have diverged: {name} of rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))} differs from replica 0's. All ranks must take the "
                "same optimizer steps, and no rank may change weights on its own"
            )


def check_schedule(options: PipelineOptions, world: World) -> None:
    """Makes the schedule, and compares the tables of all processes; a collective call.

    Raises:
        ScheduleError: there is no such schedule, for example because its file is missing.
        ConfigError: a process has a different table or none, for example from another file.
    """
    shape = world.nb_part, options.chunks, options.stages_per_device, options.max_inflight
    failure: ScheduleError | None = None
    try:
        table = f"table {make_schedule(options.schedule, *shape).digest}"
    except ScheduleError as error:  # compared in place of a table
        table, failure = str(error), error
    if world.size > 1:
        for _, tables in differences(world.gather(facts_here({"schedule": table}))):
            raise ConfigError(
                f"{setting('schedule', options.schedule)} differs between ranks: {tables}: "
                f"use the same file or code on every host"
            )
    if failure is not None:
        raise failure


def check_same_bits(world: World) -> None:
    """Checks that all processes compute the same bits if they must; a collective call.

    Raises:
        ConfigError: with a fixed number of logical replicas, the GPU model, a library or a setting
            of PyTorch differs between the ranks.
    """
    if world.size == 1 or world.fixed_replicas is None:
        return
    check_same(
        world.gather,
        facts_of_bits(world.devices[0]),
        f": make it equal, or remove {argument('replicas')}, which promises equal bits on any "
        "number of processes",
    )


def check_frozen_alike(names: Sequence[str], world: World) -> None:
    """Checks that all processes have frozen or unfrozen the same parameters before this step.

    Raises:
        ConfigError: they differ.
    """
    if world.size == 1:
        return
    text = f"requires_grad of {', '.join(names)} has changed"
    # Before a collective: a rank that has changed nothing is in its step, and would never join
    # `gather`.
    if not world.all_arrive(min(_AGREEMENT_S, world.timeout_s / 2)):
        raise ConfigError(
            f"{text} on rank {world.rank}, but not on all ranks: change it on all ranks before "
            f"the same step"
        )
    texts = world.gather(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ConfigError(
                f"on rank 0 {texts[0]}, on rank {rank} {other}: freeze the same parameters on "
                "all ranks"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Returns the wrapping sum of the bits of each number in `tensor`, a 0-dim int64 tensor."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Of the bits, so that NaN equals NaN and -0.0 differs from 0.0. Integers wrap, so the order
    # does not matter.
    return values.contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
