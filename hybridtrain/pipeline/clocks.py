"""The clocks of several processes: which are one clock, and how far others are ahead.

The processes of a node read one monotonic clock. On another node it began at another time, and the
difference is found as NTP does it (RFC 5905, section 8), from the fastest of several questions:

    this process      asked |---------------| answered      here  = (asked + answered) / 2
    the first one             \\__ read __/                 there = what it read

The error is at most half the time of that question, some 0.1 ms on an Ethernet.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from hybridtrain.world import World

_QUESTIONS = 10


def now() -> float:
    """Returns the seconds of this process's clock, the one that a timeline reads."""
    return time.perf_counter()


def clock_name() -> str:
    """Returns a name that processes have in common if they read one clock."""
    boot = clock = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):  # a container may have its own clock
        clock = os.readlink("/proc/self/ns/time")
    return f"{socket.gethostname()} {boot} {clock}"


def seconds_ahead(world: World) -> float:
    """Returns how far this process's clock is ahead of that of its pipeline's first process.

    A collective call of the pipeline's processes; 0 in the first one.
    """
    group, ranks = world.pipeline_object_group, world.processes_per_replica
    answer = torch.zeros(1, dtype=torch.float64)
    if world.pipeline_rank == 0:
        for other in range(1, ranks):
            for _ in range(_QUESTIONS):
                dist.recv(answer, group=group, group_src=other)
                answer[0] = now()
                dist.send(answer, group=group, group_dst=other)
        return 0.0
    fastest = ahead = float("inf")
    for _ in range(_QUESTIONS):
        asked = now()
        dist.send(answer, group=group, group_dst=0)
        dist.recv(answer, group=group, group_src=0)
        answered = now()
        if answered - asked < fastest:
            fastest, ahead = answered - asked, (asked + answered) / 2 - float(answer)
    return ahead
