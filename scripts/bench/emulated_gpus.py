"""Emulated GPUs: one GPU as several, each a stream with multiprocessors of its own.

CUDA's green contexts give disjoint sets of multiprocessors to streams. A schedule's devices are
such streams, and its stages compute real kernels. One thread queues all actions in the schedule's
one order; streams wait for one another by events:

    stream 0, SMs 0-31     F0@0   F1@0   F2@0 ...
    stream 1, SMs 32-63         F0@1   B0@1 ...

It is an emulation: the streams share memory, caches and the host, a message between them takes no
time, and the engine itself does not run. It shows how close real kernels come to the schedule's
ideal time, which is simulated with the time that each action takes when nothing else runs, and how
orders compare: those of this project, and of torch.distributed.pipelining. Has not run yet.

    python -m scripts.bench.emulated_gpus                 # needs a GPU and cuda-bindings
    python -m scripts.bench.emulated_gpus --device cpu    # to try the script: one after another
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from hybridtrain.pipeline.split_backward import SplitBackward, divide
from hybridtrain.schedule import Action, Durations, Schedule, make_schedule, read_schedule
from scripts.bench.common import print_footer, print_table

# Each with its stages per device.
OURS = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-v", 2), ("v-half", 2))
# Its Schedule1F1B has no table, and the order of 1f1b.
TORCH: Mapping[str, tuple[Any, int]] = {
    "ScheduleInterleaved1F1B": (ScheduleInterleaved1F1B, 2),
    "ScheduleZBVZeroBubble": (ScheduleZBVZeroBubble, 2),
}

_ACTION = re.compile(r"\d+[FBIW]\d+")

# Multiprocessors come in groups of so many, on Hopper GPUs; fewer on older ones.
SM_GROUP = 8


class Streams(Protocol):
    """The streams of the emulated devices."""

    def on(self, lane: int) -> AbstractContextManager[object]:
        """Returns a context in which work goes to the stream of a device."""

    def mark(self, lane: int) -> Any:
        """Returns an event behind all work of a device so far."""

    def wait(self, lane: int, event: Any) -> None:
        """Lets later work of a device wait for an event."""

    def synchronize(self) -> None:
        """Waits for all devices."""


class OneAfterAnother:
    """Devices of a CPU, which computes in the order of the host."""

    def on(self, lane: int) -> AbstractContextManager[object]:
        """See `Streams`."""
        return nullcontext()

    def mark(self, lane: int) -> Any:
        """See `Streams`."""

    def wait(self, lane: int, event: Any) -> None:
        """See `Streams`."""

    def synchronize(self) -> None:
        """See `Streams`."""


class GreenStreams:
    """Streams on disjoint sets of multiprocessors of the current GPU.

    Args:
        count: the number of devices.
        driver: the module `cuda.bindings.driver`.
        make_stream: returns PyTorch's stream for a handle of CUDA's.

    Attributes:
        multiprocessors: of each device.
    """

    def __init__(
        self, count: int, driver: Any, make_stream: Callable[[int], Any] = torch.cuda.ExternalStream
    ) -> None:
        self._driver = driver
        torch.cuda.synchronize()  # green contexts belong to the primary one, which exists now
        device = self._call(driver.cuDeviceGet, torch.cuda.current_device())
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._call(driver.cuDeviceGetDevResource, device, kind)
        self.multiprocessors = share_of(whole.sm.smCount, count)
        parts, made, _ = self._call(
            driver.cuDevSmResourceSplitByCount, count, whole, 0, self.multiprocessors
        )
        if made < count:
            raise RuntimeError(f"CUDA divides the multiprocessors into {made} sets, not {count}")
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        self._contexts = []  # they must live as long as the streams
        self._streams = []
        for part in parts[:count]:
            description = self._call(driver.cuDevResourceGenerateDesc, [part], 1)
            context = self._call(driver.cuGreenCtxCreate, description, device, flags)
            stream = self._call(
                driver.cuGreenCtxStreamCreate,
                context,
                driver.CUstream_flags.CU_STREAM_NON_BLOCKING,
                0,
            )
            self._contexts.append(context)
            self._streams.append(make_stream(int(stream)))

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        """Returns the results of a function of the driver, one alone or several as a tuple."""
        status, *results = function(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {status}")
        return results[0] if len(results) == 1 else tuple(results)

    def on(self, lane: int) -> AbstractContextManager[object]:
        """See `Streams`."""
        return torch.cuda.stream(self._streams[lane])

    def mark(self, lane: int) -> Any:
        """See `Streams`."""
        return self._streams[lane].record_event()

    def wait(self, lane: int, event: Any) -> None:
        """See `Streams`."""
        self._streams[lane].wait_event(event)

    def synchronize(self) -> None:
        """See `Streams`."""
        torch.cuda.synchronize()


def share_of(multiprocessors: int, count: int) -> int:
    """Returns the number of multiprocessors of each device, whole groups of them."""
    return multiprocessors // count // SM_GROUP * SM_GROUP or max(1, multiprocessors // count)


class StreamLoop:
    """A schedule's actions on the streams of its devices, with nothing around them.

    Args:
        schedule: the actions.
        stages: the modules.
        inputs: of each micro-batch.
        streams: a stream for each device of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        inputs: Sequence[Tensor],
        streams: Streams,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._inputs = inputs
        self._streams = streams
        self._last = schedule.stages - 1
        # what an action needs, where it was made, and when it is there
        self._ready: dict[Action, tuple[Tensor, int, Any]] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._parts: dict[tuple[int, int], Callable[[], None]] = {}
        self._held: list[Tensor] = []  # another stream may still read them

    def step(self) -> None:
        """Queues all actions of a step; `Streams.synchronize` waits for them."""
        self._held.clear()
        for lane, action in self._schedule.in_one_order:
            with self._streams.on(lane):
                self.run(lane, action)

    def run(self, lane: int, action: Action) -> None:
        """Queues an action on the current stream, that of `lane`."""
        kind, stage, microbatch = action
        if kind == "F":
            self._forward(lane, stage, microbatch)
        elif kind == "W":
            self._parts.pop((stage, microbatch))()
        else:
            self._backward(lane, kind, stage, microbatch)

    def _forward(self, lane: int, stage: int, microbatch: int) -> None:
        value = self._inputs[microbatch]
        if stage:
            value = self._take(lane, Action("F", stage, microbatch)).requires_grad_()
        output = self._stages[stage](value)
        if stage == self._last:
            output = output.float().mean() / self._schedule.chunks
        else:
            self._make(lane, Action("F", stage + 1, microbatch), output.detach())
        self._graphs[stage, microbatch] = value, output

    def _backward(self, lane: int, kind: str, stage: int, microbatch: int) -> None:
        value, root = self._graphs.pop((stage, microbatch))
        gradient = torch.ones_like(root)
        if stage < self._last:
            gradient = self._take(lane, Action("B", stage, microbatch))
        if kind == "I" and not stage:  # its input needs no gradient
            self._parts[stage, microbatch] = lambda: torch.autograd.backward(root, gradient)
            return
        if kind == "I":
            division = divide([root], [value])
            assert division is not None
            parts = SplitBackward(division, [(root, gradient)], [value])
            parts.to_input()
            self._parts[stage, microbatch] = parts.to_weights
        else:
            torch.autograd.backward(root, gradient)
        if stage:
            assert value.grad is not None
            self._make(lane, Action("B", stage - 1, microbatch), value.grad)

    def _make(self, lane: int, to: Action, value: Tensor) -> None:
        self._ready[to] = value, lane, self._streams.mark(lane)
        self._held.append(value)

    def _take(self, lane: int, action: Action) -> Tensor:
        value, source, event = self._ready.pop(action)
        if source != lane:
            self._streams.wait(lane, event)
        return value


