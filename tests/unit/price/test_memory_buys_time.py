"""The fastest combination that fits: what a device holds, what is chosen, and what is said."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.schedules import BUILT_IN

from hybridtrain._base.hardware import Hardware
from hybridtrain.errors import ConfigError
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LayerCost, LayerSize, given_costs, whole_stages
from hybridtrain.price import (
    Choices,
    DoesNotFit,
    ParallelLayout,
    StepWork,
    choice_in_words,
    find_layouts,
    offload_in_words,
    proposed,
)
from hybridtrain.price.layout import layouts
from hybridtrain.price.price import price
from hybridtrain.price.stage_needs import WAITING, device_memory
from hybridtrain.schedule import (
    Action,
    Schedule,
    make_schedule,
    peak_in_flight,
    register_table,
    registered,
    schedule,
)

MIB = 2**20
MODES = ("never", "except_last", "always")
TIMES, KEPT, SENT = (2.0, 3.0, 1.0, 2.5), (5, 1, 8, 3), (3, 1, 2, 1)


def table_of(times=TIMES, kept=KEPT, sent=SENT, weights=1):
    """Costs of uneven layers: milliseconds of a forward, and MiB that it keeps and sends."""

    def costs_at(samples):
        return [
            LayerCost(
                str(i),
                forward_ms=ms * samples,
                backward_ms=2 * ms * samples,
                activation_bytes=kept[i] * MIB * samples,
                crossing_bytes=sent[i] * MIB * samples,
                temporary_bytes=(2 + i) * MIB,
            )
            for i, ms in enumerate(times)
        ]

    return given_costs(costs_at, [LayerSize(weights * MIB, weights * MIB)] * len(times))


CPU = Hardware(device="cpu")


def machine(memory_gib=1.0):
    return Hardware(
        library_gib=0.0,
        library_gib_per_stage=0.0,
        devices_per_node=2,
        memory_gib=memory_gib,
        reserved_gib=0.0,
        node_bytes_per_s=1e11,
        action_s=0.0,
    )


# ---------------------------------------------------------------- what a device holds


def peaks_by_hand(layout, stored, received, temporary):
    """The bytes of each device between two layers and in one, action after action.

    `stored` and `temporary` are by whether the layers are recomputed, and then by stage.
    """
    lanes = make_schedule(layout.schedule, layout.nb_part, layout.chunks, layout.stages_per_device)
    again = whole_stages(layout.recompute, layout.chunks)
    found = []
    for lane in lanes.lanes:
        held: dict[tuple[str, int, int], float] = {}
        between = inside = 0.0
        for kind, stage, i in lane:
            divided = kind in "IW" and layout.splits_backwards
            if kind == "W" and not divided:
                continue
            if kind == "F":
                held["input", stage, i] = received[stage]
                held["activations", stage, i] = stored[i in again][stage]
            if kind == "I" and divided:
                held["waiting", stage, i] = WAITING * stored[False][stage]
            between = max(between, sum(held.values()))
            inside = max(inside, sum(held.values()) + temporary[i in again][stage])
            if kind == "W" or (kind in "BI" and not divided):
                for what in ("input", "activations", "waiting"):
                    held.pop((what, stage, i), None)
        found.append((between, inside))
    return found


@examples(20, 60)
@given(
    st.sampled_from(BUILT_IN),
    st.sampled_from(MODES),
    st.integers(1, 5),
    st.integers(1, 24),
    st.lists(st.integers(0, 50), min_size=30, max_size=30),
)
def test_a_device_is_priced_with_the_peak_of_what_its_stages_hold_together(
    name, recompute, devices, chunks, numbers
):
    v = registered(name).stages_per_device or 2
    layout = ParallelLayout(
        devices, chunks=chunks, schedule=name, stages_per_device=v, recompute=recompute
    )
    stages = devices * v
    kept, sent, temporary = (numbers[i * 10 : i * 10 + stages] for i in range(3))
    costs = [
        LayerCost(str(i), activation_bytes=a, crossing_bytes=c, temporary_bytes=t)
        for i, (a, c, t) in enumerate(zip(kept, sent, temporary, strict=True))
    ]
    table = given_costs(lambda _: costs, [LayerSize(0, 0)] * stages)
    memory = device_memory(table, CPU, StepWork(chunks), layout, [1] * stages)
    # of a layer alone in its stage nothing is kept, but for what the loss saves
    of_loss = min(kept[-1], sent[-1])
    stored = kept, [*[0] * (stages - 1), of_loss]
    starts = [min(a, c) for a, c in zip(kept, sent, strict=True)]
    again = [t + a - b for t, a, b in zip(temporary, kept, starts, strict=True)]
    expected = peaks_by_hand(layout, stored, [0, *sent[:-1]], (temporary, again))
    for device, (between, inside) in zip(memory, expected, strict=True):
        # what waits is rounded for each stage
        assert device.kept == pytest.approx(between, abs=v)
        assert device.total == pytest.approx(inside, abs=v)


@pytest.mark.parametrize(("name", "held"), [("v-half", 6), ("v-min", 4)])
def test_a_v_of_equal_stages_is_priced_with_as_many_as_it_may_hold(name, held):
    costs = [LayerCost(str(i), activation_bytes=1000) for i in range(8)]
    table = given_costs(lambda _: costs, [LayerSize(0, 0)] * 8)
    layout = ParallelLayout(4, chunks=16, schedule=name, stages_per_device=2, recompute="never")
    memory = device_memory(table, CPU, StepWork(16), layout, [1] * 8)
    # those that wait for the second part of their backward hold gradients too
    assert held * 1000 <= max(m.activations for m in memory) < (held + 1) * 1000
    peaks = peak_in_flight(make_schedule(name, 4, 16, 2))
    assert max(peaks[d] + peaks[7 - d] for d in range(4)) > held


# ---------------------------------------------------------------- what is chosen


def every_price(table, hardware, work, choices):
    """The prices of all layouts and cuts that fit, the fastest cut of each layout."""
    layers, best = len(table.sizes), {}
    narrow = [replace(choices, offload=[mode]) for mode in choices.offload]
    for layout in chain.from_iterable(layouts(hardware, work, layers, each) for each in narrow):
        for bounds in combinations(range(1, layers), layout.stages - 1):
            counts = [b - a for a, b in pairwise((0, *bounds, layers))]
            one = price(table, hardware, work, layout, counts)
            if one.peak_bytes <= hardware.usable_bytes:
                best[layout] = min(best.get(layout, one), one, key=lambda p: p.step_ms)
    return list(best.values())


@pytest.mark.parametrize("mib", [10_000, 36, 30, 26, 24])
def test_the_choice_is_the_one_of_all_combinations_that_fit(mib):
    choices = Choices(nb_part=[2], engine=["local"], schedule=BUILT_IN, recompute=MODES)
    hardware, work = machine(mib / 1024), StepWork(8)
    expected = every_price(table_of(), hardware, work, replace(choices, offload=["none"]))
    found = find_layouts(table_of(), hardware, work, choices)
    assert found[0].layout == proposed(expected).layout
    by_time = sorted(price.step_ms for price in expected)
    assert [p.step_ms for p in sorted(found, key=lambda p: p.step_ms)] == by_time[: len(found)]


@pytest.mark.parametrize("mib", [38, 30, 24])
def test_activations_leave_a_device_where_that_is_the_fastest_that_fits(mib):
    choices = Choices(nb_part=[2], engine=["local"], schedule=BUILT_IN, recompute=MODES)
    hardware, work = replace(machine(mib / 1024), to_host_bytes_per_s=1e11), StepWork(8)
    expected = every_price(table_of(), hardware, work, choices)
    found = find_layouts(table_of(), hardware, work, choices)
    assert min(p.step_ms for p in found) == min(p.step_ms for p in expected)
    slow = replace(hardware, to_host_bytes_per_s=1e8)
    for machine_, is_offloaded in ((hardware, mib == 24), (slow, False)):
        found = find_layouts(table_of(), machine_, work, choices)
        assert (found[0].layout.offload != "none") is is_offloaded
        line = offload_in_words(found, table_of(), machine_, work, choices)
        assert (line is not None) is is_offloaded
    alone = offload_in_words(find_layouts(table_of(), hardware, work, choices), *_known(hardware))
    if mib == 24:
        without = find_layouts(table_of(), hardware, work, replace(choices, offload=["none"]))[0]
        assert f"the fastest plan that fits takes {without.step_ms:.1f} instead of " in alone


def _known(hardware):
    choices = Choices(nb_part=[2], engine=["local"], schedule=BUILT_IN, recompute=MODES)
    return table_of(), hardware, StepWork(8), choices


def test_a_machine_with_unknown_rates_of_copies_offloads_nothing_and_one_line_says_how_to_measure():
    found = find_layouts(table_of(), machine(24 / 1024), StepWork(8), _known(CPU)[-1])
    assert {price.layout.offload for price in found} == {"none"}
    line = offload_in_words(found, *_known(machine(24 / 1024)))
    assert "hybridtrain measure-machine" in line
    assert "hardware.to_host_bytes_per_s=" in line
    ample = machine(10)
    found = find_layouts(table_of(), ample, StepWork(8), _known(ample)[-1])
    assert offload_in_words(found, *_known(ample)) is None


def test_logical_replicas_of_a_pipeline_are_priced_as_one_schedule_of_their_micro_batches():
    choices = replace(_known(CPU)[-1], logical_replicas=4)
    hardware, work = replace(machine(), devices_per_node=4), StepWork(32)
    for one in find_layouts(table_of(), hardware, work, choices):
        layout = one.layout
        assert layout.owned_replicas == 2
        assert 32 // 4 % layout.chunks == 0
        together = replace(layout, chunks=2 * layout.chunks, owned_replicas=1)
        same = price(table_of(), hardware, work, together, one.counts)
        assert (one.step_ms, one.memory) == (same.step_ms, same.memory)
        # the gradients of the first replica wait for those of the second
        trained = sum(memory.weights for memory in one.memory)
        assert sum(memory.gradients for memory in one.memory) == 2 * trained
    with pytest.raises(ConfigError, match="must divide replicas=3 and the number of samples"):
        find_layouts(table_of(), hardware, StepWork(24), replace(choices, logical_replicas=3))


def test_less_memory_is_paid_for_with_time_and_never_refunded():
    choices = Choices(nb_part=[2], engine=["local"], schedule=BUILT_IN)
    steps, chosen = [], set()
    for mib in (10_000, 36, 32, 24, 22):
        best = find_layouts(table_of(), machine(mib / 1024), StepWork(8), choices)[0]
        assert best.peak_bytes <= mib * MIB
        steps.append(best.step_ms)
        chosen.add((best.layout.schedule, best.layout.recompute))
    assert all(later >= earlier / 1.02 for earlier, later in pairwise(steps))
    assert len(chosen) == 4


@pytest.mark.parametrize("split", ["uniform", "size", "time"])
def test_a_run_that_cuts_its_model_by_a_rule_is_priced_with_that_cut(split):
    options = PipelineOptions(split=split)
    choices = Choices(nb_part=[2], stages_per_device=[1], schedule=["1f1b"], options=options)
    for one in find_layouts(table_of(times=(1, 1, 1, 9)), machine(), StepWork(8), choices):
        assert one.counts == ((3, 1) if split == "time" else (2, 2))


@pytest.mark.parametrize("schedules", [BUILT_IN, ["1f1b"], ["v-min"]])
def test_a_limit_that_is_too_small_is_an_error_with_the_smallest_that_would_do(schedules):
    choices = Choices(nb_part=[2], engine=["local"], schedule=schedules)
    with pytest.raises(DoesNotFit, match="no plan fits: ") as caught:
        find_layouts(table_of(), machine(0.001), StepWork(8), choices)
    enough = caught.value.memory_gib
    found = find_layouts(table_of(), machine(enough), StepWork(8), choices)
    assert found[0].peak_bytes == caught.value.nbytes
    with pytest.raises(DoesNotFit) as again:
        find_layouts(table_of(), machine(0.998 * enough), StepWork(8), choices)
    assert again.value.memory_gib == enough
    assert f"hardware.memory_gib={enough:g}" in str(again.value)


# ---------------------------------------------------------------- schedules of one's own


@pytest.fixture
def backwards_first():
    """A user's schedule: a micro-batch at a time; only for an even number of devices."""

    @schedule("one-at-a-time", stages_per_device=1)
    def one_at_a_time(devices, chunks):
        from hybridtrain.errors import ScheduleError

        if devices % 2:
            raise ScheduleError("for an even number of devices")
        lanes = tuple(
            tuple(Action(kind, device, i) for i in range(chunks) for kind in "FB")
            for device in range(devices)
        )
        return Schedule("one-at-a-time", devices, chunks, lanes)

    return "one-at-a-time"


