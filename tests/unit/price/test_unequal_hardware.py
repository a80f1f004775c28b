"""The price and the search on devices of unequal speed and memory."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain._base.hardware import Hardware
from hybridtrain.cli.config.schema import Config, HardwareConfig, PipelineConfig, WorldConfig
from hybridtrain.cli.run.hardware import arrangement_of_run, hardware_of_run
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.launch import Launch
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LayerCost, LayerSize, every_cut, given_costs
from hybridtrain.price import Choices, StepWork, arrangements, find_layouts
from hybridtrain.price.layout import layouts
from hybridtrain.price.price import price
from hybridtrain.world import World

MIB = 2**20


def table_of(times, nbytes=MIB, weights=4 * MIB):
    def costs_at(samples):
        return [
            LayerCost(str(i), 1, ms * samples, 2 * ms * samples, 0, nbytes * samples)
            for i, ms in enumerate(times)
        ]

    return given_costs(costs_at, [LayerSize(weights, weights) for _ in times])


def node(**values):
    """Returns a node whose links and host cost next to nothing."""
    fast = {"node_bytes_per_s": 1e15, "node_latency_s": 0.0, "action_s": 0.0, "message_s": 0.0}
    libraries = {"library_gib": 0.0, "library_gib_per_stage": 0.0}
    return Hardware(**{"memory_gib": 1.0, "reserved_gib": 0.0, **libraries, **fast, **values})


def pipeline(chunks=16, **choices):
    fixed = {"engine": ["local"], "schedule": ["1f1b"], "stages_per_device": [1]}
    return Choices(**fixed, chunks=[chunks], recompute=["never"], shard=["none"], **choices)


def test_a_slow_device_gets_fewer_layers():
    hardware = node(devices_per_node=2, device_speeds=[1, 2])
    (best,) = find_layouts(
        table_of([1.0] * 12), hardware, StepWork(64), pipeline(64, nb_part=[2]), best=1
    )
    assert best.counts == (4, 8)
    equal = replace(hardware, device_speeds=None)
    layout = best.layout
    even = price(table_of([1.0] * 12), hardware, StepWork(64), layout, (6, 6))
    assert even.compute_ms == pytest.approx(1.5 * best.compute_ms)
    assert find_layouts(
        table_of([1.0] * 12), equal, StepWork(64), pipeline(64, nb_part=[2]), best=1
    )[0].counts == (6, 6)


def test_a_small_device_gets_fewer_layers():
    # each layer has 8 MiB of weights and gradients, 8 of state and some activations
    hardware = node(devices_per_node=2, device_memory_gib=[0.08, 0.24])
    work, choices = StepWork(16), pipeline(nb_part=[2])
    (best,) = find_layouts(table_of([1.0] * 12), hardware, work, choices, best=1)
    assert best.counts[0] < 6
    for memory, gib in zip(best.memory, (0.08, 0.24), strict=True):
        assert memory.total <= gib * 2**30
    with pytest.raises(SplitError, match="no plan fits"):
        find_layouts(
            table_of([1.0] * 12),
            replace(hardware, device_memory_gib=[0.08, 0.12]),
            work,
            choices,
            best=1,
        )


def test_a_slow_replica_gets_fewer_samples():
    hardware = node(devices_per_node=2, device_speeds=[1, 2])
    (best,) = find_layouts(
        table_of([1.0] * 4), hardware, StepWork(12), pipeline(4, nb_part=[1]), best=1
    )
    assert best.layout.arrangement.replica_shares == (1, 2)
    # 8 of 12 samples, at twice the speed: 4 layers of 3 ms a sample
    assert best.compute_ms == pytest.approx(8 * 4 * 3 / 2)


def test_fast_and_slow_devices_share_a_pipeline_or_have_their_own():
    hardware = node(devices_per_node=4, device_speeds=[2, 2, 1, 1], device_memory_gib=[3, 3, 1, 1])
    in_order, in_turns = arrangements(hardware, 2, 2)
    assert in_order.device_speeds == (2, 2)
    assert in_order.replica_shares == (2, 1)
    assert in_order.device_memory_gib == (1, 1)
    assert in_turns.device_speeds == (2, 1)
    assert in_turns.replica_shares == ()
    assert in_turns.device_memory_gib == (3, 1)
    assert in_turns.device_order == (0, 2, 1, 3)


def test_a_search_prices_only_the_given_shares():
    hardware = node(devices_per_node=2)
    shares = partial(arrangements, shares=[1, 7])
    choices = replace(pipeline(2, nb_part=[1]), arrange=shares)
    (best,) = find_layouts(table_of([1.0] * 4), hardware, StepWork(16), choices, best=1)
    # 14 of 16 samples, of 4 layers that take 3 ms each
    assert best.compute_ms == pytest.approx(14 * 4 * 3)


def test_equal_devices_have_one_arrangement():
    (equal,) = arrangements(node(devices_per_node=4), 2, 2)
    assert equal == type(equal)()


def test_lists_of_equal_values_are_the_rates_and_the_memory_of_every_device():
    rates = {"flops_per_s": {"fp32": 1e13}, "memory_bytes_per_s": 1e12}
    lists = {"device_memory_gib": [80, 80], "device_speeds": [2, 2]}
    found = Hardware(devices_per_node=2, memory_gib=0.5, **rates, **lists)
    twice = {"flops_per_s": {"fp32": 2e13}, "memory_bytes_per_s": 2e12}
    assert found == Hardware(devices_per_node=2, memory_gib=80, **twice)
    assert found.mean_speed == 1


def arrangement_of(processes, nb_part, world=None, **pipeline):
    """Returns devices, speeds and GiB by place, on a node with two fast and two slow GPUs."""
    hardware = HardwareConfig(
        devices_per_node=4,
        memory_gib=48.0,
        reserved_gib=0.0,
        device_speeds=[2, 2, 1, 1],
        device_memory_gib=[48, 48, 16, 16],
    )
    config = Config(
        hardware=hardware, world=WorldConfig(**world or {}), pipeline=PipelineConfig(**pipeline)
    )
    group = config.world
    worlds = [
        World.of_launch(
            Launch("torchrun", rank, processes, rank, processes, None),
            4, nb_part, group.devices, "gloo", group.engine, group.inner,
        )
        for rank in range(processes)
    ]  # fmt: skip
    world, width = worlds[0], len(worlds[0].devices)
    devices = [worlds[world.rank_of(0, place // width)] for place in range(nb_part)]
    names = [str(each.devices[place % width]) for place, each in enumerate(devices)]
    found = hardware_of_run(config, world.devices[0], processes * width)
    arrangement = arrangement_of_run(found, world)
    usable = [nbytes / 2**30 for nbytes in arrangement.usable_bytes(found, nb_part)]
    return names, arrangement.device_speeds or (1,) * nb_part, tuple(usable)


@pytest.mark.parametrize(
    ("processes", "nb_part", "world", "names", "speeds", "memory"),
    [
        (1, 2, {"devices": ["cuda:0", "cuda:2"]}, ["cuda:0", "cuda:2"], (2, 1), (48, 16)),
        (1, 2, {"devices": ["cuda:2", "cuda:3"]}, ["cuda:2", "cuda:3"], (1, 1), (16, 16)),
        (1, 1, {"devices": "cuda:2"}, ["cuda:2"], (1,), (16,)),
        (2, 2, {"devices": [0, 2, 1, 3]}, ["cuda:0", "cuda:2"], (2, 1), (48, 16)),
        (2, 2, {"devices": "cuda"}, ["cuda:0", "cuda:1"], (1, 1), (16, 16)),
        (4, 2, {"engine": "distributed", "inner": "dp", "devices": "cuda"},
         ["cuda:0", "cuda:2"], (2, 1), (48, 16)),
    ],
    ids=["in turns", "the small ones", "one", "two processes", "in order", "inner=dp"],
)  # fmt: skip
def test_a_run_is_priced_on_the_devices_that_it_uses(
    processes, nb_part, world, names, speeds, memory
):
    assert arrangement_of(processes, nb_part, world) == (names, speeds, memory)


def test_a_list_of_a_pipeline_is_by_place_for_either_order_of_ranks():
    for inner in ("pp", "dp"):
        world = {"engine": "distributed", "inner": inner, "devices": "cuda"}
        found = arrangement_of(4, 2, world, device_speeds=[1, 3], memory_limit_gib=[5, 9])
        assert found[1:] == ((1, 3), (5, 9))


def test_a_limit_per_device_follows_the_placement_of_each_schedule():
    options = PipelineOptions(
        split="time", chunks=4, stages_per_device=2, memory_limit_gib=[1.0, 3.0]
    )
    hardware = node(devices_per_node=2, memory_gib=8.0)
    choices = Choices(
        nb_part=[2], engine=["local"], chunks=[4], schedule=["zb-v"], stages_per_device=[2],
        recompute=["never"], options=options,
    )  # fmt: skip
    # the first and the last of the four stages are on device 0
    table = table_of([1.0] * 16, weights=40 * MIB)
    (best,) = find_layouts(table, hardware, StepWork(4), choices, best=1)
    assert best.layout.devices == (0, 1, 1, 0)
    first, second, third, last = best.counts
    assert max(first, last) < min(second, third)


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=6),
    st.lists(st.sampled_from([1, 2, 3]), min_size=2, max_size=2),
)
@settings(max_examples=25)
def test_no_cut_of_a_small_model_is_faster_than_the_plan(times, speeds):
    table, work = table_of([*map(float, times)]), StepWork(8)
    hardware = node(devices_per_node=2, device_speeds=speeds)
    choices = pipeline(8, nb_part=[2])
    (best,) = find_layouts(table, hardware, work, choices, best=1)
    (layout,) = layouts(hardware, work, len(times), choices)
    prices = [price(table, hardware, work, layout, cut) for cut in every_cut(len(times), 2)]
    assert best.step_ms == pytest.approx(min(each.step_ms for each in prices))


@pytest.mark.parametrize("key", ["device_speeds", "device_memory_gib"])
@pytest.mark.parametrize("values", [[1], [1, 0], [1, -1], "fast", [1, "fast"]], ids=str)
def test_a_node_has_a_positive_number_for_each_device(key, values):
    with pytest.raises(ConfigError, match=f"hardware.{key}"):
        Hardware(devices_per_node=2, memory_gib=4, **{key: values})
