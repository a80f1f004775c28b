"""`measure-machine`: the host's time per operator, the memory of libraries, kinds of GPUs."""

import threading

import pytest
import torch
from support.stand_in_gpus import DeviceTensor, StandInGPUs, stand_in_gpus
from torch.nn import functional as F

from hybridtrain._base.hardware import Hardware
from hybridtrain.cli.commands import measure_machine

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def library(monkeypatch):
    """Stands in for cuBLAS: a workspace of 32 MiB for each thread that computes a product."""
    threads = set()
    linear = F.linear

    def with_workspace(*args):
        threads.add(threading.get_ident())
        return linear(*args)

    monkeypatch.setattr(F, "linear", with_workspace)
    return threads


@pytest.mark.parametrize("backward_mib", [0, 32])
def test_the_workspace_of_a_thread_is_told_from_that_of_backwards(library, backward_mib):
    # on a GPU, the first backward begins a thread of its own; on the CPU it does not
    def allocated():
        return (32 * len(library) + backward_mib * bool(library)) * MIB

    assert measure_machine.library_bytes(CPU, allocated) == [backward_mib * MIB, 32 * MIB]
    assert len(library) == 2


def test_the_host_time_of_an_operator_includes_its_backward():
    forward, backward = measure_machine.host_seconds_per_operator(CPU, seconds=0.0)
    assert 0 < forward < 1
    assert 0 < backward < 1


def test_the_measured_keys_describe_hardware_and_libraries_of_a_cpu_keep_nothing():
    rates = measure_machine.measured_device(CPU, seconds=0.0)
    assert rates["library_gib"] == rates["library_gib_per_stage"] == 0.0
    assert {"operator_s", "backward_operator_s"} <= rates.keys()
    assert min(rates["action_s"], rates["microbatch_s"]) >= 0
    copies = {"to_host_bytes_per_s", "from_host_bytes_per_s", "both_ways_bytes_per_s"}
    assert all(rates[name] > 0 for name in copies)
    assert Hardware(**{name: rates[name] for name in copies}).host_copies is not None


def test_the_copies_of_a_gpu_are_measured_in_both_directions_alone_and_together():
    ran = []

    class Noting(StandInGPUs):
        def copy_into(self, target, source):
            stream = self.current_stream((target if real(target) else source).device)
            ran.append(("in" if real(target) else "out", stream, target.numel()))
            super().copy_into(target, source)

    def real(tensor):
        return isinstance(tensor, DeviceTensor)

    with stand_in_gpus(1) as gpus:
        gpus.__class__ = Noting
        rates = measure_machine.copy_rates(gpus.devices[0], MIB, seconds=0.0)
    assert len(rates) == 3
    assert all(rate > 0 for rate in rates)
    ways = [way for way, _, _ in ran]
    assert ways == ["out"] * 2 + ["in"] * 2 + ["out", "in"] * 2
    assert len({stream for _, stream, _ in ran}) == 2, "one for each direction"
    assert {nbytes for *_, nbytes in ran} == {MIB}


def test_the_hosts_part_in_a_schedule_is_told_from_operators_and_micro_batches(monkeypatch):
    # seconds of a step of 16 micro-batches: 5 ms for each in one stage, 6 actions more in four
    step_s = iter([16 * 5e-3, 16 * (5e-3 + 6 * 1e-3)])
    monkeypatch.setattr(measure_machine, "_seconds", lambda *_: next(step_s))
    action, microbatch = measure_machine.host_seconds_of_schedule(CPU, 0.0, 1e-5, 2e-5)
    assert action == pytest.approx(1e-3)
    # four Linear layers: 2 operators of a forward, 6 of the first backward, 10 of the others
    operators = 8 * 1e-5 + 36 * 2e-5
    assert microbatch == pytest.approx(5e-3 - operators - 2 * 1e-3)


def test_measure_machine_measures_one_device_of_each_kind(monkeypatch):
    kinds = ["V100", "A100", "A100", "V100"]
    found = {"V100": (1e14, 1e12, 16.0), "A100": (4e14, 4e12, 40.0)}
    measured = []

    def measured_device(device, seconds):
        measured.append(device.index)
        flops, bandwidth, memory = found[kinds[device.index]]
        return {
            "memory_gib": memory,
            # one of the two emulates bf16
            "flops_per_s": {"fp16": flops, "bf16": 1e13 if memory == 16 else flops},
            "memory_bytes_per_s": bandwidth,
            "node_bytes_per_s": 1e10 * (1 + device.index),
            "operator_s": 1e-5,
            "backward_operator_s": 8e-6,
            "action_s": 1e-4,
            "microbatch_s": 2e-4,
            "library_gib": 0.01,
            "to_host_bytes_per_s": 2e10 / (1 + device.index),
            "from_host_bytes_per_s": 3e10,
            "both_ways_bytes_per_s": 1e10,
            "library_gib_per_stage": memory / 1000,
        }

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_name", kinds.__getitem__)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: (7 if kinds[index] == "V100" else 8, 0)
    )
    monkeypatch.setattr(measure_machine, "measured_device", measured_device)
    written = measure_machine.measured(0.0)
    assert measured == [0, 1]
    assert written["device_speeds"] == [1, 4, 4, 1]
    assert written["device_memory_gib"] == [16, 40, 40, 16]
    del written["costs"]
    hardware = Hardware(**written)
    assert hardware.speed_of(1) == 4
    assert hardware.node_bytes_per_s == 1e10
    assert hardware.host_copies == (1e10, 3e10, 1e10), "the slowest of all kinds"
    assert hardware.library_gib_per_stage == 0.04, "the most of all kinds"

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "V100")
    assert "device_speeds" not in measure_machine.measured(0.0)