def torch_order(name: str, devices: int, chunks: int) -> Schedule:
    """Returns the order of one of torch.distributed.pipelining's schedules."""
    kind, per_device = TORCH[name]
    stages = devices * per_device
    own = [0, stages - 1] if kind is ScheduleZBVZeroBubble else [0, devices]
    with _no_processes(devices):
        of_rank = [PipelineStage(nn.Identity(), s, stages, torch.device("cpu")) for s in own]
        order = kind(of_rank, chunks, nn.MSELoss()).pipeline_order
    # without messages and reductions of gradients
    of_devices = [filter(_ACTION.fullmatch, map(str, order[rank])) for rank in range(devices)]
    lines = map(",".join, of_devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return read_schedule(path)


@contextmanager
def _no_processes(count: int) -> Iterator[None]:
    """Stands in for process groups, which stages of torch.distributed.pipelining ask for."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stages_of(count: int, layers: int, width: int, device: str, dtype: torch.dtype) -> list[Any]:
    """Returns equal stages of `layers` layers in all."""
    torch.manual_seed(0)
    return [
        nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(layers // count)
            )
        ).to(device, dtype)
        for _ in range(count)
    ]


def seconds(streams: Streams, run: Callable[[], object], repeats: int) -> float:
    """Returns the median seconds of a call, until all devices have ended."""
    times = []
    for _ in range(repeats + 1):
        streams.synchronize()
        began = time.perf_counter()
        run()
        streams.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def durations_alone(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    streams: Streams,
    repeats: int,
) -> Durations:
    """Returns the seconds of each stage's actions on its own stream, while nothing else runs.

    All micro-batches of a stage run in a row, so that the host's part hides as in a step.
    """
    loop = StreamLoop(schedule, stages, inputs, streams)
    kinds = {action.kind for lane in schedule.lanes for action in lane}
    found: dict[str, list[float]] = {kind: [0.0] * len(stages) for kind in "FBIW"}
    backwards = [kind for kind in "BIW" if kind in kinds]

    def together(kind: str, stage: int) -> float:
        lane, began = schedule.lane_of[stage], time.perf_counter()
        with streams.on(lane):
            for microbatch in range(schedule.chunks):
                loop.run(lane, Action(kind, stage, microbatch))  # type: ignore[arg-type]
        streams.synchronize()
        return (time.perf_counter() - began) / schedule.chunks

    times: dict[tuple[str, int], list[float]] = {}
    ways = ["B"] * ("B" in backwards) + ["IW"] * ("I" in backwards)
    for _ in range(repeats + 1):
        for way in ways:
            for stage in range(len(stages)):
                times.setdefault(("F", stage), []).append(together("F", stage))
            for stage in reversed(range(len(stages))):
                for kind in way:
                    times.setdefault((kind, stage), []).append(together(kind, stage))
    for (kind, stage), values in times.items():
        found[kind][stage] = statistics.median(values[1:])
    in_parts = [i + w for i, w in zip(found["I"], found["W"], strict=True)]
    whole = found["B"] if "B" in kinds else in_parts
    parts = in_parts if "I" in kinds else whole
    no_time = (0.0,) * (len(stages) - 1)
    return Durations(tuple(found["F"]), tuple(whole), tuple(found["W"]), no_time, tuple(parts))


def row_of(
    name: str, schedule: Schedule, options: argparse.Namespace, streams: Streams
) -> list[str]:
    """Measures a schedule."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    stages = stages_of(schedule.stages, options.layers, options.width, options.device, dtype)
    shape = options.rows, options.width
    inputs = [torch.randn(shape, device=options.device, dtype=dtype) for _ in range(options.chunks)]
    ideal = durations_alone(schedule, stages, inputs, streams, options.repeats).length(schedule)
    loop = StreamLoop(schedule, stages, inputs, streams)
    taken = seconds(streams, loop.step, options.repeats)
    cells = [name, f"{len(schedule.lanes)}", f"{schedule.stages // len(schedule.lanes)}"]
    return [*cells, f"{ideal * 1e3:.1f}", f"{taken * 1e3:.1f}", f"{ideal / taken:.3f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--devices", type=int, default=4, help="how many emulated ones")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    streams: Streams = OneAfterAnother()
    said = "on the CPU, one action after another"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("there is no GPU; --device cpu tries the script without")
        try:
            from cuda.bindings import driver
        except ImportError:
            parser.error("cuda-bindings is not installed: pip install -e '.[bench]'")
        green = GreenStreams(options.devices, driver)
        streams, said = green, f"with {green.multiprocessors} multiprocessors for each device"
    else:
        torch.set_num_threads(1)
    shape = options.devices, options.chunks
    rows = [
        row_of(f"{name}", make_schedule(name, *shape, per_device), options, streams)
        for name, per_device in OURS
    ]
    rows += [row_of(name, torch_order(name, *shape), options, streams) for name in TORCH]
    columns = ["ideal, ms", "measured, ms", "ideal / measured"]
    print_table(["order", "devices", "stages per device", *columns], rows)
    print_footer(f"An emulation of {options.devices} GPUs on one, {said}; see the script.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
