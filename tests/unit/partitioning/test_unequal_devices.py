"""Pipelines over devices of unequal speed and memory: a slow or small one gets fewer layers."""

import re
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LayerCost, Plan, StageOwners, every_cut, plan
from hybridtrain.schedule import Durations, make_schedule, peak_in_flight, place_of

GIB = 2**30


def planned(layers, devices, **options):
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in layers))
    owners = StageOwners.of_cpus(devices)
    return plan(
        net,
        PipelineOptions(**{"chunks": 4, "split": "time"} | options),
        torch.ones(4, 1),
        owners,
        costs=lambda _, __: layers,
    )


def layer(index, forward_ms=1.0, weight_gib=1.0):
    return LayerCost(str(index), 1, forward_ms, 2 * forward_ms, int(weight_gib * GIB))


def equal_layers(number):
    return [layer(index) for index in range(number)]


PLACEMENTS = [
    {},
    {"stages_per_device": 2},
    {"stages_per_device": 2, "schedule": "zb-v"},
    {"stages_per_device": 2, "schedule": "v-half"},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: p.get("schedule", str(len(p))))
@pytest.mark.parametrize("split", ["uniform", "size", "time"])
def test_a_device_gets_layers_in_proportion_to_its_speed(split, placement):
    found = planned(equal_layers(24), 2, split=split, device_speeds=[1, 2], **placement)
    options = PipelineOptions(**placement)
    layers = [0, 0]
    for stage, count in enumerate(found.counts):
        layers[place_of(stage, 2, options.placement)] += count
    assert layers == [8, 16]
    times = [stage.forward_ms + stage.backward_ms for stage in found.stage_costs()]
    assert times == pytest.approx([times[0]] * len(times))


@pytest.mark.parametrize("placement", PLACEMENTS[:3], ids=lambda p: p.get("schedule", str(len(p))))
def test_a_split_by_memory_fills_devices_in_proportion_to_their_memory(placement):
    found = planned(equal_layers(24), 2, split="memory", memory_limit_gib=[10, 30], **placement)
    layers = [0, 0]
    for stage, count in enumerate(found.counts):
        layers[place_of(stage, 2, PipelineOptions(**placement).placement)] += count
    assert layers == [6, 18]


def test_a_fast_device_with_little_memory_gets_what_it_can_hold():
    assert planned(equal_layers(12), 2, device_speeds=[2, 1]).counts == [8, 4]
    limited = planned(equal_layers(12), 2, device_speeds=[2, 1], memory_limit_gib=[5, 15])
    assert limited.counts == [5, 7]


@st.composite
def chains(draw):
    times = draw(st.lists(st.integers(1, 9), min_size=2, max_size=8))
    devices = draw(st.integers(2, min(4, len(times))))
    speeds = draw(st.lists(st.integers(1, 4), min_size=devices, max_size=devices))
    sizes = draw(st.lists(st.integers(1, 9), min_size=len(times), max_size=len(times)))
    limits = draw(st.none() | st.lists(st.integers(4, 40), min_size=devices, max_size=devices))
    return times, sizes, speeds, limits


