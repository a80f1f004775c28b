"""The relative speeds of the devices of a pipeline, measured with matrix products."""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter

import torch

from hybridtrain.errors import setting
from hybridtrain.options import AUTO, PipelineOptions
from hybridtrain.partitioning import balances
from hybridtrain.world import World

_log = logging.getLogger("hybridtrain")

# Long enough to cover several periods of a CPU quota (0.1 s), and for GPU clocks to ramp up.
_SECONDS = 0.5
_CPU_SIZE = 256
_GPU_SIZE = 2048


def with_device_speeds(options: PipelineOptions, world: World) -> PipelineOptions:
    """Returns the options with measured speeds in place of `device_speeds="auto"`.

    A collective call if it is set. All processes measure at the same time; each process measures
    its devices one after the other, with matrix products in fp32. The speeds are relative to the
    slowest device, in tenths, so that equal devices have equal speeds; None if all are equal, or
    `split` does not balance stages.
    """
    if options.device_speeds != AUTO:
        return options
    if not balances(options):
        return replace(options, device_speeds=None)
    rates = world.gather(_rates(world))
    shares, width = world.shares, len(world.devices)
    slowest = [
        # a replica with a larger share has more work
        min(
            rates[world.rank_of(replica, place // width)][place % width] / shares[replica]
            for replica in range(world.data_parallel_size)
        )
        for place in range(world.nb_part)
    ]
    speeds = [round(rate / min(slowest), 1) for rate in slowest]
    if world.is_main:
        _log.info("%s: %s", setting("device_speeds", AUTO), speeds)
    return replace(options, device_speeds=None if len(set(speeds)) == 1 else speeds)


def _rates(world: World) -> list[float]:
    """Returns the matrix products per second of each device of this process; a collective call."""
    # Together, so that processes of one host take their share of its cores and memory, as in
    # training.
    world.all_arrive(world.timeout_s)
    # Each device once: several stages on it share its speed.
    rates = {device: _rate(device) for device in dict.fromkeys(world.devices)}
    return [rates[device] for device in world.devices]


def _rate(device: torch.device) -> float:
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    matrix = torch.ones(size, size, device=device)
    result = torch.mm(matrix, matrix)  # warms up

    def wait() -> None:
        # Waits for the GPU, which only queues the products.
        result[0, 0].item()

    wait()
    products, start = 0, perf_counter()
    while perf_counter() - start < _SECONDS:
        for _ in range(10):
            result = torch.mm(matrix, matrix)
        wait()
        products += 10
    return products / (perf_counter() - start)
