"""Steps that the host limits, compared with what one H200 took (docs/benchmarks.md, "On a GPU")."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridtrain._base.hardware import Hardware
from hybridtrain.partitioning import observed_chain
from hybridtrain.price import ParallelLayout, StepWork, predict_step

# rates and `operator_s` by measure-machine of 0.2.0; `action_s` is the default
H200 = Hardware(
    devices_per_node=8,
    flops_per_s={"fp32": 48e12},
    memory_bytes_per_s=4.09e12,
    operator_s=8.5e-6,
    microbatch_s=2.7e-4,  # from the row of one stage
)
CHUNKS = 32
# us per stage and micro-batch of nn.Linear(4, 4) per stage, GPipe and 1F1B
MEASURED_US = {1: (564, 570), 2: (429, 513), 4: (310, 323), 8: (316, 344)}


def predicted(hardware, layout, gpus=()):
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layout.stages)]), torch.ones(1, 4)
    layers, counts = observed_chain(net, x).layers, [1] * layout.stages
    return predict_step(layers, counts, x, hardware, StepWork(CHUNKS), layout, gpus=gpus)


@pytest.mark.parametrize("stages", MEASURED_US)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_hosts_time_of_small_stages_is_predicted_within_a_fifth(stages, schedule):
    layout = ParallelLayout(stages, chunks=CHUNKS, schedule=schedule)
    prediction = predicted(H200, layout, gpus=[0] * stages)
    us = prediction.step_ms * 1e3 / (stages * CHUNKS)
    assert us == pytest.approx(sum(MEASURED_US[stages]) / 2, rel=0.2)
    assert prediction.host_bound


@pytest.mark.parametrize(("engine", "processes"), [("local", 1), ("distributed", 4)])
def test_each_process_has_its_own_host_time_of_a_micro_batch(engine, processes):
    hardware = replace(H200, operator_s=0.0, action_s=0.0, message_s=0.0, microbatch_s=0.1)
    found = predicted(hardware, ParallelLayout(4, chunks=CHUNKS, engine=engine))
    # the first micro-batch passes the other processes, which begin it after one another
    assert found.step_ms == pytest.approx(100 * (CHUNKS + processes - 1), rel=0.01)
