"""Emulated devices: stages that sleep, so that any number of them fits on any number of cores.

A stage takes 5 ms forward and 10 ms backward. It notes when it is called and sleeps until its time
has passed, so PyTorch's own work inside counts as part of it. Some of a backward lies outside, such
as entering autograd, which a backward in two parts does twice. It is measured on a stage that is
called without any engine (`calibrate`), and the sleeps are shorter by it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from hybridtrain.world import World

FORWARD, BACKWARD = 0.005, 0.010
WIDTH = 4  # of the values that stages send


@dataclass
class Sleeps:
    """How long a stage sleeps.

    Attributes:
        factor: how many times 5 and 10 ms a stage takes.
        early: how much too late `time.sleep` wakes up, at best.
        forward: of a forward's 5 ms, the part outside of the noted time.
        backward: of a whole backward's 10 ms, the part outside of the noted time.
        to_input: of the 5 ms of a backward's first part, the part outside of the noted time.
        to_weight: of the 5 ms of its second part, the part outside of the noted time.
    """

    early: float = 0.0
    factor: float = 1.0
    forward: float = 0.0
    backward: float = 0.0
    to_input: float = 0.0
    to_weight: float = 0.0


sleeps = Sleeps()


def use(calibrated: Sleeps) -> None:
    """Makes the stages of this process sleep as another process has calibrated."""
    global sleeps
    sleeps = calibrated


def forward_s() -> float:
    """Returns the seconds of a whole device's forward."""
    return FORWARD * sleeps.factor


def backward_s() -> float:
    """Returns the seconds of a whole device's backward."""
    return BACKWARD * sleeps.factor


def calibrate(share: float = 1.0) -> None:
    """Sets `sleeps`: how late the sleep itself is, then what a stage takes outside.

    After a longer sleep PyTorch's code takes longer too, so it depends on the stage's share of a
    device's time.
    """
    late = []
    for _ in range(100):
        start = time.perf_counter()
        time.sleep(FORWARD)
        late.append(time.perf_counter() - start - FORWARD)
    sleeps.early = sorted(late)[10]
    for _ in range(2):  # the second time corrects the first
        forward, backward = zip(*stage_alone(25, share=share), strict=True)
        sleeps.forward += statistics.median(forward) - forward_s() * share
        sleeps.backward += statistics.median(backward) - backward_s() * share
        _, to_input, to_weight = zip(*stage_alone(25, in_parts=True, share=share), strict=True)
        sleeps.to_input += statistics.median(to_input) - backward_s() * share / 2
        sleeps.to_weight += statistics.median(to_weight) - backward_s() * share / 2


def stage_alone(
    microbatches: int, in_parts: bool = False, share: float = 1.0
) -> list[tuple[float, ...]]:
    """The seconds of each action of one stage, called without any engine.

    Args:
        microbatches: how often it is called.
        in_parts: run each backward in two parts.
        share: the stage's share of the time of a device.

    Returns:
        for each micro-batch its forward and its backward, or the two parts of its backward.
    """
    stage, x, gradient = Emulated(share), samples(1), torch.ones(1, WIDTH)
    times = []
    for _ in range(microbatches):
        stamps = [time.perf_counter()]
        y = stage(x)
        stamps.append(time.perf_counter())
        if in_parts:
            weight = edge_to_weight(y)
            inner = torch.autograd.grad(y, (x, weight), gradient, retain_graph=True)[1]
            stamps.append(time.perf_counter())
            torch.autograd.backward(weight, inner)
        else:
            torch.autograd.backward(y, gradient)
        stamps.append(time.perf_counter())
        times.append(tuple(end - start for start, end in itertools.pairwise(stamps)))
    return times


def device_alone_s(chunks: int, in_parts: bool, per_device: int) -> float:
    """The seconds of a device's stages for `chunks` micro-batches, without any engine."""
    return sum(map(sum, stage_alone(chunks * per_device, in_parts, 1 / per_device)))


def edge_to_weight(y: Tensor) -> GradientEdge:
    """Returns where the weight's part of the backward of an emulated stage begins."""
    clone: Any = y.grad_fn
    add = clone.next_functions[0][0].next_functions[0][0]  # before `_Output`
    return GradientEdge(*add.next_functions[1])


def pause(seconds: float) -> None:
    """Sleeps for `seconds`, see `pause_until`."""
    pause_until(time.perf_counter() + seconds)


def pause_until(end: float) -> None:
    """Sleeps until `end`: a little less by the clock, the rest in naps of some microseconds."""
    time.sleep(max(0.0, end - time.perf_counter() - sleeps.early))
    while time.perf_counter() < end:
        time.sleep(0)


class _Clock:
    """The time at which a part of a stage's backward begins.

    A whole backward runs the output, the weight and the input. In two parts it runs the output and
    the input, and the weight some time later.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self._is_whole = False

    def begin(self) -> None:
        """The output's part begins."""
        self._at, self._is_whole = time.perf_counter(), False

    def pause_weight(self, share: float) -> None:
        """Pauses for half a backward; the input follows directly if the backward is whole."""
        half = backward_s() * share / 2
        if self._at is None:
            pause(half - sleeps.to_weight)
            return
        self._at, self._is_whole = self._at + half - sleeps.backward / 2, True
        pause_until(self._at)

    def pause_input(self, share: float) -> None:
        """Pauses for half a backward, the end of a whole one or all of a first part."""
        assert self._at is not None
        outside = sleeps.backward / 2 if self._is_whole else sleeps.to_input
        end, self._at = self._at + backward_s() * share / 2 - outside, None
        pause_until(end)


class _Input(torch.autograd.Function):
    """Sleeps in the backward with respect to the input: half of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, clock: _Clock) -> Tensor:
        ctx.share, ctx.clock = share, clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.pause_input(ctx.share)
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Sleeps in the backward with respect to the weight: the other half."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, share: float, clock: _Clock) -> Tensor:
        ctx.share, ctx.clock = share, clock
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.pause_weight(ctx.share)
        return torch.zeros(()), None, None


class _Output(torch.autograd.Function):
    """Notes that a backward begins."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.begin()
        return grads[0], None


class Emulated(nn.Module):
    """A stage that takes `share` of the time of a device and computes nothing."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.zeros(()))
        self._clock = _Clock()

    def forward(self, x: Tensor) -> Tensor:
        """The same values, later."""
        end = time.perf_counter() + forward_s() * self.share - sleeps.forward
        part = _Input.apply(x, self.share, self._clock)
        part = part + _Weight.apply(self.weight, self.share, self._clock)
        # as most layers, it ends in an operation of PyTorch, not in a Python function
        result: Tensor = _Output.apply(part, self._clock).clone()
        pause_until(end)
        return result


def samples(rows: int) -> Tensor:
    """Inputs, the same everywhere, whose gradient the first stage computes as the others do."""
    return torch.ones(rows, WIDTH, requires_grad=True)


def network(stages: int, per_device: int) -> nn.Sequential:
    """A chain of `stages` emulated stages."""
    return nn.Sequential(*[Emulated(1 / per_device) for _ in range(stages)])


def part_of_pipeline(devices: int) -> World | None:
    """Returns the world of a pipeline over the first `devices` processes; None in the others."""
    group = dist.new_group(list(range(devices)))
    if dist.get_rank() >= devices:
        return None
    return World(
        rank=dist.get_rank(),
        size=devices,
        engine="distributed",
        processes_per_replica=devices,
        pipeline_group=group,
        _object_group=group,
    )
