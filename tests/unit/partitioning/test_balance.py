"""The exact cut: of a chain of costs, of any tables, and for time and memory; the messages."""

import random
import re
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrain.errors import SplitError
from hybridtrain.partitioning import LayerCost, Objective, cut_by_costs, stage_costs
from hybridtrain.partitioning.cut_search import best_cut, every_cut, improved_cut
from hybridtrain.partitioning.objective import INFINITY, range_sums, stage_tables
from hybridtrain.schedule import gpipe, one_forward_one_backward, peak_in_flight

GIB = 2**30


def balance(costs, parts):
    """The best cut of layers that cost the same in every part."""
    return best_cut([range_sums(costs)] * parts)


def bounds_of(counts):
    return list(pairwise(sum(counts[:i]) for i in range(len(counts) + 1)))


def costs_of(costs, counts):
    return [sum(costs[a:b]) for a, b in bounds_of(counts)]


def rank_of(stages, counts):
    """What the best cut has least of, in this order."""
    return max(stages), sum(cost**2 for cost in stages), sum(count**2 for count in counts)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=10), st.integers(1, 6))
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(costs, parts):
    if parts > len(costs):
        assert balance(costs, parts) is None
        return
    counts = balance(costs, parts)
    assert len(counts) == parts
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    best = min(max(costs_of(costs, cut)) for cut in every_cut(len(costs), parts))
    assert max(costs_of(costs, counts)) == best


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(1, 5))
def test_the_balance_is_exact_for_measured_costs_too(costs, parts):
    if parts > len(costs):
        return
    best = min(max(costs_of(costs, cut)) for cut in every_cut(len(costs), parts))
    # the balance adds up from the left end, this test from each stage's own start
    assert max(costs_of(costs, balance(costs, parts))) == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_among_the_best_cuts_the_other_stages_are_even_too(costs, parts):
    if parts > len(costs):
        return
    best = min(rank_of(costs_of(costs, cut), cut) for cut in every_cut(len(costs), parts))
    counts = balance(costs, parts)
    assert rank_of(costs_of(costs, counts), counts) == best


@pytest.mark.parametrize("unit", [0.1, 1 / 3, 0.7e-3])
def test_costs_that_tie_but_for_rounding_are_cut_as_if_they_did(unit):
    for seed in range(100):
        draw = random.Random(seed)
        costs = [draw.randint(0, 4) for _ in range(draw.randint(5, 20))]
        parts = draw.randint(2, 5)
        measured = balance([cost * unit for cost in costs], parts)
        exact = balance(costs, parts)
        assert rank_of(costs_of(costs, measured), measured) == rank_of(
            costs_of(costs, exact), exact
        )


@pytest.mark.parametrize("seed", range(100))
def test_the_cut_is_the_best_for_any_tables(seed):
    draw = random.Random(seed)
    n, parts = draw.randint(1, 8), draw.randint(1, 5)
    forbidden = draw.choice([0, 0.3, 0.7])
    tables = [
        [
            [INFINITY if draw.random() < forbidden else draw.randint(0, 6) for _ in range(n + 1)]
            for _ in range(n + 1)
        ]
        for _ in range(parts)
    ]

    def stages(counts):
        runs = bounds_of(counts)
        return [table[start][end] for table, (start, end) in zip(tables, runs, strict=True)]

    ranks = [rank_of(stages(cut), cut) for cut in every_cut(n, parts)]
    possible = [rank for rank in ranks if rank[0] < INFINITY]
    counts = best_cut(tables)
    if not possible:
        assert counts is None
    else:
        assert rank_of(stages(counts), counts) == min(possible)


