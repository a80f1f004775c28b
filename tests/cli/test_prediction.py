"""The prediction of a run: what it says, and what it says where it knows too little."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cli_runs import succeed
from support.launch import SMALL

from hybridtrain._base.hardware import Hardware
from hybridtrain.cli.run.prediction import beside_measured, prediction_in_words
from hybridtrain.loss import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LayerCost, LossOfStep, priced_mode, recompute_policy
from hybridtrain.price import ParallelLayout, Prediction, StepWork, predict_step, why_not_priced
from hybridtrain.schedule import make_schedule, peak_in_flight
from hybridtrain.world import World

LAYOUT = ParallelLayout(2, chunks=4)


@pytest.fixture(scope="module")
def model():
    return HybridModel(gpt(64, 8, n_layer=4, d_model=16), World.from_env(2, "cpu"), chunks=4)


def predicted(model, hardware, measured=None, gpus=()):
    microbatch = torch.zeros(2, 8, dtype=torch.long)
    counts, work = [len(stage) for stage in model.planned.stages], StepWork(8)
    layers = model.planned.layers
    return predict_step(layers, counts, microbatch, hardware, work, LAYOUT, measured, gpus=gpus)


def test_measured_costs_are_simulated_as_they_are(model):
    costs = [
        LayerCost(name, 1, 3.0 / len(stage), 6.0 / len(stage))
        for stage in model.plan.layer_names
        for name in stage
    ]
    hardware = Hardware(device="cpu", devices_per_node=2, action_s=0.0, memory_bytes_per_s=1e18)
    found = predicted(model, hardware, costs)
    assert found.step_ms == pytest.approx((4 + 1) * (3.0 + 6.0), rel=1e-6)
    assert found.bubble == pytest.approx(1 / 5)
    assert found.costs_from == "measured"
    assert found.reason is None


def test_the_memory_of_a_step_is_predicted_where_the_speed_is_not_known(model):
    found = predicted(model, Hardware(device="cpu", devices_per_node=2))
    assert found.step_ms is None
    assert found.bubble is None
    assert "hybridtrain measure-machine" in found.reason
    tokens = torch.zeros(8, 8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    model.train_step(tokens, None, lambda output, _: output.float().mean())
    optimizer.step()
    counted = [stage["peak_memory_bytes"] for stage in model.stage_summaries(optimizer)]
    assert found.memory_bytes == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "recompute", "offload"),
    [
        ("gpipe", "always", "none"),
        ("1f1b", "except_last", "none"),
        ("gpipe", {"every": 2}, "none"),
        ("gpipe", "always", "inputs"),
        ("gpipe", "never", "all"),
    ],
)
@pytest.mark.quick_cases(1)
def test_the_memory_of_recomputed_and_offloaded_layers_is_predicted(schedule, recompute, offload):
    torch.manual_seed(0)
    chunks, tokens = 4, torch.randint(64, (8, 32))
    options = PipelineOptions(
        chunks=chunks, schedule=schedule, recompute=recompute, offload=offload
    )
    net = gpt(64, 32, n_layer=6, d_model=64, n_head=2)
    model = HybridModel(net, World.from_env(2, "cpu"), options, self_check=False)
    names = [layer.name for layer in model.planned.layers]
    found = predict_step(
        model.planned.layers,
        model.plan.counts,
        tokens[:2],
        Hardware(device="cpu", devices_per_node=2),
        StepWork(len(tokens)),
        ParallelLayout(
            2, chunks=chunks, schedule=schedule, recompute=priced_mode(recompute), offload=offload
        ),
        loss=LossOfStep(cross_entropy, tokens[:2]),
        recomputed=recompute_policy(recompute, names).layers,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model.train_step(tokens, tokens, cross_entropy)
    optimizer.step()
    measured = [stage["peak_memory_bytes"] for stage in model.stage_summaries(optimizer)]
    # samples of the batch and storages below 4 KiB stay, which the prediction moves
    assert found.memory_bytes == pytest.approx(measured, rel=0.01 if offload == "none" else 0.1)
    # what the options are about: activations without weights, gradients and optimizer state
    fixed = [4 * sum(p.numel() for p in s.module.parameters()) * 4 for s in model.stages]
    activations = [
        [whole - weights for whole, weights in zip(sizes, fixed, strict=True)]
        for sizes in (found.memory_bytes, measured)
    ]
    assert activations[0] == pytest.approx(activations[1], rel=0.05 if offload == "none" else 0.25)


def test_stages_that_share_a_gpu_add_up_their_time_and_memory(model):
    costs = [
        LayerCost(name, 1, 3.0 / len(stage), 6.0 / len(stage))
        for stage in model.plan.layer_names
        for name in stage
    ]
    hardware = Hardware(
        devices_per_node=2, action_s=0.0, memory_bytes_per_s=1e18, node_latency_s=0.0,
        library_gib=0.25, library_gib_per_stage=0.5,
    )  # fmt: skip
    apart, together = (predicted(model, hardware, costs, gpus) for gpus in ([0, 1], [0, 0]))
    assert apart.step_ms == pytest.approx((4 + 1) * (3.0 + 6.0), rel=1e-3)
    assert together.step_ms == pytest.approx(2 * 4 * (3.0 + 6.0), rel=1e-3)
    assert apart.bubble is not None
    assert together.bubble is None
    # the thread for backwards is there once
    expected = sum(apart.memory_bytes) - 2**28
    assert together.memory_bytes == (expected, expected)


def test_a_machine_of_known_speed_gives_a_time_without_a_measurement(model):
    hardware = Hardware(device="cpu", devices_per_node=2, flops_per_s={"fp32": 1e9})
    slow, fast = (
        predicted(model, replace(hardware, flops_per_s={"fp32": rate})) for rate in (1e8, 1e9)
    )
    assert slow.step_ms > fast.step_ms > 0
    assert slow.costs_from == "estimated"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"compile": True}, "compile=True"),
        ({"attention": "math"}, "attention=math"),
        ({"attention": "flash"}, None),
        ({"max_inflight": 2}, "max_inflight=2"),
        ({"recompute": {"every": 2}}, None),
        ({"recompute": "always"}, None),
    ],
)
def test_what_the_price_leaves_out_is_the_reason_for_no_prediction(settings, told):
    reason = why_not_priced(PipelineOptions(**settings))
    assert reason is None if told is None else reason.startswith(told)


def test_the_memory_of_a_process_with_several_logical_replicas_is_predicted(tmp_path, capfd):
    keys = ["pipeline.schedule=gpipe", "trainer.steps=1"]
    found = {}
    for replicas in (1, 2):
        run = [f"world.replicas={replicas}", f"run_name=of_{replicas}"]
        succeed(capfd, "train", *SMALL, "pipeline.nb_part=2", *keys, *run)
        summary = json.loads((tmp_path / f"outputs/of_{replicas}/summary.json").read_text())
        found[replicas] = [summary[kind]["memory_bytes"] for kind in ("predicted", "measured")]
        assert found[replicas][0] == pytest.approx(found[replicas][1], rel=0.1)
    # as many samples are in flight, and the gradients of the first one wait for the second's
    assert all(two > one for one, two in zip(found[1][1], found[2][1], strict=True))


def test_auto_prices_logical_replicas_as_the_run_that_it_chooses_is_predicted(tmp_path, capfd):
    keys = [key for key in SMALL if "chunks" not in key]
    keys += ["pipeline.nb_part=2", "trainer.steps=1", "world.replicas=2"]
    keys += ["hardware=h100", "hardware.device=cpu", "pipeline.schedule=auto"]
    keys += ["world.engine=local", "pipeline.split=uniform"]
    said = succeed(capfd, "train", *keys)
    (chosen,) = [line for line in said.splitlines() if "predicted from estimated costs" in line]
    step_ms = float(chosen.partition(" ms per step")[0].rpartition(" ")[2])
    summary = json.loads((tmp_path / "outputs/digits/summary.json").read_text())
    assert summary["predicted"]["step_ms"] == pytest.approx(step_ms, rel=0.05)


def summary_of(peaks, nb_part, device_memory):
    return {
        "step_ms": {"p50": 13.0},
        "bubble_fraction": 0.3,
        "world": {"nb_part": nb_part},
        "stages": [{"peak_memory_bytes": peak} for peak in peaks],
        "device_memory": device_memory,
    }


@pytest.mark.parametrize(("gpus", "peaks"), [({}, [4, 6]), ({"cuda:0": {}}, [3, 4])])
def test_the_measured_memory_of_a_device_is_that_of_all_its_stages(gpus, peaks):
    summary = summary_of([1, 2, 3, 4], 2, gpus)
    compared = beside_measured(Prediction(), summary, make_schedule("1f1b", 2, 4, 2))
    assert compared["measured"]["memory_bytes"] == peaks


def test_the_stages_of_a_device_are_not_added_at_their_own_peaks():
    table = make_schedule("v-half", 4, 8, 2)
    held = peak_in_flight(table)
    summary = summary_of([100 + n for n in held], 4, {})
    for stage in summary["stages"]:
        stage["microbatch_bytes"] = 1
    measured = beside_measured(Prediction(), summary, table)["measured"]["memory_bytes"]
    assert measured == [200 + 6] * 4
    assert max(held[d] + held[7 - d] for d in range(4)) > 6


def test_the_last_line_has_predicted_beside_measured():
    summary = summary_of([1024, 2048], 2, {})
    whole = Prediction(12.3, 0.25, (1024, 3072), "measured")
    table = make_schedule("1f1b", 2, 4)
    assert prediction_in_words(**beside_measured(whole, summary, table)) == (
        "predicted 12.3 ms, measured 13.0 ms per step; idle 25% predicted, 30% measured; "
        "memory of device 1: 3.0 KiB predicted, 2.0 KiB measured; from measured costs"
    )
    limited = prediction_in_words(
        **beside_measured(Prediction(12.3, host_bound=True), summary, table)
    )
    assert limited == "predicted 12.3 ms, limited by the host, measured 13.0 ms per step"
    nothing = Prediction(reason="compile=true is not priced")
    assert prediction_in_words(**beside_measured(nothing, summary, table)) == (
        "no prediction: compile=true is not priced"
    )