@given(chains())
def test_no_cut_over_unequal_devices_has_a_shorter_slowest_stage(chain):
    times, sizes, speeds, limits = chain
    layers = [layer(i, *pair) for i, pair in enumerate(zip(times, sizes, strict=True))]

    def of_stages(values, counts):
        return [sum(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]

    def slowest(counts):
        return max(t / v for t, v in zip(of_stages(times, counts), speeds, strict=True))

    def fits(counts):
        held = of_stages(sizes, counts)
        return limits is None or all(a <= b for a, b in zip(held, limits, strict=True))

    cuts = list(filter(fits, every_cut(len(times), len(speeds))))
    options = {"device_speeds": speeds, "memory_limit_gib": limits}
    if not cuts:
        with pytest.raises(SplitError, match="memory_limit_gib"):
            planned(layers, len(speeds), **options)
        return
    counts = planned(layers, len(speeds), **options).counts
    assert fits(counts)
    assert slowest(counts) == pytest.approx(min(map(slowest, cuts)))


def test_the_planned_cut_is_the_fastest_in_the_simulation_and_an_even_one_half_slower():
    def step_ms(counts):
        layers = [n / speed for n, speed in zip(counts, (1, 2), strict=True)]
        return Durations.of(layers, [2 * n for n in layers]).length(make_schedule("1f1b", 2, 64))

    counts = planned(equal_layers(12), 2, device_speeds=[1, 2]).counts
    assert step_ms(counts) == min(map(step_ms, every_cut(12, 2)))
    assert step_ms([6, 6]) / step_ms(counts) == pytest.approx(1.5, abs=0.02)


def test_a_plan_file_keeps_the_speeds_and_shows_them(tmp_path):
    found = planned(equal_layers(12), 2, device_speeds=[2, 3])
    found.write(tmp_path / "plan.yaml")
    again = Plan.read(tmp_path / "plan.yaml")
    assert again == found
    assert again.speeds == [1, 1.5]
    header, first, second = str(found).splitlines()[:3]
    assert "speed" in header
    assert " 1.5 " in second
    assert " 1.5 " not in first
    reused = planned(equal_layers(12), 2, split=str(tmp_path / "plan.yaml"))
    assert reused.speeds == [1, 1.5]


def test_equal_devices_have_no_speeds_in_their_plan():
    assert "speed" not in planned(equal_layers(4), 2).to_yaml()
    assert "speed" not in str(planned(equal_layers(4), 2))


@pytest.mark.parametrize("key", ["device_speeds", "memory_limit_gib"])
@pytest.mark.parametrize(
    "values", [[1, 0], [1, -2], [1, float("nan")], [], ["fast", 1], [True, 1]], ids=str
)
def test_values_of_devices_must_be_positive_numbers(key, values):
    with pytest.raises(ConfigError, match=key):
        PipelineOptions(**{key: values})


@pytest.mark.parametrize("key", ["device_speeds", "memory_limit_gib"])
def test_there_is_one_value_per_device(key):
    with pytest.raises(ConfigError, match=f"{key}.*3 values.*2 devices.*nb_part"):
        planned(equal_layers(8), 2, **{key: [1, 2, 3]})


def test_one_speed_is_no_list():
    with pytest.raises(ConfigError, match="device_speeds=2"):
        PipelineOptions(device_speeds=2)
    with pytest.raises(ConfigError, match=r"device_speeds=.*fast.*auto"):
        PipelineOptions(device_speeds="fast")
    with pytest.raises(ConfigError, match=r"memory_limit_gib=0.*memory_limit_gib=None"):
        PipelineOptions(memory_limit_gib=0)


def test_the_error_for_too_little_memory_gives_a_list_that_is_enough():
    with pytest.raises(SplitError) as caught:
        planned(equal_layers(12), 2, memory_limit_gib=[3, 5])
    message = str(caught.value)
    assert "memory_limit_gib=[3, 5]" in message
    enough = re.search(r"to \[([\d.]+) GiB, ([\d.]+) GiB\]", message)
    limits = [float(number) for number in enough.groups()]
    assert limits == pytest.approx([4.8, 8], abs=0.01)
    assert planned(equal_layers(12), 2, memory_limit_gib=limits).counts == [4, 8]


def test_micro_batches_in_flight_count_on_each_device():
    layers = [
        LayerCost(str(i), 1, 1.0, 2.0, weight_bytes=GIB, activation_bytes=GIB) for i in range(6)
    ]
    found = planned(layers, 2, memory_limit_gib=[7, 9])
    assert peak_in_flight(make_schedule("1f1b", 2, 4)) == (2, 1)
    assert found.counts == [2, 4]