class Chain:
    """Random costs, and what they come to by the definitions, in fractions.

    The uncut model's time and memory are powers of two, so that the shares are exact in float64
    as well and both agree on what ties.
    """

    def __init__(self, seed):
        draw = random.Random(seed)
        n, stages = draw.randint(1, 9), draw.randint(1, 5)
        self.in_flight = [draw.randint(1, 6) for _ in range(stages)]
        rows = [
            {
                "forward_ms": draw.randint(0, 9),
                "backward_ms": draw.randint(0, 9),
                "weight_bytes": draw.randint(0, 900),
                "activation_bytes": draw.randint(0, 3) * 60,
                "crossing_bytes": draw.randint(0, 200),
                "crossing_ms": draw.choice([0, 0, 1, 2, 9]),
            }
            for _ in range(n)
        ]
        for key, total in [
            ("forward_ms", sum(row["forward_ms"] + row["backward_ms"] for row in rows)),
            (
                "weight_bytes",
                sum(
                    row["weight_bytes"] + row["activation_bytes"] * sum(self.in_flight) // stages
                    for row in rows
                ),
            ),
        ]:
            draw.choice(rows)[key] += 2 ** total.bit_length() - total
            setattr(self, f"whole_{key}", 2 ** total.bit_length())
        self.costs = [LayerCost(f"l{i}", 1, **row) for i, row in enumerate(rows)]
        self.no_cut_before = {i for i in range(1, n) if draw.random() < draw.choice([0, 0.2])}
        self.goal = Objective(
            memory_weight=draw.choice([0, 0.25, 0.5, 1]),
            memory_limit=draw.choice([INFINITY, self.whole_weight_bytes * draw.uniform(0.2, 2)]),
            stages_per_device=draw.choice([1, 1, 2]),
        )

    def time(self, start, end):
        own = sum(c.forward_ms + c.backward_ms for c in self.costs[start:end])
        cuts = [i for i in (start, end) if 0 < i < len(self.costs)]
        return own + sum(2 * self.costs[i - 1].crossing_ms for i in cuts)

    def memory(self, stage, start, end):
        kept = sum(c.activation_bytes for c in self.costs[start:end])
        kept += self.costs[start - 1].crossing_bytes if start else 0
        return sum(c.weight_bytes for c in self.costs[start:end]) + self.in_flight[stage] * kept

    def rank(self, counts):
        weight = Fraction(self.goal.memory_weight)
        stages = [
            (1 - weight) * Fraction(self.time(*run), self.whole_forward_ms)
            + weight * Fraction(self.memory(stage, *run), self.whole_weight_bytes)
            for stage, run in enumerate(bounds_of(counts))
        ]
        return rank_of(stages, counts)

    def is_allowed(self, counts):
        runs = bounds_of(counts)
        limit = self.goal.memory_limit
        return not self.no_cut_before & {start for start, _ in runs} and all(
            self.memory(stage, *run) * self.goal.stages_per_device <= limit
            for stage, run in enumerate(runs)
        )


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.quick_cases(40)
def test_no_cut_of_a_random_chain_is_better_in_time_and_memory(seed):
    chain = Chain(seed)
    possible = [c for c in every_cut(len(chain.costs), len(chain.in_flight)) if chain.is_allowed(c)]
    if not possible:
        with pytest.raises(SplitError):
            cut_by_costs(chain.costs, chain.in_flight, chain.goal, chain.no_cut_before)
        return
    counts = cut_by_costs(chain.costs, chain.in_flight, chain.goal, chain.no_cut_before)
    assert counts in possible
    assert chain.rank(counts) == min(map(chain.rank, possible))


def test_every_cut_into_stages_is_tried_once():
    for n, stages in product(range(1, 8), range(1, 5)):
        for banned in (set(), {1}, {2, 5}):
            cuts = list(every_cut(n, stages, banned))
            assert sorted(cuts) == sorted(
                list(counts)
                for counts in product(range(1, n + 1), repeat=stages)
                if sum(counts) == n and not banned & {start for start, _ in bounds_of(counts)[1:]}
            )


@pytest.mark.parametrize("seed", range(40))
def test_no_move_of_a_layer_improves_an_improved_cut(seed):
    draw = random.Random(seed)
    n, stages = draw.randint(4, 9), draw.randint(2, 4)
    banned = {i for i in range(1, n) if draw.random() < 0.2}
    scores = {tuple(counts): draw.randint(0, 20) for counts in every_cut(n, stages)}
    allowed = {tuple(counts) for counts in every_cut(n, stages, banned) if draw.random() < 0.8}
    for begin in allowed:
        improved = improved_cut(
            begin, lambda counts: scores[tuple(counts)], lambda c: tuple(c) in allowed, banned
        )
        assert tuple(improved) in allowed
        assert scores[tuple(improved)] <= scores[begin]
        for border, step in product(range(stages - 1), (-1, 1)):
            moved = list(improved)
            moved[border] += step
            moved[border + 1] -= step
            assert tuple(moved) not in allowed or scores[tuple(moved)] >= scores[tuple(improved)]


@pytest.mark.parametrize("seed", range(20))
def test_the_printed_costs_of_a_stage_are_those_that_the_cut_was_made_by(seed):
    chain = Chain(seed)
    for counts in every_cut(len(chain.costs), len(chain.in_flight)):
        runs = bounds_of(counts)
        stages = stage_costs(chain.costs, counts, chain.in_flight)
        for index, (stage, run) in enumerate(zip(stages, runs, strict=True)):
            assert stage.time_ms == chain.time(*run)
            assert stage.time_ms == stage.forward_ms + stage.backward_ms + stage.crossing_ms
            assert stage.memory_bytes == chain.memory(index, *run)
            assert stage.parameters == run[1] - run[0]


def test_a_stage_that_keeps_more_micro_batches_gets_fewer_layers():
    layers = [LayerCost(f"l{i}", forward_ms=1, activation_bytes=100) for i in range(24)]
    in_flight = peak_in_flight(one_forward_one_backward(4, 8))
    assert in_flight == (4, 3, 2, 1)
    counts = cut_by_costs(layers, in_flight, Objective(memory_weight=1))
    assert counts == sorted(counts)
    assert counts[0] < 6 < counts[-1]
    assert cut_by_costs(layers, in_flight, Objective()) == [6, 6, 6, 6]
    assert cut_by_costs(layers, peak_in_flight(gpipe(4, 8)), Objective(memory_weight=1)) == [
        6,
        6,
        6,
        6,
    ]


