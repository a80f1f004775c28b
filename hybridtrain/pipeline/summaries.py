"""What a run reports about the stages of its pipeline: layers, parameters, memory, compilation."""

from __future__ import annotations

import logging
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.summation_tree import most_waiting
from hybridtrain._base.tensors import byte_size, resident_bytes
from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import setting
from hybridtrain.pipeline.forward import ForwardStage

if TYPE_CHECKING:
    from hybridtrain.pipeline.pipeline import Pipeline

_log = logging.getLogger(__name__)


def reset_peak_memory(pipeline: Pipeline) -> None:
    """Resets the peak memory statistics of this process's devices."""
    for device in pipeline.devices:
        if (accelerator := accelerator_of(device)) is not None:
            accelerator.reset_peak_memory(device)


def device_memory(pipeline: Pipeline) -> dict[str, dict[str, int]]:
    """Returns the peak bytes of each device and its total memory.

    `allocated` counts tensors, `reserved` the allocator's memory, `total` the device's memory.
    Covers all processes of the pipeline, which call it together; CPUs are omitted.
    """
    rank = pipeline.world.rank
    several = pipeline.world.pipeline_group is not None
    memory = [
        (
            f"rank {rank} {device}" if several else str(device),
            accelerator.peak_memory(device)._asdict() | {"total": accelerator.total_memory(device)},
        )
        for device in sorted(pipeline.devices, key=str)
        if (accelerator := accelerator_of(device)) is not None
    ]
    return dict(pipeline.gather(memory))


def memory_bytes(pipeline: Pipeline, optimizer: Optimizer | None = None) -> list[int]:
    """Returns the peak memory so far of each stage of this process, in bytes.

    On a GPU this is the allocator's peak. On a CPU it is the sum of parameters, gradients, buffers,
    the gradients of logical replicas that wait to be added, the activations of as many
    micro-batches as the schedule keeps in flight, but for those that are offloaded the most that
    has been there, and the state of the `optimizer`, if given.
    """
    in_flight, world = pipeline.in_flight, pipeline.world
    sums = most_waiting(world.owned_replicas, world.logical_replicas)

    def waiting_bytes(stage: ForwardStage) -> int:
        if not sums:  # most often
            return 0
        return sums * sum(byte_size(p) for p in stage.module.parameters() if p.requires_grad)

    return [
        resident_bytes(stage.module, optimizer)
        + waiting_bytes(stage)
        + stage.bytes_in_flight(in_flight[stage.index])
        + (0 if stage.offload is None else stage.offload.most_on_device)
        if (accelerator := accelerator_of(stage.device)) is None
        else accelerator.peak_memory(stage.device).allocated
        for stage in pipeline.stages
    ]


def stage_summaries(pipeline: Pipeline, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns for each stage its `layers`, `parameters` and `peak_memory_bytes`.

    On a GPU also `device_memory_bytes`, the memory of its device; on a CPU `microbatch_bytes`, the
    part of the peak for each micro-batch in flight. With `compile`, also `compiled_layers`, the
    number of layers that are compiled in training. A collective call of the pipeline.
    """
    in_flight = pipeline.in_flight
    summaries = [
        {
            "index": stage.index,
            "layers": [layer.name for layer in stage.layers],
            "parameters": stage.parameter_count,
            "peak_memory_bytes": memory,
            **(
                {"device_memory_bytes": accelerator.total_memory(stage.device)}
                if (accelerator := accelerator_of(stage.device)) is not None
                else {
                    "microbatch_bytes": stage.bytes_in_flight(in_flight[stage.index])
                    // in_flight[stage.index]
                }
            ),
            **({"compiled_layers": _count_compiled(pipeline, stage)} if pipeline.compiles else {}),
        }
        for stage, memory in zip(pipeline.stages, memory_bytes(pipeline, optimizer), strict=True)
    ]
    # By stage, since a process may have several that are not neighbors.
    by_stage = sorted(pipeline.gather(summaries), key=itemgetter("index"))
    return [{k: v for k, v in summary.items() if k != "index"} for summary in by_stage]


def log_compiled(pipeline: Pipeline) -> None:
    """Logs how many layers of this process are compiled, and which are not, and why."""
    plain = [
        layer.name
        for stage in pipeline.stages
        for number, layer in enumerate(stage.layers, stage.first)
        if pipeline.rng.draws(number)
    ]
    _log.info(
        "compiled %d of %d layers%s",
        sum(_count_compiled(pipeline, stage) for stage in pipeline.stages),
        sum(len(stage.layers) for stage in pipeline.stages),
        f"; these draw random numbers and run uncompiled in training: {', '.join(plain)}"
        if plain
        else "",
    )


def log_offload(pipeline: Pipeline) -> None:
    """Logs what this process has moved out of its devices."""
    memories = {id(s.offload.memory): s.offload.memory for s in pipeline.stages if s.offload}
    if memories:
        _log.info(
            "activations are offloaded to %s of host memory after the forward of a micro-batch, "
            "and copied back one action before its backward (%s)",
            with_unit(sum(memory.host.most_nbytes for memory in memories.values())),
            setting("offload", pipeline.offload),
        )


def _count_compiled(pipeline: Pipeline, stage: ForwardStage) -> int:
    """Returns how many layers of `stage` run compiled in training."""
    numbers = range(stage.first, stage.first + len(stage.layers))
    return sum(not pipeline.rng.draws(number) for number in numbers) * pipeline.compiles
