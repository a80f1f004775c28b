"""The command `measure-machine`: measures this machine once, for predictions of step time."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from hybridtrain import HybridModel, World
from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.files import write_atomically
from hybridtrain._base.hardware import GIB, Hardware, host_memory
from hybridtrain.cli.commands.check import refuse_launcher
from hybridtrain.cli.config.option_files import THIS_MACHINE, measured_file
from hybridtrain.errors import ConfigError
from hybridtrain.partitioning import count_layers, observed_chain

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The compute capability from which NVIDIA GPUs have instructions for bf16; older ones emulate it.
_BF16_FROM = (8, 0)

_SECONDS = 3.0  # the duration of each measurement

_MOST_RUNS = 50

# The rates of copies between a device and its host.
_COPIES = ("to_host_bytes_per_s", "from_host_bytes_per_s", "both_ways_bytes_per_s")

# The layers that time the host: small, and enough that the time of starting does not count.
_WIDTH = 16
_LAYERS = 16

# The stages and micro-batches that time the host's part in a schedule.
_STAGES, _CHUNKS = 4, 16


def measure_machine(words: Sequence[str] = ()) -> int:
    """Measures this machine and writes the file of `hardware=this-machine`; returns the exit code.

    The rates are achieved rates, so the efficiency keys are 1. A single machine cannot measure
    links between nodes: `hardware.network_bytes_per_s=` sets them.

    Args:
        words: the words of the command line; only `seconds=` is allowed.

    Raises:
        ConfigError: there are other words on the command line, the file is not writable, or this is
            one of several processes, which would share what it measures.
    """
    refuse_launcher("measure-machine")
    seconds = _SECONDS
    for word in words:
        number = re.fullmatch(r"seconds=(\d+\.?\d*|\.\d+)", word)
        if number is None:
            raise ConfigError(
                f"measure-machine accepts only seconds= (the duration of each measurement), not "
                f"{word!r}"
            )
        seconds = float(number[1])
    rates = measured(seconds)
    Hardware(**{name: value for name, value in rates.items() if name != "costs"})  # checks it
    path = measured_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = f"# {platform.node()}, torch {torch.__version__}: measured by measure-machine\n"
        write_atomically(path, header + yaml.safe_dump(rates, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; set XDG_CACHE_HOME") from error
    print(path.read_text(encoding="utf-8"), end="")
    print(f"# written to {path}; to use it: hybridtrain plan hardware={THIS_MACHINE} ...")
    return 0


def measured(seconds: float = _SECONDS) -> dict[str, Any]:
    """Returns the keys of `hardware` for this machine; without GPUs, each CPU core is a device.

    It measures one GPU of each kind; the rates are the first one's.
    """
    gpus = torch.cuda.device_count()
    kinds = [torch.cuda.get_device_name(index) for index in range(gpus)]
    of_kind = {
        kind: measured_device(torch.device("cuda", kinds.index(kind)), seconds)
        for kind in dict.fromkeys(kinds)
    }
    unequal = {}
    if len(of_kind) > 1:
        precisions = _precisions_in_hardware([kinds.index(kind) for kind in of_kind])
        unequal = _unequal([of_kind[kind] for kind in kinds], precisions)
    first = of_kind[kinds[0]] if gpus else measured_device(torch.device("cpu"), seconds)
    return {
        "costs": "measured",
        "device": "cuda" if gpus else "cpu",
        "nodes": 1,
        "devices_per_node": gpus or os.cpu_count() or 1,
        "memory_gib": first["memory_gib"],
        **unequal,
        "reserved_gib": 1.0 if gpus else 0.0,
        "flops_per_s": first["flops_per_s"],
        "flops_reached": 1.0,
        "memory_bytes_per_s": first["memory_bytes_per_s"],
        "bandwidth_reached": 1.0,
        **{
            link: min(device[link] for device in of_kind.values() or [first])
            for link in ("node_bytes_per_s", *_COPIES)
        },
        "operator_s": first["operator_s"],
        "backward_operator_s": first["backward_operator_s"],
        "action_s": first["action_s"],
        "microbatch_s": first["microbatch_s"],
        "library_gib": max(device["library_gib"] for device in of_kind.values() or [first]),
        "library_gib_per_stage": max(
            device["library_gib_per_stage"] for device in of_kind.values() or [first]
        ),
    }


def _precisions_in_hardware(gpus: Sequence[int]) -> set[str]:
    """Returns the precisions that none of these GPUs emulates."""
    lacks_bf16 = torch.version.hip is None and any(
        torch.cuda.get_device_capability(index) < _BF16_FROM for index in gpus
    )
    return set(_PRECISIONS) - ({"bf16"} if lacks_bf16 else set())


def _unequal(
    devices: Sequence[Mapping[str, Any]], precisions: Collection[str]
) -> dict[str, list[float]]:
    """Returns the relative speed and the memory of each device.

    The speed is the geometric mean over these precisions and the memory bandwidth, because each of
    them limits some parts of a model's layers.
    """

    def ratio(device: Mapping[str, Any]) -> float:
        first = devices[0]
        flops = [
            rate / first["flops_per_s"][name]
            for name, rate in device["flops_per_s"].items()
            if name in precisions
        ]
        bandwidth = device["memory_bytes_per_s"] / first["memory_bytes_per_s"]
        return geometric_mean([geometric_mean(flops), bandwidth])

    return {
        "device_speeds": [round(ratio(device), 2) for device in devices],
        "device_memory_gib": [device["memory_gib"] for device in devices],
    }


def measured_device(device: torch.device, seconds: float) -> dict[str, Any]:
    """Returns the rates, memory and link of a device, keyed as in `hardware`."""
    is_gpu = device.type == "cuda"
    libraries = [0, 0]
    if is_gpu:  # first, because a library keeps the memory of the threads that have used it
        libraries = library_bytes(device, partial(torch.cuda.memory_allocated, device))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if is_gpu else 1)
    try:
        size = 4096 if is_gpu else 512
        flops = {}
        for name, dtype in _PRECISIONS.items():
            if not is_gpu and name == "fp16":
                continue  # a hundred times slower on CPUs without instructions for it
            matrix = torch.ones(size, size, dtype=dtype, device=device)
            product = partial(torch.mm, matrix, matrix)
            flops[name] = 2 * size**3 / _seconds(product, device, seconds)
        block = torch.zeros((2**30 if is_gpu else 2**26) // 4, device=device)
        copy = _seconds(lambda: block.clone(), device, seconds)
        copies = copy_rates(device, (2**28 if is_gpu else 2**26), seconds)
        operator, backward_operator = host_seconds_per_operator(device, seconds)
        action, microbatch = host_seconds_of_schedule(device, seconds, operator, backward_operator)
        link = 2 * block.nbytes / copy / 2
        if is_gpu:
            memory = torch.cuda.mem_get_info(device)[1]
            if (gpus := torch.cuda.device_count()) > 1:
                other = torch.device("cuda", (device.index + 1) % gpus)
                link = block.nbytes / _seconds(lambda: block.to(other), device, seconds)
        else:
            memory = host_memory() // max(1, os.cpu_count() or 1)
    finally:
        torch.set_num_threads(threads)
    return {
        "memory_gib": round(memory / GIB, 2),
        "flops_per_s": {name: float(f"{rate:.3g}") for name, rate in flops.items()},
        "memory_bytes_per_s": float(f"{2 * block.nbytes / copy:.3g}"),
        "node_bytes_per_s": float(f"{link:.3g}"),
        **{name: float(f"{rate:.3g}") for name, rate in zip(_COPIES, copies, strict=True)},
        "operator_s": float(f"{operator:.3g}"),
        "backward_operator_s": float(f"{backward_operator:.3g}"),
        "action_s": float(f"{action:.3g}"),
        "microbatch_s": float(f"{microbatch:.3g}"),
        "library_gib": float(f"{libraries[0] / GIB:.3g}"),
        "library_gib_per_stage": float(f"{libraries[1] / GIB:.3g}"),
    }


def copy_rates(device: torch.device, nbytes: int, seconds: float) -> tuple[float, float, float]:
    """Returns the bytes per second that `pipeline.offload` copies to the host, back, and both ways.

    The last is the rate in each direction while both run. A GPU copies to and from pinned memory,
    in a stream for each direction. For a CPU device another buffer is the host's memory, and what
    comes back gets new memory.

    Args:
        device: the device.
        nbytes: the bytes of a copy.
        seconds: how long to measure each.
    """
    accelerator = accelerator_of(device)
    leaves = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if accelerator is None:
        host = torch.zeros_like(leaves)
        away, back = partial(host.copy_, leaves), host.clone
        with ThreadPoolExecutor(2) as threads:

            def both() -> None:
                for copy in [threads.submit(away), threads.submit(leaves.clone)]:
                    copy.result()

            times = [_seconds(run, device, seconds) for run in (away, back, both)]
    else:
        returns = torch.zeros_like(leaves)
        pairs = (
            (accelerator.host_memory(nbytes), leaves),
            (returns, accelerator.host_memory(nbytes)),
        )
        streams = [accelerator.new_stream(device) for _ in pairs]

        def copy(*ways: int) -> None:
            for way in ways:
                with accelerator.using([streams[way]]):
                    accelerator.copy_into(*pairs[way])
            accelerator.synchronize(device)

        accelerator.synchronize(device)
        times = [_seconds(partial(copy, *ways), device, seconds) for ways in ((0,), (1,), (0, 1))]
    there, here, both_ways = (nbytes / time for time in times)
    return there, here, both_ways


def _small_layers() -> nn.Sequential:
    """Returns layers that cost a device next to nothing, as many as it takes to time the host."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU())
            for _ in range(_LAYERS)
        )
    )