def test_a_memory_limit_moves_layers_from_a_full_stage_to_one_with_room():
    layers = [LayerCost(f"l{i}", forward_ms=1, activation_bytes=100) for i in range(8)]
    assert cut_by_costs(layers, [2, 1], Objective()) == [4, 4]
    assert cut_by_costs(layers, [2, 1], Objective(memory_limit=600)) == [3, 5]
    assert cut_by_costs(layers, [2, 1], Objective(memory_limit=1200, stages_per_device=2)) == [3, 5]


def test_the_cut_avoids_an_expensive_crossing_and_nothing_crosses_the_models_ends():
    def layers(*crossing_ms):
        return [
            LayerCost(f"l{i}", forward_ms=4, crossing_ms=ms) for i, ms in enumerate(crossing_ms)
        ]

    assert cut_by_costs(layers(0, 0, 0, 0), [1, 1], Objective()) == [2, 2]
    assert cut_by_costs(layers(0, 9, 9, 99), [1, 1], Objective()) == [1, 3]
    assert stage_costs(layers(0, 9, 9, 99), [4], [1])[0].crossing_ms == 0
    assert [s.crossing_ms for s in stage_costs(layers(1, 9, 9, 99), [1, 3], [1, 1])] == [2, 2]


@pytest.mark.parametrize("weight", [0, 0.5, 1])
def test_layers_without_costs_are_spread_evenly(weight):
    nothing = [LayerCost(f"l{i}") for i in range(6)]
    assert cut_by_costs(nothing, [1, 1, 1], Objective(memory_weight=weight)) == [2, 2, 2]
    assert [stage.time_ms for stage in stage_costs(nothing, [3, 3], [1, 1])] == [0, 0]


def test_stages_that_hold_different_numbers_of_micro_batches_have_different_tables():
    layers = [LayerCost(f"l{i}", activation_bytes=10) for i in range(3)]
    first, second = stage_tables(layers, [3, 1], Objective(memory_weight=1))
    assert first[0, 2] == 3 * second[0, 2] == 1.0


def test_too_few_layers_or_places_to_cut_say_how_many_stages_are_possible():
    layers = [LayerCost(f"l{i}") for i in range(4)]
    with pytest.raises(SplitError, match=r"4 layers cannot be cut into 5 stages: .* to 4 or less"):
        cut_by_costs(layers, [1] * 5, Objective())
    message = r"4 layers, of which 2 cannot begin a stage .* into 3 stages: .* to 2 or less"
    with pytest.raises(SplitError, match=message):
        cut_by_costs(layers, [1] * 3, Objective(), no_cut_before=[1, 3])
    assert cut_by_costs(layers, [1] * 2, Objective(), no_cut_before=[1, 3]) == [2, 2]


@pytest.mark.parametrize("per_device", [1, 2])
def test_a_memory_limit_that_no_cut_keeps_says_which_one_would_do(per_device):
    # even in memory, not in time
    layers = [LayerCost(f"l{i}", forward_ms=i**2, weight_bytes=GIB // 3) for i in range(8)]
    limit = Objective(memory_limit=0.9 * GIB * per_device, stages_per_device=per_device)
    with pytest.raises(SplitError) as caught:
        cut_by_costs(layers, [1, 1], limit)
    message = str(caught.value)
    assert f"no cut into 2 stages fits under memory_limit_gib={0.9 * per_device}" in message
    assert "a stage of 1.334 GiB or more" in message
    for key in ("memory_limit_gib", "nb_part", "chunks", "recompute"):
        assert f"{key}=" in message
    assert ("0.9 GiB for each of a device's 2 stages" in message) == (per_device == 2)
    enough = float(re.search(r"Set memory_limit_gib= to ([\d.]+) GiB", message)[1])
    assert enough == pytest.approx(1.334 * per_device, abs=0.002)
    goal = Objective(memory_limit=enough * GIB, stages_per_device=per_device)
    assert cut_by_costs(layers, [1, 1], goal) == [4, 4]


def test_a_layer_above_the_memory_limit_is_named_with_what_it_needs_where_it_can_stand():
    layers = [
        LayerCost("embed", weight_bytes=GIB, activation_bytes=GIB // 2),
        *(LayerCost(f"blocks.{i}", weight_bytes=GIB // 8) for i in range(4)),
        LayerCost("head", weight_bytes=GIB // 4, activation_bytes=GIB // 2),
    ]
    # the first layer is in the first stage, which keeps three micro-batches; the last in the last
    message = r"memory_limit_gib=2.*'embed' alone needs 2\.5 GiB with 3 micro-batches in flight"
    with pytest.raises(SplitError, match=message):
        cut_by_costs(layers, [3, 2, 1], Objective(memory_limit=2 * GIB))
    message = r"memory_limit_gib=0\.5.*'head' alone needs 0\.75 GiB with 1 micro-batch in flight"
    with pytest.raises(SplitError, match=message):
        cut_by_costs(layers[1:], [3, 2, 1], Objective(memory_limit=GIB / 2))
    message = r"'head' alone needs 1\.75 GiB with 3 micro-batches in flight"
    with pytest.raises(SplitError, match=message):
        cut_by_costs(layers[-3:], [1, 2, 3], Objective(memory_limit=GIB))
