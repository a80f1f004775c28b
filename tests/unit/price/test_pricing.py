"""Prices and the search: what they promise for any machine, checked on random ones."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import combinations, cycle, islice, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from support.schedules import BUILT_IN

from hybridtrain._base.hardware import Hardware
from hybridtrain.cli.config.schema import HardwareConfig
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.models import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    LayerCost,
    LayerSize,
    Objective,
    Plan,
    StageOwners,
    counted_costs,
    cut_by_costs,
    given_costs,
    observed_chain,
    plan,
)
from hybridtrain.partitioning.estimates import Rates, count_work
from hybridtrain.price import Choices, ParallelLayout, StepWork, find_layouts, find_plans
from hybridtrain.price.bounds import least_step_ms
from hybridtrain.price.layout import layouts
from hybridtrain.price.price import price, simulated_step
from hybridtrain.price.search import ALIKE, _Search
from hybridtrain.price.stage_needs import device_memory, most_in_flight, stage_times
from hybridtrain.schedule import (
    Durations,
    divided_backwards,
    make_schedule,
    peak_in_flight,
    registered,
    simulate,
)

# Other tests register schedules, some for a few devices only.
EVERY = Choices(schedule=BUILT_IN)
CPU = Hardware(device="cpu")

few = settings(max_examples=8, suppress_health_check=list(HealthCheck))
MIB = 2**20


def table_of(times, nbytes=MIB, weights=4 * MIB, uneven=(1.0,)):
    """Costs of layers; `uneven` are factors of their bytes, taken in turn."""
    factors = list(islice(cycle(uneven), len(times)))

    def costs_at(samples):
        return [
            LayerCost(
                f"{i}",
                1000,
                ms * samples,
                2 * ms * samples,
                0,
                activation_bytes=round(factor * nbytes) * samples,
                crossing_bytes=round(nbytes / factor) * samples,
            )
            for i, (ms, factor) in enumerate(zip(times, factors, strict=True))
        ]

    sizes = [LayerSize(round(factor * weights), round(factor * weights)) for factor in factors]
    return given_costs(costs_at, sizes)


@st.composite
def problems(draw):
    times = draw(st.lists(st.floats(0.1, 3), min_size=2, max_size=5))
    hardware = Hardware(
        nodes=draw(st.sampled_from([1, 2])),
        devices_per_node=draw(st.sampled_from([1, 2, 4])),
        memory_gib=draw(st.floats(0.02, 0.2)),
        reserved_gib=0.0,
        library_gib=0.0,
        library_gib_per_stage=draw(st.sampled_from([0.0, 0.01])),
        memory_bytes_per_s=1e12,
        node_bytes_per_s=draw(st.floats(1e8, 1e11)),
        network_bytes_per_s=draw(st.floats(1e8, 1e11)),
        action_s=draw(st.sampled_from([0.0, 1e-4])),
    )
    uneven = draw(st.lists(st.sampled_from([0.2, 1.0, 3.0]), min_size=1, max_size=5))
    calls_ms = draw(st.sampled_from([0.0, 1.0, 10.0]))
    table = replace(table_of(times, uneven=uneven), host_ms=[(calls_ms, 2 * calls_ms)] * len(times))
    return table, hardware, StepWork(8)


@st.composite
def cuts(draw, layers, stages):
    """Numbers of layers of each stage, as somebody may write them into a plan."""
    places = st.integers(1, layers - 1)
    bounds = draw(st.lists(places, min_size=stages - 1, max_size=stages - 1, unique=True))
    return [b - a for a, b in pairwise([0, *sorted(bounds), layers])]


def fastest(table, hardware, job, choices=None):
    """Returns the first plan; where none fits, ends the example."""
    try:
        return find_layouts(table, hardware, job, choices or EVERY, best=1)[0]
    except SplitError:
        reject()


@few
@given(problems())
def test_no_plan_is_over_the_memory_of_a_device(problem):
    table, hardware, job = problem
    try:
        found = find_layouts(table, hardware, job, EVERY)
    except SplitError:
        return
    for one in found:
        assert sum(one.counts) == len(table.sizes)
        assert max(m.total for m in one.memory) <= hardware.usable_bytes


@few
@given(problems())
def test_no_other_layout_that_fits_is_faster_and_the_first_is_as_fast(problem):
    table, hardware, job = problem
    search = _Search(table, hardware, job)
    cuts = [(one, cut) for one in layouts(hardware, job, 2, EVERY) for cut in search.cuts(one)]
    prices = [
        price(search._table_of(one, cut), hardware, job, one, cut).step_ms for one, cut in cuts
    ]
    if not prices:
        return
    found = find_layouts(table, hardware, job, EVERY)
    steps = [one.step_ms for one in found]
    assert steps[1:] == sorted(steps[1:])
    assert min(steps) <= min(prices) * (1 + 1e-9)
    assert steps[0] <= ALIKE * min(steps) * (1 + 1e-9)


@few
@given(problems(), st.data())
def test_the_first_plan_is_as_fast_as_any_that_is_given_layer_by_layer(problem, data):
    table, hardware, job = problem
    found = fastest(table, hardware, job)
    every = layouts(hardware, job, len(table.sizes), EVERY)
    for _ in range(20):
        layout = data.draw(st.sampled_from(every))
        counts = data.draw(cuts(len(table.sizes), layout.stages))
        one = price(table, hardware, job, layout, counts)
        if one.peak_bytes <= hardware.usable_bytes:
            assert found.step_ms <= ALIKE * one.step_ms * (1 + 1e-9)


@pytest.mark.parametrize(
    ("times", "uneven", "memory_gib"),
    [
        ([2.0, 2.0, 2.0], [3.0, 0.2, 3.0], 0.08),  # a cut that sends little
        ([1.0, 1.0, 0.5, 2.0], [1.0, 0.2, 3.0, 0.2], 0.15),
        ([1.0, 2.0, 2.0, 3.0, 1.0], [3.0, 0.2, 3.0, 1.0, 0.2], 0.08),  # interleaved stages
    ],
)
def test_a_small_model_is_cut_in_the_fastest_of_all_ways(times, uneven, memory_gib):
    table, job = table_of(times, uneven=uneven), StepWork(4)
    hardware = Hardware(
        devices_per_node=2,
        memory_gib=memory_gib,
        reserved_gib=0.0,
        library_gib=0.0,
        library_gib_per_stage=0.0,
        node_bytes_per_s=1e9,
        action_s=0.0,
    )
    steps = []
    for layout in layouts(hardware, job, len(times), EVERY):
        for bounds in combinations(range(1, len(times)), layout.stages - 1):
            counts = [b - a for a, b in pairwise((0, *bounds, len(times)))]
            one = price(table, hardware, job, layout, counts)
            if one.peak_bytes <= hardware.usable_bytes:
                steps.append(one.step_ms)
    found = find_layouts(table, hardware, job, EVERY)
    assert found[0].step_ms == pytest.approx(min(steps))
    assert len({one.layout for one in found}) == len(found)


@pytest.mark.parametrize("seed", [3, 22, 45, 50])
def test_a_layout_with_many_cuts_is_no_slower_than_with_the_most_even_one(seed):
    draw = random.Random(seed)
    times = [float(draw.randint(1, 6)) for _ in range(12)]
    nbytes = [draw.choice([1, 5, 20]) * MIB for _ in range(12)]

    def costs_at(samples):
        return [
            LayerCost(
                str(i),
                forward_ms=ms * samples,
                backward_ms=2 * ms * samples,
                crossing_bytes=size * samples,
            )
            for i, (ms, size) in enumerate(zip(times, nbytes, strict=True))
        ]

    table, job = given_costs(costs_at), StepWork(4)
    hardware = Hardware(devices_per_node=4, memory_gib=80, node_bytes_per_s=1e9, action_s=0.0)
    layout = ParallelLayout(4, 1, "distributed", 4, "zb-v", 2)
    choices = Choices(
        nb_part=[4],
        engine=["distributed"],
        chunks=[4],
        schedule=["zb-v"],
        stages_per_device=[2],
        recompute=["never"],
    )
    even = cut_by_costs(costs_at(1), [1] * 8, Objective())
    best = find_layouts(table, hardware, job, choices)[0]
    assert best.layout == layout
    assert best.step_ms <= price(table, hardware, job, layout, even).step_ms * (1 + 1e-9)


@few
@given(problems(), st.data())
def test_what_is_fixed_never_makes_the_best_step_faster(problem, data):
    table, hardware, job = problem
    free = fastest(table, hardware, job)
    one = data.draw(st.sampled_from(layouts(hardware, job, len(table.sizes), EVERY)))
    names = ("nb_part", "engine", "chunks", "schedule", "stages_per_device", "recompute", "shard")
    fixed = replace(
        EVERY, **{name: [getattr(one, name)] for name in names if data.draw(st.booleans())}
    )
    found = fastest(table, hardware, job, fixed)
    # the first plan is the simplest of those that are about as fast as the fastest
    assert free.step_ms <= ALIKE * found.step_ms * (1 + 1e-9)


@few
@given(problems(), st.floats(1.1, 10))
def test_the_best_step_is_not_slower_over_a_faster_link(problem, factor):
    table, hardware, job = problem
    steps = []
    for link in (None, "node_bytes_per_s", "network_bytes_per_s"):
        faster = {link: factor * getattr(hardware, link)} if link else {}
        steps.append(fastest(table, replace(hardware, **faster), job).step_ms)
    assert max(steps[1:]) <= steps[0] * (1 + 1e-9)


@few
@given(problems(), st.floats(1.1, 10))
def test_a_step_is_not_slower_over_faster_links(problem, factor):
    table, hardware, job = problem
    faster = replace(
        hardware,
        node_bytes_per_s=factor * hardware.node_bytes_per_s,
        network_bytes_per_s=factor * hardware.network_bytes_per_s,
    )
    search = _Search(table, hardware, job)
    for one in layouts(hardware, job, len(table.sizes), EVERY)[::7]:
        for cut in search.cuts(one):
            steps = [price(table, m, job, one, cut).step_ms for m in (hardware, faster)]
            assert steps[1] <= steps[0] * (1 + 1e-9)


@few
@given(problems())
def test_no_simulated_step_is_faster_than_the_bound(problem):
    table, hardware, job = problem
    search = _Search(table, hardware, job)
    for one in layouts(hardware, job, len(table.sizes), EVERY)[::5]:
        for cut in search.cuts(one):
            times = stage_times(table, hardware, job, one, cut)
            bound = least_step_ms(job, one, times, 0.0)
            assert search.bound(one) <= bound * (1 + 1e-9)
            assert bound <= price(table, hardware, job, one, cut).step_ms * (1 + 1e-9)


@pytest.mark.parametrize(("engine", "processes"), [("local", 1), ("distributed", 2)])
def test_a_layout_that_the_host_makes_slow_is_known_to_be_slow_before_it_is_cut(engine, processes):
    table = replace(table_of([0.001] * 4), host_ms=[(1.0, 2.0)] * 4)
    layout = ParallelLayout(2, chunks=8, engine=engine)
    bound = _Search(table, Hardware(devices_per_node=2), StepWork(8)).bound(layout)
    assert bound >= 8 * 4 * 3.0 / processes


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("nb_part", "chunks", "v"), [(2, 3, 1), (4, 64, 2), (4, 24, 4), (3, 60, 2), (4, 35, 3)]
)
def test_micro_batches_in_flight_are_those_of_the_whole_schedule(schedule, nb_part, chunks, v):
    one = ParallelLayout(nb_part, chunks=chunks, schedule=schedule, stages_per_device=v)
    assert most_in_flight(one) == peak_in_flight(make_schedule(schedule, nb_part, chunks, v))


@pytest.mark.parametrize(("nb_part", "chunks"), [(1, 3), (2, 3), (4, 24), (3, 40)])
@pytest.mark.parametrize(("schedule", "v"), [("zb-h1", 1), ("zb-v", 2)])
def test_micro_batches_in_flight_of_split_backwards_are_counted_in_full(
    schedule, v, nb_part, chunks
):
    one = ParallelLayout(nb_part, chunks=chunks, schedule=schedule, stages_per_device=v)
    assert most_in_flight(one) == peak_in_flight(make_schedule(schedule, nb_part, chunks, v))


def chosen_schedule(table, **hardware):
    """The schedule of the fastest plan for 4 devices and 8 micro-batches."""
    choices = replace(EVERY, nb_part=[4], chunks=[8], engine=["local"], recompute=["never"])
    hardware = Hardware(devices_per_node=4, memory_gib=64, node_bytes_per_s=1e15, **hardware)
    return find_layouts(table, hardware, StepWork(8), choices)[0].layout.schedule


def test_backwards_are_split_where_devices_compute_and_not_where_the_host_is_the_limit():
    table = table_of([3.0] * 8)
    assert registered(chosen_schedule(table)).splits_backward
    assert chosen_schedule(replace(table, host_ms=[(6.0, 9.0)] * 8)) in ("1f1b", "gpipe")


def test_what_is_recomputed_is_priced_as_a_whole_backward():
    table, hardware = table_of([1.0] * 8), Hardware(devices_per_node=4, node_bytes_per_s=1e15)
    one = ParallelLayout(4, chunks=8, schedule="zb-h1", recompute="always")
    steps = [price(table, hardware, StepWork(8), replace(one, schedule=name), [2] * 4).step_ms
             for name in ("zb-h1", "1f1b")]  # fmt: skip
    assert steps[0] == pytest.approx(steps[1])
    never = replace(one, recompute="never")
    assert price(table, hardware, StepWork(8), never, [2] * 4).step_ms < 0.75 * steps[0]


@pytest.mark.parametrize("chunks", [8, 16, 400])
def test_only_the_backwards_that_a_schedule_divides_are_priced_as_divided(chunks):
    table, cut = replace(table_of([0.01] * 8), host_ms=[(1.0, 1.0)] * 8), [1] * 8
    hardware = Hardware(devices_per_node=4, node_bytes_per_s=1e15, action_s=0.0)
    layout = ParallelLayout(4, 1, "local", chunks, "zb-v", 2, "never")
    divided = sum(divided_backwards(make_schedule("zb-v", 4, chunks, 2)))
    # the host is the limit: 8 layers of 2 ms for each micro-batch, and 1.5 ms for each divided one
    found = price(table, hardware, StepWork(chunks), layout, cut)
    assert found.pipeline_ms == pytest.approx(16 * chunks + 1.5 * divided, rel=1e-6)


def test_a_backward_in_two_parts_takes_longer_on_a_cpu():
    table, job, layout = (
        table_of([4.0] * 4),
        StepWork(8),
        ParallelLayout(4, chunks=8, schedule="zb-h1"),
    )
    cpu, gpu = (stage_times(table, Hardware(devices_per_node=4, device=device, action_s=0.0), job,
                            layout, [1] * 4) for device in ("cpu", "cuda"))  # fmt: skip
    assert gpu.in_parts == gpu.backward == cpu.backward
    # the first stage's is whole
    assert cpu.in_parts == pytest.approx([8.0, 8.8, 8.8, 8.8])


def test_the_devices_of_a_v_have_the_memory_of_both_their_stages():
    table = table_of([1.0] * 8, weights=MIB)
    sizes = [LayerSize(weights * MIB, 0) for weights in (1, 2, 4, 8, 16, 32, 64, 128)]
    one = ParallelLayout(2, chunks=4, schedule="zb-v", stages_per_device=2)
    memory = device_memory(replace(table, sizes=sizes), CPU, StepWork(4), one, [2] * 4)
    assert [each.weights // MIB for each in memory] == [1 + 2 + 64 + 128, 4 + 8 + 16 + 32]


@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.quick_cases(1)
def test_a_long_schedule_is_priced_as_if_it_was_simulated_as_a_whole(v):
    times = [1.0, 1.3, 0.7, 1.1, 1.0, 0.9, 1.2, 1.0]
    table, hardware = table_of(times), Hardware(devices_per_node=4, action_s=0.0)
    one = ParallelLayout(4, chunks=1536, stages_per_device=v, engine="distributed")
    cut = [8 // (4 * v)] * 4 * v
    job = StepWork(1536)
    stages = stage_times(table, hardware, job, one, cut)
    schedule = make_schedule("1f1b", 4, one.chunks, v)
    spans = simulate(schedule, stages.forward, stages.backward, stages.transfer)
    whole = max(lane[-1].end for lane in spans)
    assert price(table, hardware, job, one, cut).pipeline_ms == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(("devices", "chunks"), [(3, 601), (4, 1001)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.quick_cases(2)
def test_a_long_schedule_with_slow_messages_takes_as_long_as_the_whole(schedule, devices, chunks):
    times = [1.0, 1.2, 0.9, 1.1][:devices]
    # the last device but one, which holds two micro-batches, waits longest
    messages = [0.1] * (devices - 2) + [12.5]
    durations = Durations.of(times, [2 * one for one in times], messages)
    found = simulated_step(ParallelLayout(devices, chunks=chunks, schedule=schedule), durations)
    whole = durations.length(make_schedule(schedule, devices, chunks))
    assert found.length == pytest.approx(whole, rel=1e-6)


def test_a_message_delays_its_receiver_alone():
    schedule = make_schedule("gpipe", 2, 2)
    spans = simulate(schedule, [1, 1], [1, 1], [10])
    assert [span.start for span in spans[0]] == [0, 1, 24, 25]
    assert [span.start for span in spans[1]] == [11, 12, 13, 14]


def test_devices_that_slow_each_other_down_do_so_while_both_are_busy():
    table = replace(table_of([1.0, 1.0]), contention_at=lambda samples: 2.0)
    layout = ParallelLayout(2, chunks=2, schedule="gpipe")
    hardware = Hardware(device="cpu", devices_per_node=2, action_s=0.0)
    found = price(table, hardware, StepWork(2), layout, [1, 1])
    alone = price(
        replace(table, contention_at=lambda _: 1.0), hardware, StepWork(2), layout, [1, 1]
    )
    assert alone.pipeline_ms == 2 + 1 + 4 + 2  # both compute for 3 of these
    assert alone.bubble == pytest.approx(6 / 18)
    assert found.pipeline_ms == pytest.approx(9 + 3)
    assert found.bubble == pytest.approx(6 / 24)
    whole = price(table, hardware, StepWork(2), ParallelLayout(1, chunks=2), [2])
    assert whole.pipeline_ms == pytest.approx(12)


@pytest.mark.parametrize(
    ("device", "engine", "more"),
    [("cpu", "local", 0.1), ("cpu", "distributed", 0.3), ("cuda", "distributed", 0.0)],
)
def test_the_host_adds_its_time_to_a_cpu_and_hides_behind_a_gpu(device, engine, more):
    hardware = Hardware(device=device, devices_per_node=3, action_s=1e-4, message_s=1e-4)
    layout = ParallelLayout(3, chunks=3, engine=engine)
    times = stage_times(table_of([1.0] * 3), hardware, StepWork(3), layout, [1, 1, 1])
    assert times.forward[1] == pytest.approx(1.0 + more)
    assert times.backward[1] == pytest.approx(2.0 + more)
    ends = 0.2 if engine == "distributed" else 0.1  # a stage at an end has one neighbour
    assert times.host[0] == pytest.approx(2 * ends)


def test_shards_take_less_memory_and_recomputation_too():
    table, job = table_of([1.0] * 4, weights=100 * MIB), StepWork(16)
    base = ParallelLayout(2, 4, chunks=2)

    def total(**changes):
        return device_memory(table, CPU, job, replace(base, **changes), [2, 2])[0].total

    assert total() - total(shard="optimizer") == 2 * 2 * 100 * MIB * 3 // 4
    assert total(recompute="always") < total()


def test_a_gpu_keeps_memory_for_libraries_and_a_cpu_does_not():
    table, layout = table_of([1.0] * 4), ParallelLayout(2, chunks=2)
    kept = {"library_gib": 0.25, "library_gib_per_stage": 0.5}
    gpu, cpu = (
        device_memory(table, Hardware(device=device, **kept), StepWork(4), layout, [2, 2])
        for device in ("cuda", "cpu")
    )
    for on_gpu, on_cpu in zip(gpu, cpu, strict=True):
        assert on_gpu.total - on_cpu.total == on_gpu.libraries == 768 * MIB
        assert on_cpu.libraries == 0


def test_an_old_description_of_a_machine_has_no_host_time_of_backwards_and_default_libraries():
    old = Hardware(operator_s=3e-6, flops_per_s={"fp32": 1e12})
    rates = Rates.of(old, "fp32", tf32=False)
    assert rates.operator_ms == rates.backward_operator_ms == pytest.approx(3e-3)
    assert old.library_bytes == 64 * MIB


@pytest.mark.parametrize("value", [-1e-6, "fast", True + 0j])
def test_the_host_time_of_a_backward_is_a_number(value):
    with pytest.raises(ConfigError, match=r"hardware\.backward_operator_s"):
        Hardware(backward_operator_s=value)


@pytest.mark.parametrize(("host_ms", "limit"), [(4.0, "host"), (0.1, "compute")])
def test_a_step_takes_as_long_as_the_host_or_the_device(host_ms, limit):
    table = replace(table_of([1.0] * 4), host_ms=[(host_ms, 2 * host_ms)] * 4)
    hardware = Hardware(action_s=0.0, node_bytes_per_s=1e15, memory_bytes_per_s=1e18)
    priced = price(table, hardware, StepWork(4), ParallelLayout(chunks=4), [4])
    device_ms = priced.compute_ms
    assert priced.binds == limit
    assert priced.step_ms == pytest.approx(max(device_ms, 4 * 4 * 3 * host_ms))
    assert priced.host_ms == pytest.approx(priced.step_ms - device_ms, abs=1e-3)


@pytest.mark.thorough
def test_equal_layers_are_counted_as_if_each_was_run():
    net = gpt(64, 8, n_layer=3, n_head=2, d_model=16, dropout=0.1)
    net.blocks[1].attention.n_head = 4  # not to be seen in a parameter's shape
    tokens = torch.randint(64, (3, 8))
    layers = observed_chain(net, tokens).layers
    whole = count_work(layers, tokens)
    alone = [
        count_work([layer], torch.randn(3, 8, 16).requires_grad_())[0] for layer in layers[1:4]
    ]
    assert [one.forward for one in whole[1:4]] == [one.forward for one in alone]
    for one, other in zip(whole[1:4], alone, strict=True):
        # the gradient that comes from the layer after it is alive, too
        handed_on = one.backward.peak_bytes - other.backward.peak_bytes
        assert handed_on in (0, 3 * 8 * 16 * 4)
        assert replace(one.backward, peak_bytes=0) == replace(other.backward, peak_bytes=0)
    assert whole[1].forward == whole[3].forward
    assert whole[1].cost.activation_bytes == whole[3].cost.activation_bytes
    assert whole[1].cost.activation_bytes != whole[2].cost.activation_bytes


@pytest.mark.thorough
def test_counted_costs_are_those_of_any_number_of_samples():
    net, hardware = gpt(64, 8, n_layer=1, d_model=16), Hardware(flops_per_s={"fp32": 1e9})
    tokens = torch.randint(64, (6, 8))
    chain = observed_chain(net, tokens)
    small, large = (counted_costs(chain, tokens[:n], hardware, "fp32") for n in (2, 6))
    for one, other in zip(small.costs_at(12), large.costs_at(12), strict=True):
        assert one.forward_ms == pytest.approx(other.forward_ms)
        assert one.activation_bytes == pytest.approx(other.activation_bytes)


def test_a_run_takes_the_plan_that_was_found(tmp_path):
    net, tokens = gpt(64, 8, n_layer=6, d_model=16), torch.randint(64, (8, 8))
    hardware = Hardware(nodes=1, devices_per_node=2, flops_per_s={"fp32": 1e12})
    plans = find_plans(net, tokens, hardware, StepWork(8), choices=Choices(nb_part=[2]))
    path = tmp_path / "plan.yaml"
    plans.plan().write(path)
    assert Plan.read(path).counts == list(plans.prices[0].counts)
    layout = plans.prices[0].layout
    options = PipelineOptions(
        chunks=layout.chunks, stages_per_device=layout.stages_per_device, split=str(path)
    )
    assert plan(net, options, tokens, StageOwners.of_cpus(2)).counts == list(plans.prices[0].counts)
    assert "step ms" in str(plans)


def test_nothing_that_fits_is_one_line_with_what_is_missing():
    hardware = Hardware(devices_per_node=2, memory_gib=0.01, reserved_gib=0.0)
    with pytest.raises(SplitError, match=r"no plan fits: .*device \d, [\d.]+ MiB"):
        find_layouts(table_of([1.0] * 4, weights=10 * MIB), hardware, StepWork(8))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nodes": 0}, "hardware.nodes=0"),
        ({"device": "tpu"}, "hardware.device=tpu"),
        ({"flops_reached": 1.5}, "hardware.flops_reached=1.5"),
        ({"node_bytes_per_s": 0.0}, "hardware.node_bytes_per_s=0"),
        ({"memory_gib": float("nan")}, "hardware.memory_gib=nan"),
        ({"memory_gib": 1.0, "reserved_gib": 2.0}, "hardware.reserved_gib=2"),
        ({"flops_per_s": {"fp32": -1}}, "hardware.flops_per_s.fp32=-1"),
    ],
)
def test_a_machine_that_cannot_be_is_an_error_that_names_the_key(values, told):
    with pytest.raises(ConfigError, match=told):
        Hardware(**values)


def test_a_precision_without_a_rate_is_an_error():
    with pytest.raises(ConfigError, match=r"no rate for bf16 .*fp32"):
        Hardware(flops_per_s={"fp32": 1e12}).sustained_flops("bf16")


def test_devices_that_no_layout_can_use_are_an_error():
    with pytest.raises(ConfigError, match="no layout uses all 5 devices"):
        find_layouts(table_of([1.0] * 2), Hardware(devices_per_node=5), StepWork(8))


def test_the_config_has_every_key_of_a_machine():
    names = [each.name for each in fields(HardwareConfig)]
    assert names == ["costs", *(each.name for each in fields(Hardware))]
    shared = {name: getattr(HardwareConfig(), name) for name in names[1:]}
    assert Hardware(**shared) == Hardware()
