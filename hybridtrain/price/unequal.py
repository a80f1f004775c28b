"""The places of devices of unequal speed or memory in pipelines, and the shares of the replicas.

All replicas have the same cut. A place in the pipeline is therefore as fast as the slowest device
at that place, relative to its replica's share of the samples, and has the smallest memory of these
devices. With two fast devices F and two slow devices S per node, pipelines of two devices are
either

    in order   F F and S S    equal places, and unequal shares
    in turns   F S and F S    unequal places, and equal shares
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hybridtrain._base.hardware import Hardware


@dataclass(frozen=True)
class Arrangement:
    """The devices of the pipelines, by place; all fields are empty if devices are equal.

    Attributes:
        device_speeds: the speed of each place, for the share of the replica with the largest one.
        device_memory_gib: the memory of each place.
        replica_shares: the relative number of samples of each replica; empty: equal.
        device_order: the numbers of a node's devices, one pipeline after the other; empty: in
            order.
    """

    device_speeds: tuple[float, ...] = ()
    device_memory_gib: tuple[float, ...] = ()
    replica_shares: tuple[float, ...] = ()
    device_order: tuple[int, ...] = ()

    def usable_bytes(self, hardware: Hardware, nb_part: int) -> list[float]:
        """Returns the bytes that a plan may use at each of the `nb_part` places."""
        memory = self.device_memory_gib or (hardware.memory_gib,) * nb_part
        return [hardware.usable_of(gib) for gib in memory]


EQUAL = Arrangement()
"""Equal devices, in order."""


def arrangements(
    hardware: Hardware, nb_part: int, replicas: int, shares: Sequence[float] | None = None
) -> Iterator[Arrangement]:
    """Yields the ways to place `replicas` pipelines of `nb_part` devices.

    Args:
        hardware: the devices.
        nb_part: devices per pipeline.
        replicas: the number of pipelines.
        shares: the relative number of samples of each replica; None: in proportion to its speed.
    """
    number = hardware.devices_per_node
    if not hardware.is_unequal and shares is None:
        yield EQUAL
        return
    in_node = max(1, number // nb_part)
    places = range(nb_part)
    devices = [[(r * nb_part + p) % number for p in places] for r in range(replicas)]
    in_order = arranged(hardware, devices, shares)
    yield in_order
    if 1 < nb_part < number and number % nb_part == 0:
        devices = [[r % in_node + p * in_node for p in places] for r in range(replicas)]
        in_turns = arranged(hardware, devices, shares)
        if in_turns != in_order:
            order = tuple(device for replica in devices[:in_node] for device in replica)
            yield replace(in_turns, device_order=order)


def arranged(
    hardware: Hardware, devices: Sequence[Sequence[int]], shares: Sequence[float] | None
) -> Arrangement:
    """Returns the places of pipelines over these devices.

    Args:
        hardware: the devices.
        devices: for each replica, the numbers of its devices in their node, by place.
        shares: see `arrangements`.
    """
    speeds = [[hardware.speed_of(device) for device in replica] for replica in devices]
    memory = [[hardware.memory_of(device) for device in replica] for replica in devices]
    of_replica = list(map(sum, speeds)) if shares is None else list(shares)
    least, most = min(of_replica), max(of_replica)
    return Arrangement(
        device_speeds=tuple(
            min(speed * most / share for speed, share in zip(place, of_replica, strict=True))
            for place in zip(*speeds, strict=True)
        ),
        device_memory_gib=tuple(map(min, zip(*memory, strict=True))),
        replica_shares=()
        if least == most
        else tuple(round(share / least, 3) for share in of_replica),
    )
