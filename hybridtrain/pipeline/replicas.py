"""Logical replicas in a process: the initial state of each, and the sum of their gradients.

The forwards of a stage run in the order of the micro-batches, and so replica by replica; so do its
backwards. Each replica starts from the state at the beginning of the step. After the step, the
process of logical replica 0 keeps replica 0's state; the other processes get its buffers before the
next step:

    forwards     [1] F0 F1 (replica 0) [2] F2 F3 (replica 1)    [3]
    state        copied                kept; again as at [1]    again as at [2]

Gradients are summed in the order of `summation_tree`, whatever the number of processes:

    backwards    B0 B1 (replica 0) [4]                 B2 B3 (replica 1) ...    [5]
    gradients    replica 0's       replica 0's moved   replica 1's              the sum of all

[4] A moved sum is added as soon as it completes a subtree of the tree, so at most log2 of the
number of replicas are kept. [5] The rest is added between the processes, in DDP's buckets, during
the last backward. DDP gets a completed future for a bucket before the sum is complete; `finish`
waits.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parameter import Parameter

from hybridtrain._base.summation_tree import (
    Node,
    owned_by,
    subtrees,
    sums_of_halves,
    total,
)
from hybridtrain.errors import BatchError, ConfigError, argument
from hybridtrain.pipeline.batch_norm import BatchNormCollector
from hybridtrain.pipeline.layer_state import LayersCopy, StageState
from hybridtrain.world import World

# not parameters: other checks refuse parameters that a forward changes
_CHANGED_BY_FORWARDS = ("buffer", "attribute")


class ReplicaStates:
    """Gives each logical replica of a process the state of a stage at the beginning of a step.

    Args:
        state: the state of the stage's layers.
        collectors: the collectors of batch norms in the stage, updated once per share of a batch.
    """

    def __init__(self, state: StageState, collectors: Sequence[BatchNormCollector]) -> None:
        self._state = state
        self._collectors = collectors
        self._share: tuple[int, int] | None = None
        self._first: LayersCopy | None = None
        self._kept: LayersCopy | None = None

    def enter(self, replica: int, ahead: int) -> None:
        """Prepares the next forward, for a share of this replica; see `Share`."""
        previous, self._share = self._share, (replica, ahead)
        if previous == self._share:
            return
        if previous is None or self._first is None:
            # At the first forward, not at the begin of the step: a step of one share needs no copy.
            self._first = self._state.copied(None, _CHANGED_BY_FORWARDS)  # [1]
            return
        for collector in self._collectors:
            # Per share: each replica computes its statistics from its own part of the batch.
            collector.commit()
            collector.clear()
        if previous[0] == replica:
            return
        if previous[0] == 0:
            self._kept = self._state.copied(None, _CHANGED_BY_FORWARDS)  # [2]
        self._state.put_back(self._first)

    def finish(self) -> None:
        """Ends a step."""
        if self._share is not None:
            for collector in self._collectors:
                collector.commit()
                collector.clear()
        state, self._kept = self._kept, None
        self._share = self._first = None
        if state is not None:
            self._state.put_back(state)  # [3]


class GradientSums:
    """Sums the gradients of a stage over logical replicas; see the module docstring.

    Args:
        parameters: the parameters of the stage, each once.
        world: the processes, with the logical replicas that they run.
        group: the group of the processes with this stage; None: only this process.
    """

    def __init__(
        self, parameters: Sequence[Parameter], world: World, group: dist.ProcessGroup | None
    ) -> None:
        replicas, processes = world.logical_replicas, world.data_parallel_size
        self._parameters = list(parameters)
        self._replicas = replicas
        self._group = group
        self._owned = world.owned_replicas
        self._nodes = [
            subtrees(owned_by(process, processes, replicas), replicas)
            for process in range(processes)
        ]
        self._parents = sums_of_halves(replicas)
        self._replica: int | None = None
        # the sums of subtrees, from left to right, each in the order of the parameters
        self._waiting: list[tuple[Node, dict[int, Tensor]]] = []
        self._earlier: dict[int, Tensor] = {}
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._sums_under_way: list[concurrent.futures.Future[None]] = []
        self._stream: Any = None

    @property
    def kept(self) -> int:
        """The number of stored sums, each as large as the gradients."""
        return len(self._waiting)

    def begin(self, replica: int | None) -> None:
        """Prepares a backward of a micro-batch of this logical replica; None: the first replica.

        Raises:
            BatchError: the replicas are not in order.
        """
        replica = self._owned.start if replica is None else replica
        if replica == self._replica:
            return
        is_new = self._replica is None or (
            # All None: an earlier step was abandoned before its last replica, and its gradients
            # were dropped.
            replica == self._owned.start and all(p.grad is None for p in self._parameters)
        )
        if is_new:
            self.reset()
            self._earlier = self._taken()  # gradients of earlier steps that were not dropped
        elif replica == (self._replica or 0) + 1:
            self._set_aside(self._replica or 0)
        else:
            raise BatchError(
                "if a process runs several replicas, the batches of a step must be in the order of "
                "replicas: pass the list of batches through hybridtrain.data.in_order_of_replicas"
            )
        self._replica = replica

    def _taken(self) -> dict[int, Tensor]:
        """Returns the present gradients, and drops them."""
        taken: dict[int, Tensor] = {}
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            self._refuse_sparse(gradient)
            # a clone, because the memory may belong to DDP's buckets
            taken[place] = gradient.clone() if self._group is not None else gradient
            parameter.grad = None
        return taken

    @staticmethod
    def _refuse_sparse(gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise ConfigError(
                "a sparse gradient, as from Embedding(sparse=True), cannot be summed over replicas "
                f"in a fixed order: set sparse=False, or remove {argument('replicas')}"
            )

    def _set_aside(self, replica: int) -> None:
        """Stores the gradients of a complete replica, and adds the subtrees that they complete."""
        node = (replica, replica + 1)
        sums = self._taken()  # [4]
        # As soon as possible, so that few sums are kept. The tree decides what is added to what,
        # not the time.
        while self._waiting and (parent := self._parents.get((self._waiting[-1][0], node))):
            _, left = self._waiting.pop()
            _add(left, sums)
            node, sums = parent, left
        self._waiting.append((node, sums))

    def _add_waiting(self, places: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Adds the stored sums to the gradients of this process's last replica, in place."""
        # From the right, as the tree joins the last replica with its nearest neighbors first.
        for _, sums in reversed(self._waiting[self._incomplete_count :]):
            both = [(g, sums[p]) for p, g in zip(places, gradients, strict=True) if p in sums]
            if both:
                torch._foreach_add_([g for g, _ in both], [other for _, other in both])

    @property
    def _incomplete_count(self) -> int:
        """The number of waiting sums that the last replica does not complete."""
        node, count = (self._owned.stop - 1, self._owned.stop), len(self._waiting)
        while count and (parent := self._parents.get((self._waiting[count - 1][0], node))):
            node, count = parent, count - 1
        return count

    def finish(self) -> None:
        """Waits for the other processes; then the gradients are sums over all replicas."""
        try:
            for under_way in self._sums_under_way:
                # Raises the error of the other thread.
                under_way.result()
            if self._stream is not None:
                # On the device: the host goes on.
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            for place, earlier in self._earlier.items():
                gradient = self._parameters[place].grad
                both = earlier if gradient is None else gradient.add_(earlier)
                # Last: gradients of earlier steps are no part of the tree of this one.
                self._parameters[place].grad = both
        finally:
            self.reset()

    def reset(self) -> None:
        """Resets after a failed step."""
        self._replica = None
        self._waiting, self._earlier, self._sums_under_way = [], {}, []

    def add_alone(self) -> None:
        """Completes the gradients if no other process has the stage."""
        self._check_all_replicas()
        self._set_aside(self._owned.stop - 1)
        # One: all replicas are here, so the tree is complete.
        ((_, sums),) = self._waiting  # of all replicas
        for place, gradient in sums.items():
            self._parameters[place].grad = gradient

    def _check_all_replicas(self) -> None:
        """Checks that a step ends with the last logical replica of this process.

        Raises:
            BatchError: it ends earlier.
        """
        # Otherwise the tree would lack leaves, and the processes would exchange different numbers
        # of sums.
        if self._replica != self._owned.stop - 1:
            raise BatchError(
                f"a step ends with a batch of replica {self._replica}, but this process runs "
                f"replicas {self._owned.start} to {self._owned.stop - 1}: pass the batches of the "
                f"step through hybridtrain.data.in_order_of_replicas"
            )

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Sums a DDP bucket over all logical replicas; the result is the sum, not the mean.

        A collective call: all processes use the same order of buckets.
        """
        # DDP gets a completed future, so that the backward does not wait. Otherwise a thread that
        # runs two stages would wait for one of them, while another process with a different number
        # of micro-batches waits for the other. `finish` waits.
        buffer = bucket.buffer()
        self._refuse_sparse(buffer)
        self._check_all_replicas()
        done: Future[Tensor] = Future()
        # DDP copies nothing, because it is the bucket's own memory, into which `_over_processes`
        # writes the sum.
        done.set_result(buffer)
        left: list[Tensor] = []
        if self._waiting:
            places = [self._places[id(parameter)] for parameter in bucket.parameters()]
            self._add_waiting(places, bucket.gradients())
            # Subtrees whose other half is in another process: they travel as sums of their own.
            left = [
                _flat(aside, places, bucket) for _, aside in self._waiting[: self._incomplete_count]
            ]
        if buffer.device.type == "cpu":
            if self._jobs is None:
                self._jobs = SimpleQueue()
                # a daemon thread: the interpreter must not wait for other processes at exit
                threading.Thread(
                    target=_work, args=(self._jobs,), name="gradients", daemon=True
                ).start()
            under_way: concurrent.futures.Future[None] = concurrent.futures.Future()
            # In the thread that runs the backward. `finish` reads the list after the backward has
            # ended.
            self._sums_under_way.append(under_way)
            self._jobs.put((under_way, partial(self._over_processes, buffer, left)))
            return done
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            for aside in left:
                # Freed when this returns; the side stream still reads it.
                aside.record_stream(self._stream)
            self._over_processes(buffer, left)
        return done

    @torch.no_grad()
    def _over_processes(self, buffer: Tensor, left: Sequence[Tensor]) -> None:
        """Replaces `buffer` by the sum over all processes, in the tree's order.

        Every process receives one slice from all processes, sums it, and sends the sum to all. This
        transfers as many bytes as a ring, but adds in the order of the tree.
        """
        # [5]
        n = len(self._nodes)
        size = -(-buffer.numel() // n)
        sums = torch.stack([*left, buffer]) if left else buffer.unsqueeze(0)
        # All slices are equally long, as all_to_all's and all_gather's views need.
        if size * n != buffer.numel():
            sums = torch.nn.functional.pad(sums, (0, size * n - buffer.numel()))
        # for each process, its slices of all subtrees of this process
        sent = sums.view(len(sums), n, size).transpose(0, 1).contiguous().view(-1)
        # Known without a message: the tree depends only on the numbers of replicas and processes.
        counts = [len(nodes) for nodes in self._nodes]
        received = buffer.new_empty(sum(counts) * size)
        dist.all_to_all_single(
            received,
            sent,
            [count * size for count in counts],
            [len(sums) * size] * n,
            group=self._group,
        )
        nodes = [node for nodes in self._nodes for node in nodes]
        slices = dict(zip(nodes, received.view(-1, size).unbind(), strict=True))
        whole = buffer.new_empty(n * size)
        part = total(slices, self._replicas, Tensor.add_)
        dist.all_gather(list(whole.view(n, size).unbind()), part, group=self._group)
        # In place: the gradients of the bucket are views of it.
        buffer.copy_(whole[: buffer.numel()])

    def close(self) -> None:
        """Ends the thread that adds across processes."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