def test_a_users_schedule_is_chosen_where_nothing_else_fits(backwards_first):
    first_heavy = table_of(kept=(9, 9, 1, 1))  # the first device holds two of 1f1b's
    names = ("1f1b", "gpipe", backwards_first)
    fixed = Choices(nb_part=[2], chunks=[8], stages_per_device=[1], recompute=["never"])
    with pytest.raises(DoesNotFit) as caught:
        find_layouts(first_heavy, machine(0.001), StepWork(8), replace(fixed, schedule=names[:2]))
    assert backwards_first in Choices().schedule
    limited = machine(0.999 * caught.value.memory_gib)
    found = find_layouts(first_heavy, limited, StepWork(8), replace(fixed, schedule=names))
    assert {price.layout.schedule for price in found} == {backwards_first}


def test_a_schedule_without_a_table_for_these_devices_is_left_out(backwards_first):
    register_table(Schedule("for-two", 2, 4, make_schedule("gpipe", 2, 4).lanes))
    hardware = replace(machine(), devices_per_node=3)
    choices = Choices(nb_part=[3], chunks=[3], schedule=("1f1b", backwards_first, "for-two"))
    found = find_layouts(table_of(), hardware, StepWork(9), replace(choices, chunks=[3, 9]))
    assert {price.layout.schedule for price in found} == {"1f1b"}


# ---------------------------------------------------------------- what is said


def test_one_line_says_what_was_chosen_and_what_the_next_two_would_have_cost():
    choices = Choices(nb_part=[2], engine=["local"], schedule=BUILT_IN)
    found = find_layouts(table_of(), machine(36 / 1024), StepWork(8), choices)
    line = choice_in_words(found, ["schedule", "recompute", "chunks"], "measured")
    best, others = found[0], found[1:]
    assert "\n" not in line
    assert line.startswith(f"schedule={best.layout.schedule}, recompute=")
    assert f"chunks={best.layout.chunks}: {best.step_ms:.1f} ms per step, predicted from " in line
    following = line.split("; the next two: ")[1].split(" and ")
    assert len(following) == 2
    times = [f"{other.step_ms:.1f} ms" for other in others]
    assert all(text.split(" (")[0] in times for text in following)


def test_a_choice_without_an_alternative_says_nothing_of_others():
    choices = Choices(nb_part=[2], engine=["local"], schedule=["1f1b"], stages_per_device=[1])
    found = find_layouts(table_of(), machine(10), StepWork(8), choices)
    assert "next two" not in choice_in_words(found, ["schedule"], "measured")