def host_seconds_per_operator(device: torch.device, seconds: float) -> tuple[float, float]:
    """Returns the host's seconds per operator of a forward with autograd, and of its backward.

    They include the Python of the modules. The operators are counted as predictions count them.
    """
    net = _small_layers()
    inputs = torch.ones(1, _WIDTH)
    counted = count_layers(observed_chain(net, inputs).layers, inputs, "fp32")
    net, inputs = net.to(device), inputs.to(device)
    forwards: list[float] = []
    backwards: list[float] = []

    def step() -> None:
        start = perf_counter()
        output = net(inputs)
        middle = perf_counter()
        torch.autograd.grad(output, list(net.parameters()), torch.ones_like(output))
        forwards.append(middle - start)
        backwards.append(perf_counter() - middle)

    _seconds(step, device, seconds)
    return (
        median(forwards[1:]) / sum(layer.forward.operators for layer in counted),
        median(backwards[1:]) / sum(layer.backward.operators for layer in counted),
    )


def host_seconds_of_schedule(
    device: torch.device, seconds: float, operator_s: float, backward_operator_s: float
) -> tuple[float, float]:
    """Returns the host's seconds per action and per micro-batch, without their operators.

    The same small layers run in one stage and in several on this device. The difference is the time
    of the actions that are added; the rest, without the operators, is the time of a micro-batch.

    Args:
        device: the device.
        seconds: the duration of each of the two measurements.
        operator_s: what `host_seconds_per_operator` has returned for forwards.
        backward_operator_s: the same for backwards.
    """
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_STAGES)]
    inputs = torch.ones(_CHUNKS, _WIDTH)
    counted = count_layers(observed_chain(nn.Sequential(*layers), inputs[:1]).layers, inputs[:1],
                           "fp32")  # fmt: skip
    operators = sum(
        layer.forward.operators * operator_s + layer.backward.operators * backward_operator_s
        for layer in counted
    )
    found = []
    for stages in (1, _STAGES):
        net, world = nn.Sequential(*layers), World(devices=(device,) * stages)
        model = HybridModel(net, world, chunks=_CHUNKS, self_check=False)
        step = partial(model.train_step, inputs, None, _mean)
        found.append(_seconds(step, device, seconds) / _CHUNKS)
    one, several = found
    action = max(0.0, several - one) / (2 * (_STAGES - 1))
    return action, max(0.0, one - operators - 2 * action)


def _mean(output: Tensor, _: None) -> Tensor:
    return output.mean()


def library_bytes(device: torch.device, allocated: Callable[[], int]) -> list[int]:
    """Returns the bytes that libraries keep for the backwards of a device, and for a thread.

    A library such as cuBLAS allocates a workspace for each thread that computes. PyTorch runs the
    backwards of all threads in one thread per GPU, so the first thread adds both workspaces and a
    second one adds its own. Call it before anything else uses the device.

    Args:
        device: the device.
        allocated: returns the bytes that the allocator of the device has given out.
    """
    net, inputs = _small_layers().to(device), torch.ones(1, _WIDTH, device=device)

    def step() -> int:
        with torch.enable_grad():
            output = net(inputs)
            torch.autograd.grad(output, list(net.parameters()), torch.ones_like(output))
        del output
        return allocated()

    before = allocated()
    # both threads live to the end, or the second would inherit the workspace of the first
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        both = first.submit(step).result() - before
        of_thread = second.submit(step).result() - before - both
    return [max(0, both - of_thread), of_thread]


def _seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Returns the median time of a call, after one warm-up call."""
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 2 or (len(times) <= _MOST_RUNS and perf_counter() - begin < budget):
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return median(times[1:])
