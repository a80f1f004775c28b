"""Messages between stand-in GPUs, each with a thread in place of a process.

As ProcessGroupNCCL, a device has one stream for the messages of each group. A message first makes
that stream wait for the current one, and its `wait` makes the current stream wait for the message.
A send and its receive meet, and neither goes on without the other. Tensors in CPU memory go as
gloo's do.

    current stream      F0 | F1       |<- wait
    messages' stream       |<- begins    receive F2 ... meets the send

What it cannot show: how communicators are created, and kernels that wait for room on the device.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain import World
from hybridtrain._base.microbatch import chunk_sizes, split
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Planner
from hybridtrain.pipeline import HeadOutput, Pipeline
from hybridtrain.schedule import make_schedule
from hybridtrain.world import edges_of
from support.stand_in_gpus import PATIENCE_S, DeviceTensor, StandInGPUs, Stream, real_memory

Places = tuple[int, ...]


class Operation(NamedTuple):
    """A send or a receive of a batch; see `torch.distributed.P2POp`."""

    kind: Any
    tensor: DeviceTensor
    group: Group
    group_peer: int


class Work:
    """See `torch.distributed.Work`."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


class StandInNCCL:
    """The functions of torch.distributed that the engine calls."""

    def __init__(self, gpus: StandInGPUs) -> None:
        self._gpus = gpus
        self._streams: dict[tuple[torch.device, Places], Stream] = {}
        # by group, sender and receiver: what is on its way, and what has been taken
        self._sent: Any = defaultdict(SimpleQueue)
        self._taken: Any = defaultdict(SimpleQueue)
        self._on_host: Any = defaultdict(SimpleQueue)

    def batch_isend_irecv(self, operations: Sequence[Operation]) -> list[Work]:
        device, places = operations[0].tensor.device, operations[0].group.places
        stream, current = self._stream(device, places), self._gpus.current_stream(device)
        stream.wait_stream(current)
        for kind, tensor, _, peer in operations:
            assert places[peer] != device.index, "a message to itself"
            # the stream has the numbers alone: as NCCL, it does not hold the tensor
            meeting = self._meeting(
                kind is dist.isend, real_memory(tensor), places, device.index, places[peer]
            )
            stream.queue(meeting)
        end = stream.record_event()
        return [Work(lambda: self._gpus.current_stream(device).wait_event(end))]

    def _stream(self, device: torch.device, places: Places) -> Stream:
        if (device, places) not in self._streams:
            self._streams[device, places] = self._gpus.new_stream(device)
        return self._streams[device, places]

    def _meeting(
        self, sends: bool, memory: Tensor, places: Places, rank: int, peer: int
    ) -> Callable[[], None]:
        way = (places, rank, peer) if sends else (places, peer, rank)
        sent, taken = self._sent[way], self._taken[way]

        def send() -> None:
            sent.put(memory)
            taken.get(timeout=PATIENCE_S)

        def receive() -> None:
            memory.copy_(sent.get(timeout=PATIENCE_S))
            taken.put(None)

        return send if sends else receive

    def world(self, rank: int) -> World:
        """The world of one of as many processes as there are devices, which share a pipeline."""
        size = len(self._gpus.devices)
        return World(
            rank=rank,
            size=size,
            devices=(self._gpus.devices[rank],),
            backend="nccl",
            engine="distributed",
            processes_per_replica=size,
            pipeline_group=Group(tuple(range(size)), rank, self._on_host),
            edge_groups={
                edge: Group((*sorted(edge), edge[0] < edge[1]), rank, self._on_host)
                for edge in edges_of(size)
                if rank in edge
            },
        )

    def messages_of_edge(self, sender: int, receiver: int, at: int) -> Stream:
        """The stream of the messages of this direction, on one of its two devices."""
        places = (*sorted((sender, receiver)), sender < receiver)
        return self._stream(self._gpus.devices[at], places)


class Group:
    """A process group, as one of its processes has it.

    Args:
        places: the processes; of an edge also the direction, which has a group of its own.
        rank: this process.
        on_host: the queues of messages in CPU memory.
    """

    def __init__(self, places: Places, rank: int, on_host: Any) -> None:
        self.places, self._rank, self._on_host = places, rank, on_host

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        assert not isinstance(tensor, DeviceTensor), "NCCL would make a communicator for this pair"
        self._on_host[self._rank, peer, tag].put(tensor.clone())
        return Work()

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        assert not isinstance(tensor, DeviceTensor), "NCCL would make a communicator for this pair"
        way = self._on_host[peer, self._rank, tag]
        return Work(lambda: tensor.copy_(way.get(timeout=PATIENCE_S)))


@contextmanager
def stand_in_nccl(gpus: StandInGPUs) -> Iterator[StandInNCCL]:
    """Replaces torch.distributed's functions for the length of a block."""
    nccl = StandInNCCL(gpus)
    with (
        patch.object(dist, "P2POp", Operation),
        patch.object(dist, "batch_isend_irecv", nccl.batch_isend_irecv),
    ):
        yield nccl


class OverThreads:
    """A model over processes, each of which is a thread with a device here."""

    def __init__(
        self, net: nn.Module, inputs: Any, nccl: StandInNCCL, gpus: StandInGPUs, **options: Any
    ) -> None:
        self._gpus = gpus
        self._options = PipelineOptions(**options)
        worlds = [nccl.world(rank) for rank in range(len(gpus.devices))]
        planner = Planner(net, self._options, inputs, worlds[0].stage_owners)
        plan = planner.plan()
        planned = planner.layers_of(plan)
        copies = [copy.deepcopy((net, planned.stages)) for _ in worlds]
        self._parts = [
            Pipeline(own, plan, replace(planned, net=own, stages=stages), world, self._options)
            for (own, stages), world in zip(copies, worlds, strict=True)
        ]

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients by name, each from the process that has the parameter."""
        return {name: p.grad for part in self._parts for name, p in part.parameters.items()}

    def zero_grad(self) -> None:
        for part in self._parts:
            for parameter in part.parameters.values():
                parameter.grad = None

    def step(self, inputs: Any, targets: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> None:
        """A training step, in all threads at once."""
        options, failures, rows = self._options, list[BaseException](), len(targets)
        sizes = chunk_sizes(rows, options.chunks)
        per_device = options.stages_per_device
        schedule = make_schedule(options.schedule, len(self._parts), options.chunks, per_device)
        parts, wanted = split(inputs, sizes), targets.split(sizes)
        last = self._gpus.devices[self._parts[0].output_process]

        def head(microbatch: int, output: Any) -> HeadOutput:
            value = loss(output, self._gpus.copy(wanted[microbatch].clone(), last))
            share = sizes[microbatch] / rows
            return HeadOutput(value.detach() * share, value, torch.full_like(value, share))

        def run(rank: int) -> None:
            try:
                torch.set_num_threads(1)
                device = self._gpus.devices[rank]
                self._gpus.set_device(device)
                placed = [
                    tree_map_only(Tensor, lambda t: self._gpus.copy(t.clone(), device), part)
                    for part in parts
                ]
                self._parts[rank].run_train_step(schedule, placed.__getitem__, head, reduce=False)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=run, args=(rank,), daemon=True)
            for rank in range(len(self._parts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