_Job = tuple["concurrent.futures.Future[None]", Callable[[], None]]


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """Runs jobs until it gets None; the body of the thread that adds across processes."""
    while (job := jobs.get()) is not None:
        sums, run = job
        try:
            run()
            sums.set_result(None)
        except Exception as error:
            # `finish` raises it. The thread lives on: a failed step is followed by `close`.
            sums.set_exception(error)
        del job, run  # or this frame would keep a bucket until the next bucket


def _flat(sums: dict[int, Tensor], places: Sequence[int], bucket: Any) -> Tensor:
    """Returns sums in the bucket's order and memory layout."""
    buffer = bucket.buffer()
    flat = torch.zeros_like(buffer)
    for place, gradient in zip(places, bucket.gradients(), strict=True):
        if place in sums:
            offset = gradient.storage_offset() - buffer.storage_offset()
            flat.as_strided(gradient.shape, gradient.stride(), offset).copy_(sums[place])
    return flat


def _add(sums: dict[int, Tensor], others: dict[int, Tensor]) -> None:
    """Adds `others` to `sums` in place, if both have a gradient."""
    both = sums.keys() & others.keys()
    if both:
        # `sums` holds the left subtree. Its memory is this object's own, so it can be changed.
        torch._foreach_add_([sums[place] for place in both], [others[place] for place in both])
    # A parameter that only one half has used keeps that half's gradient.
    for place in others.keys() - sums.keys():
        sums[place] = others[place]
