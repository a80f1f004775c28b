"""Logical replicas in a process: the state that each begins with, and the sum of their gradients.

The forwards of a stage come in the order of the micro-batches, and so replica by replica; its
backwards do too. Each replica begins with the state of the step's beginning. In the process of
logical replica 0 its state stays; the other processes get its buffers before the next step:

    forwards     [1] F0 F1 (replica 0) [2] F2 F3 (replica 1)    [3]
    state        copied                kept; again as at [1]    again as at [2]

Gradients are summed in the order of `summation_tree`, whatever the number of processes:

    backwards    B0 B1 (replica 0) [4]                 B2 B3 (replica 1) ...    [5]
    gradients    replica 0's       replica 0's moved   replica 1's              the sum of all

[4] A sum that was moved is added as soon as it completes a subtree of the tree, so at most log2 of
the number of replicas are kept. [5] The rest is added between the processes, in DDP's buckets,
while the last backward goes on. DDP is told that a bucket is complete before it is; `finish` waits.
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

# not parameters: those that a forward changes are refused elsewhere
_CHANGED_BY_FORWARDS = ("buffer", "attribute")


class ReplicaStates:
    """Gives each logical replica of a process the state of a stage at the beginning of a step.

    Args:
        state: of the layers of the stage.
        collectors: of the batch norms in the stage that are updated once per share of a batch.
    """

    def __init__(self, state: StageState, collectors: Sequence[BatchNormCollector]) -> None:
        self._state = state
        self._collectors = collectors
        self._share: tuple[int, int] | None = None
        self._first: LayersCopy | None = None
        self._kept: LayersCopy | None = None

    def enter(self, replica: int, ahead: int) -> None:
        """Prepares the next forward, which is of a share of this replica; see `Share`."""
        previous, self._share = self._share, (replica, ahead)
        if previous == self._share:
            return
        if previous is None or self._first is None:
            self._first = self._state.copied(None, _CHANGED_BY_FORWARDS)  # [1]
            return
        for collector in self._collectors:
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
        kept, self._kept = self._kept, None
        self._share = self._first = None
        if kept is not None:
            self._state.put_back(kept)  # [3]


class GradientSums:
    """Adds up the gradients of a stage over logical replicas; see the module.

    Args:
        parameters: of the stage, each once.
        world: says which logical replicas the processes run.
        group: of the processes that have the stage; None: it is this one alone.
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
        # the sums of subtrees, from left to right; each by the places of the parameters
        self._waiting: list[tuple[Node, dict[int, Tensor]]] = []
        self._earlier: dict[int, Tensor] = {}
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._sums_under_way: list[concurrent.futures.Future[None]] = []
        self._stream: Any = None

    @property
    def kept(self) -> int:
        """The number of sums that are set aside, each as large as the gradients."""
        return len(self._waiting)

    def begin(self, replica: int | None) -> None:
        """Prepares a backward of a micro-batch of this logical replica; None: of the first one.

        Raises:
            BatchError: the replicas do not come in order.
        """
        replica = self._owned.start if replica is None else replica
        if replica == self._replica:
            return
        is_new = self._replica is None or (
            replica == self._owned.start and all(p.grad is None for p in self._parameters)
        )
        if is_new:
            self.reset()
            self._earlier = self._taken()  # of steps that nobody has dropped the gradients of
        elif replica == (self._replica or 0) + 1:
            self._set_aside(self._replica or 0)
        else:
            raise BatchError(
                "the batches of a step come in the order of their replicas, where a process runs "
                "several: pass the list of them through hybridtrain.data.in_order_of_replicas"
            )
        self._replica = replica

    def _taken(self) -> dict[int, Tensor]:
        """Returns the gradients that are there, and drops them."""
        taken: dict[int, Tensor] = {}
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            self._refuse_sparse(gradient)
            # a clone, since the memory may be that of DDP's buckets
            taken[place] = gradient.clone() if self._group is not None else gradient
            parameter.grad = None
        return taken

    @staticmethod
    def _refuse_sparse(gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise ConfigError(
                "a sparse gradient, as of Embedding(sparse=True), cannot be added up in a fixed "
                f"order over the replicas: set sparse=False, or leave {argument('replicas')} out"
            )

    def _set_aside(self, replica: int) -> None:
        """Sets the gradients of a complete replica aside, and adds what they complete."""
        node = (replica, replica + 1)
        sums = self._taken()  # [4]
        while self._waiting and (parent := self._parents.get((self._waiting[-1][0], node))):
            _, left = self._waiting.pop()
            _add(left, sums)
            node, sums = parent, left
        self._waiting.append((node, sums))

    def _add_waiting(self, places: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Adds what was set aside to the gradients of this process's last replica, in place."""
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
        """Waits for the other processes; the gradients are those of all replicas then."""
        try:
            for under_way in self._sums_under_way:
                under_way.result()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            for place, earlier in self._earlier.items():
                gradient = self._parameters[place].grad
                both = earlier if gradient is None else gradient.add_(earlier)
                self._parameters[place].grad = both
        finally:
            self.reset()

    def reset(self) -> None:
        """Forgets a step that has failed."""
        self._replica = None
        self._waiting, self._earlier, self._sums_under_way = [], {}, []

    def add_alone(self) -> None:
        """Completes the gradients where no other process has the stage."""
        self._check_all_replicas()
        self._set_aside(self._owned.stop - 1)
        ((_, sums),) = self._waiting  # of all replicas
        for place, gradient in sums.items():
            self._parameters[place].grad = gradient

    def _check_all_replicas(self) -> None:
        """Makes sure that a step ends with the last logical replica of this process.

        Raises:
            BatchError: it ends before.
        """
        if self._replica != self._owned.stop - 1:
            raise BatchError(
                f"a step ends with a batch of replica {self._replica}, and this process runs "
                f"replicas {self._owned.start} to {self._owned.stop - 1}: pass the batches of the "
                f"step through hybridtrain.data.in_order_of_replicas"
            )

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Adds up a bucket of DDP over all logical replicas; it has their sum, not their mean.

        All processes call it for the same buckets in the same order.
        """
        # The future that DDP gets is complete, or the backward would wait: a thread that runs two
        # stages would then wait for one of them while another process, which has other numbers of
        # micro-batches, waits for the other. `finish` waits.
        buffer = bucket.buffer()
        self._refuse_sparse(buffer)
        self._check_all_replicas()
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        left: list[Tensor] = []
        if self._waiting:
            places = [self._places[id(parameter)] for parameter in bucket.parameters()]
            self._add_waiting(places, bucket.gradients())
            left = [
                _flat(aside, places, bucket) for _, aside in self._waiting[: self._incomplete_count]
            ]
        if buffer.device.type == "cpu":
            if self._jobs is None:
                self._jobs = SimpleQueue()
                # a daemon: the interpreter must not wait for other processes at its exit
                threading.Thread(
                    target=_work, args=(self._jobs,), name="gradients", daemon=True
                ).start()
            under_way: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._sums_under_way.append(under_way)
            self._jobs.put((under_way, partial(self._over_processes, buffer, left)))
            return done
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            for aside in left:
                aside.record_stream(self._stream)
            self._over_processes(buffer, left)
        return done

    @torch.no_grad()
    def _over_processes(self, buffer: Tensor, left: Sequence[Tensor]) -> None:
        """Gives `buffer` the sum over all processes, in the tree's order.

        Every process adds up a slice, which all have sent it, and sends it to all: the bytes of a
        ring. The order of the additions is that of the tree, not that of a ring.
        """
        # [5]
        n = len(self._nodes)
        size = -(-buffer.numel() // n)
        sums = torch.stack([*left, buffer]) if left else buffer.unsqueeze(0)
        if size * n != buffer.numel():
            sums = torch.nn.functional.pad(sums, (0, size * n - buffer.numel()))
        # for each process the slices of all subtrees of this one
        sent = sums.view(len(sums), n, size).transpose(0, 1).contiguous().view(-1)
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
        buffer.copy_(whole[: buffer.numel()])

    def close(self) -> None:
        """Ends the thread that adds between the processes."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


_Job = tuple["concurrent.futures.Future[None]", Callable[[], None]]


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """Runs jobs until one is None; the body of the thread that adds between processes."""
    while (job := jobs.get()) is not None:
        sums, run = job
        try:
            run()
            sums.set_result(None)
        except Exception as error:
            sums.set_exception(error)
        del job, run  # or this frame would keep a bucket until the next one


def _flat(sums: dict[int, Tensor], places: Sequence[int], bucket: Any) -> Tensor:
    """Returns sums as the bucket has its gradients: in its order and memory layout."""
    buffer = bucket.buffer()
    flat = torch.zeros_like(buffer)
    for place, gradient in zip(places, bucket.gradients(), strict=True):
        if place in sums:
            offset = gradient.storage_offset() - buffer.storage_offset()
            flat.as_strided(gradient.shape, gradient.stride(), offset).copy_(sums[place])
    return flat


def _add(sums: dict[int, Tensor], others: dict[int, Tensor]) -> None:
    """Adds `others` to `sums` in place, where both have a gradient."""
    both = sums.keys() & others.keys()
    if both:
        torch._foreach_add_([sums[place] for place in both], [others[place] for place in both])
    for place in others.keys() - sums.keys():
        sums[place] = others[place]
