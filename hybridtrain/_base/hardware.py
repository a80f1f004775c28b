"""The hardware for cost predictions: devices, nodes and links. Does not import torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from hybridtrain.errors import ConfigError, argument, check_choice

GIB = 2**30


def host_memory() -> int:
    """Returns this host's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Hardware:
    """The hardware for which to predict a run's cost; the fields are the keys of `hardware`.

    Rates are data sheet values; `flops_reached` and `bandwidth_reached` are the fractions of them
    that training achieves. The default of `flops_reached` follows Narayanan et al.
    (arXiv:2104.04473, table 1), who report 44% to 52% for GPT on A100s. Other defaults are guesses;
    `hybridtrain measure-machine` measures them.

    Raises:
        ConfigError: a value is out of its range; the message names the key.
    """

    device: str = "cuda"
    """`cuda` or `cpu`; CPU stages of one process exchange tensors without copies."""
    nodes: int = 1
    """The number of nodes."""
    devices_per_node: int = 1
    """The number of devices per node."""
    memory_gib: float = 16.0
    """The memory of a device, in GiB."""
    device_speeds: Sequence[float] | None = None
    """The relative speed of each device of a node, where they differ, such as `[1, 1, 2, 2]`; the
    rates refer to a device of speed 1. null: all are equal."""
    device_memory_gib: Sequence[float] | None = None
    """Memory of each device of a node in GiB, where they differ; null: `memory_gib` each."""
    reserved_gib: float = 1.0
    """Memory of a device in GiB that the run cannot use: CUDA context, NCCL communicators,
    fragmentation.
    """
    library_gib: float = 0.03125
    """Memory of a GPU in GiB that the workspaces of CUDA's libraries take for backwards, in one
    thread per device. The default is cuBLAS's 32 MiB on Hopper and later GPUs.
    """
    library_gib_per_stage: float = 0.03125
    """The same for each thread with stages on the GPU, which a device of a pipeline has once."""
    margin: float = 0.0
    """The fraction of the remaining memory that a plan leaves free, as a safety margin for
    predictions.
    """
    price_per_gpu_hour: float = 0.0
    """The price per device and hour, in any currency; 0 if unknown."""
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Peak FLOPs per second of matrix products, by precision: fp32, tf32, bf16, fp16."""
    flops_reached: float = 0.5
    """The fraction of `flops_per_s` that training achieves."""
    memory_bytes_per_s: float = 1e12
    """The bandwidth of a device's memory in bytes per second, reads and writes together."""
    bandwidth_reached: float = 0.8
    """The fraction of the memory, node and network bandwidths that training achieves."""
    node_bytes_per_s: float = 1e10
    """The bandwidth between two devices of a node in bytes per second, in one direction."""
    node_latency_s: float = 5e-6
    """The latency of a message inside a node, in seconds."""
    network_bytes_per_s: float = 1e10
    """The network bandwidth of a node in bytes per second, over all its network cards."""
    network_latency_s: float = 1e-5
    """The latency of a message between nodes, in seconds."""
    network_cards: int = 1
    """The number of network cards that share `network_bytes_per_s`; a message uses one card."""
    operator_s: float = 6e-6
    """The host time to call a PyTorch operator in a forward with autograd, in seconds."""
    backward_operator_s: float | None = None
    """The host time per operator of a backward, in seconds; null: as `operator_s`."""
    action_s: float = 1e-4
    """The host time per action of the schedule (a forward or backward of a micro-batch on a stage)
    in seconds, without its operators."""
    microbatch_s: float = 0.0
    """The host time per micro-batch and process in seconds, without its actions and operators: the
    start of a forward, and of a backward from the loss."""
    message_s: float = 1e-4
    """The host time to send or receive a message to or from another process, in seconds."""
    to_host_bytes_per_s: float | None = None
    """The rate of copies from a device to pinned memory of its host, in bytes per second; on a CPU
    device, of the copies to another buffer that `pipeline.offload` makes. null: unknown, and `auto`
    and `plan` do not choose `pipeline.offload`."""
    from_host_bytes_per_s: float | None = None
    """The rate of copies from the host to a device, in bytes per second; null: as to the host."""
    both_ways_bytes_per_s: float | None = None
    """The rate in each direction while a device copies in both, in bytes per second; null: copies
    do not slow each other down."""

    def __post_init__(self) -> None:
        check_choice("hardware.device", self.device, ("cuda", "cpu"))
        for name in ("nodes", "devices_per_node", "network_cards"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"hardware.{name}={value!r} must be a whole number of at least 1")
        for setting in fields(self):
            value = getattr(self, setting.name)
            # `setting.type` is a text, because annotations of this module are not evaluated.
            if setting.type == "float" and not _is_number(value):
                raise ConfigError(
                    f"hardware.{setting.name}={value!r} must be a non-negative number"
                )
        if self.backward_operator_s is not None and not _is_number(self.backward_operator_s):
            raise ConfigError(
                f"hardware.backward_operator_s={self.backward_operator_s!r} must be a non-negative "
                "number or null"
            )
        for name in ("to_host_bytes_per_s", "from_host_bytes_per_s", "both_ways_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ConfigError(f"hardware.{name}={value!r} must be a positive number or null")
        for name in ("memory_gib", "memory_bytes_per_s", "node_bytes_per_s", "network_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hardware.{name}={getattr(self, name)} must be positive")
        if self.margin >= 1:
            raise ConfigError(
                f"hardware.margin={self.margin} must be less than 1: it is the fraction of memory "
                "left free"
            )
        for name in ("flops_reached", "bandwidth_reached"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"hardware.{name}={getattr(self, name)} must be between 0 and 1: it is the "
                    "fraction of the data sheet's rate that training achieves"
                )
        for precision, rate in self.flops_per_s.items():
            if not _is_number(rate) or not rate > 0:
                raise ConfigError(f"hardware.flops_per_s.{precision}={rate!r} must be positive")
        for name in ("device_speeds", "device_memory_gib"):
            values = getattr(self, name)
            if values is None:
                continue
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ConfigError(f"hardware.{name}={values!r} must be a list of numbers")
            if len(values) != self.devices_per_node:
                raise ConfigError(
                    f"hardware.{name} has {len(values)} values, and a node has "
                    f"hardware.devices_per_node={self.devices_per_node} devices: give one for each"
                )
            for value in values:
                if not _is_number(value) or not value > 0:
                    raise ConfigError(f"hardware.{name}: {value!r} must be a positive number")
        self._take_equal_lists()
        smallest = min(self.device_memory_gib or [self.memory_gib])
        if self.device_memory_gib is not None and self.reserved_gib >= smallest:
            raise ConfigError(
                f"hardware.reserved_gib={self.reserved_gib:g} must be less than the smallest of "
                f"hardware.device_memory_gib, {smallest:g}"
            )
        if self.reserved_gib >= self.memory_gib:
            raise ConfigError(
                f"hardware.reserved_gib={self.reserved_gib:g} must be less than "
                f"hardware.memory_gib={self.memory_gib:g}"
            )

    def _take_equal_lists(self) -> None:
        """Replaces a list of equal values by the rates and the memory of every device."""
        # In `__post_init__` of a frozen dataclass, before anyone has seen the object.
        change = partial(object.__setattr__, self)
        if self.device_memory_gib is not None:
            change("memory_gib", max(self.device_memory_gib))
            if min(self.device_memory_gib) == self.memory_gib:
                change("device_memory_gib", None)
        speeds = self.device_speeds
        if speeds is not None and len(set(speeds)) == 1:
            change("flops_per_s", {name: r * speeds[0] for name, r in self.flops_per_s.items()})
            change("memory_bytes_per_s", self.memory_bytes_per_s * speeds[0])
            change("device_speeds", None)

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def usable_bytes(self) -> float:
        """The bytes that a plan may use on a device."""
        return self.usable_of(self.memory_gib)

    def usable_of(self, memory_gib: float) -> float:
        """Returns the bytes that a plan may use on a device with this much memory."""
        return (memory_gib - self.reserved_gib) * GIB * (1 - self.margin)

    @property
    def library_bytes(self) -> int:
        """The bytes that CUDA's libraries keep on a GPU with the stages of one thread."""
        if self.device != "cuda":
            return 0
        return round((self.library_gib + self.library_gib_per_stage) * GIB)

    @property
    def is_unequal(self) -> bool:
        """True if the devices of a node differ."""
        return self.device_speeds is not None or self.device_memory_gib is not None

    @property
    def mean_speed(self) -> float:
        """The mean relative speed of the devices."""
        speeds = self.device_speeds or [1.0]
        return sum(speeds) / len(speeds)

    @property
    def weakest(self) -> Hardware:
        """The same number of devices, all as slow and as small as any of these."""
        slowest = min(self.device_speeds or [1.0])
        return replace(
            self,
            memory_gib=min(self.device_memory_gib or [self.memory_gib]),
            flops_per_s={name: rate * slowest for name, rate in self.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s * slowest,
            device_speeds=None,
            device_memory_gib=None,
        )

    def with_devices(self, devices: int) -> Hardware:
        """Returns one node with this many of the devices, which repeat if they are too few."""
        lists: dict[str, Any] = {
            name: [values[i % len(values)] for i in range(devices)]
            for name in ("device_speeds", "device_memory_gib")
            if (values := getattr(self, name)) is not None
        }
        return replace(self, nodes=1, devices_per_node=devices, **lists)

    def speed_of(self, device: int) -> float:
        """Returns the relative speed of a device of a node."""
        return 1.0 if self.device_speeds is None else self.device_speeds[device]

    def memory_of(self, device: int) -> float:
        """Returns the GiB of a device of a node."""
        return self.memory_gib if self.device_memory_gib is None else self.device_memory_gib[device]

    def sustained_flops(self, precision: str) -> float:
        """Returns the FLOPs per second that training achieves.

        Raises:
            ConfigError: the rate of this precision is unknown.
        """
        if precision not in self.flops_per_s:
            precisions = ", ".join(self.flops_per_s) or "none"
            raise ConfigError(
                f"hardware.flops_per_s has no rate for {precision} (it has: {precisions}): set "
                f"{argument('precision')} to one of these, or set "
                f"hardware.flops_per_s.{precision}="
            )
        return self.flops_per_s[precision] * self.flops_reached

    @property
    def sustained_bandwidth(self) -> float:
        """The memory bandwidth in bytes per second that training achieves."""
        return self.memory_bytes_per_s * self.bandwidth_reached

    @property
    def host_copies(self) -> tuple[float, float, float] | None:
        """The rates of copies to and from the host in bytes per second, and while both run.

        None: they are unknown.
        """
        there = self.to_host_bytes_per_s
        if there is None:
            return None
        back = self.from_host_bytes_per_s or there
        # Unknown: each direction then keeps its own rate.
        both = self.both_ways_bytes_per_s or min(there, back)
        reached = self.bandwidth_reached
        # Never faster than one direction alone, whatever was measured.
        return there * reached, back * reached, min(both, there, back) * reached

    def transfer_s(self, nbytes: float, between_nodes: bool) -> float:
        """Returns the seconds that a message takes between two devices."""
        if between_nodes:
            # One message uses one card.
            rate = self.network_bytes_per_s / self.network_cards
            return self.network_latency_s + nbytes / (rate * self.bandwidth_reached)
        return self.node_latency_s + nbytes / (self.node_bytes_per_s * self.bandwidth_reached)

    def gather_s(self, nbytes: float, replicas: int, nb_part: int) -> float:
        """Returns the seconds of an all-gather or reduce-scatter of `nbytes` over the replicas.

        In a ring each of n processes sends (n-1)/n of the bytes (Patarasuk and Yuan, JPDC 2009);
        the latency is a tree's. The replicas of a stage are `nb_part` devices apart, so the rings
        of all stages of a node share its network. An all-reduce is a reduce-scatter and an
        all-gather.
        """
        if replicas == 1 or nbytes == 0:
            return 0.0
        rate, latency = self.node_bytes_per_s, self.node_latency_s
        if replicas > max(1, self.devices_per_node // nb_part):  # more than one node's
            # Each stage of a node has a ring of its own, and all share the network.
            rings = min(nb_part, self.devices_per_node)
            rate = min(rate, self.network_bytes_per_s / rings)
            latency = self.network_latency_s
        share = (replicas - 1) / replicas
        return share * nbytes / (rate * self.bandwidth_reached) + latency * math.ceil(
            math.log2(replicas)
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
