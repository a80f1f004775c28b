"""The price of a step with FSDP2, PyTorch's fully sharded data parallelism, to compare with plans.

This project does not run FSDP2. The comparison shows where a model needs no pipeline. FSDP2 shards
weights, gradients and optimizer state over all devices, gathers a layer's weights before its
forward and its backward, and reduce-scatters its gradients (Zhao et al., arXiv:2304.11277).

Each of these collectives has a latency, and the host launches it. A large model hides both behind
its computation, but a small model takes longer than with DDP, which sends few large buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.text_table import counted, with_unit
from hybridtrain.partitioning import CostTable, most_temporary
from hybridtrain.price.layout import StepWork, divisors

# Layers with gathered weights at any time: the layer that computes and the next layer.
_GATHERED = 2

# Collectives per layer and micro-batch: two all-gathers and a reduce-scatter.
_COLLECTIVES = 3


@dataclass(frozen=True)
class FullySharded:
    """The price of a step with FSDP2.

    Attributes:
        step_ms: milliseconds of an optimizer step.
        peak_bytes: peak memory of a device.
        chunks: micro-batches per batch; their gradients accumulate.
        recomputes: whether the backward recomputes each layer's activations.
        exposed_ms: milliseconds that gathering and scattering add to the step.
    """

    step_ms: float
    peak_bytes: int
    chunks: int
    recomputes: bool
    exposed_ms: float

    def __str__(self) -> str:
        recomputed = ", layers recomputed" if self.recomputes else ""
        return (
            f"{self.step_ms:.1f} ms per step, {with_unit(self.peak_bytes)}, with "
            f"{counted(self.chunks, 'micro-batch', 'es')}{recomputed}; gathering and scattering "
            f"exposed {self.exposed_ms:.1f} ms"
        )


def fully_sharded(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    weight_bytes: int = 4,
    *,
    chunks: int | None = None,
    recomputes: bool | None = None,
) -> FullySharded | None:
    """Returns the fastest step with FSDP2 over all devices; None if no variant fits into memory.

    Args:
        table: the costs of the layers.
        hardware: the devices and links.
        work: the work of a step.
        weight_bytes: bytes per element of a gathered weight; 2 in half precision.
            Gradients are reduced in fp32.
        chunks: micro-batches per batch; None: the fastest number.
        recomputes: whether to recompute activations; None: whatever is faster.
    """
    if work.samples % hardware.devices:
        return None
    candidates = [
        candidate
        for candidate in _ways(table, hardware, work, weight_bytes)
        if chunks in (None, candidate.chunks) and recomputes in (None, candidate.recomputes)
    ]
    return min(candidates, key=lambda candidate: candidate.step_ms, default=None)


def _ways(
    table: CostTable, hardware: Hardware, work: StepWork, weight_bytes: int
) -> Iterator[FullySharded]:
    devices, of_device = hardware.devices, work.samples // hardware.devices
    whole = [size.trained * weight_bytes // 4 for size in table.sizes]
    trained = sum(size.trained for size in table.sizes)
    largest = max(size.trained for size in table.sizes)
    messages = 0.0  # the links carry one collective at a time, each with its latency
    for size, nbytes in zip(table.sizes, whole, strict=True):
        gather_s = hardware.gather_s(nbytes, devices, 1)
        messages += (2 * gather_s + hardware.gather_s(size.trained, devices, 1)) * 1e3
    sharded_layers = sum(size.trained > 0 for size in table.sizes) if devices > 1 else 0
    launches = _COLLECTIVES * sharded_layers * hardware.message_s * 1e3
    # no computation hides the gather before the first layer and the scatter after the last
    ends = (
        hardware.gather_s(max(whole), devices, 1) + hardware.gather_s(largest, devices, 1)
    ) * 1e3
    state = sum(work.state_bytes(size.trained, size.state) for size in table.sizes)
    fixed = sum(size.weights for size in table.sizes) + trained + state
    optimizer = (3 * trained + 2 * state) / devices
    optimizer_ms = optimizer / hardware.sustained_bandwidth * 1e3
    for chunks in divisors(of_device):
        costs = table.costs_at(of_device // chunks)
        activation_bytes = [cost.activation_bytes for cost in costs]
        for recomputes in (False, True):
            forward = sum(cost.forward_ms for cost in costs)
            compute = (1 + recomputes) * forward + sum(cost.backward_ms for cost in costs)
            calls = sum((1 + recomputes) * f + b for f, b in table.host_ms)
            # a GPU computes while the host launches; a CPU does not
            synchronous = launches if hardware.device == "cpu" else 0.0
            busy = max(compute + synchronous, calls + launches)
            alive = sum(activation_bytes) + most_temporary(costs)
            if recomputes:
                alive = sum(cost.crossing_bytes for cost in costs) + max(
                    cost.activation_bytes + cost.temporary_bytes for cost in costs
                )
            memory = fixed // devices + alive + _GATHERED * max(whole) + largest
            memory += hardware.library_bytes
            if memory > hardware.usable_bytes:
                continue
            step = chunks * max(busy, messages) + ends
            yield FullySharded(
                step_ms=work.accumulate * step + optimizer_ms,
                peak_bytes=round(memory),
                chunks=chunks,
                recomputes=recomputes,
                exposed_ms=work.accumulate * (step - chunks * max(compute, calls)),
            )
