"""The worlds of loaders: replicas that are asked one after the other, or side by side."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from hybridtrain import World


def world_of(replica, replicas, shares=None):
    """Returns the World of a process among others that are not there."""
    world = World(rank=replica, size=replicas, replica_shares=shares)
    world.gather = lambda value: [value] * replicas
    return world


def take(loader, count, epoch=None, batch=0):
    """Returns the next `count` batches of a loader, or those from `batch` of `epoch` on."""
    if epoch is not None:
        loader.seek(epoch, batch * loader.batch_size)
    stream = loader.stream()
    try:
        return list(itertools.islice(stream, count))
    finally:
        stream.close()


def counted(batch):
    """Returns the samples of a share that count; the target of each is ten times its input."""
    assert torch.equal(batch.targets, 10 * batch.inputs), "inputs and targets were parted"
    return batch.inputs.tolist()[: batch.samples]


class Replicas:
    """Replicas as threads of this process, which send each other what a loader sends."""

    def __init__(self, replicas):
        self.replicas = replicas
        self._met = threading.Barrier(replicas, timeout=20)
        self._said = [None] * replicas

    def run(self, function):
        """Returns `function(world)` of each replica; raises if one of them does."""
        with ThreadPoolExecutor(self.replicas) as threads:
            futures = [threads.submit(self._call, function, i) for i in range(self.replicas)]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _call(self, function, replica):
        world = world_of(replica, self.replicas)
        world.gather = lambda value: self._gather(replica, value)
        world.begin_max = lambda values: SimpleNamespace(wait=lambda: self._max(replica, values))
        try:
            return function(world)
        except BaseException:
            self._met.abort()
            raise

    def _gather(self, replica, value):
        self._met.wait()
        self._said[replica] = value
        self._met.wait()
        return list(self._said)

    def _max(self, replica, values):
        values.copy_(torch.stack(self._gather(replica, values.clone())).amax(0))
