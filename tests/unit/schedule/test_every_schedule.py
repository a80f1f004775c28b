"""What holds for all schedules that come with the package, at any shape and any costs."""

import copy
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.compare import assert_same_gradients, hybrid, plain_step
from support.schedules import BUILT_IN
from torch import nn
from torch.nn.functional import mse_loss

from hybridtrain.schedule import Durations, make_schedule, registered, validate

# The most micro-batches that a device holds, in stages: of `p` devices, `m` micro-batches and `v`
# stages per device.
BOUNDS = {
    "gpipe": lambda p, m, v: v * m,
    "1f1b": lambda p, m, v: min(v * m, p if v == 1 else 2 * p + 2 * (v - 1) * p),
    "zb-h1": lambda p, m, v: min(m, p),
    "zb-v": lambda p, m, v: 2 * min(m, p),
    "v-half": lambda p, m, v: 2 * min(m, (p + 2) // 2),
    "v-min": lambda p, m, v: 2 * min(m, (p + 4) // 3),
}
COSTS = st.lists(st.integers(0, 20), min_size=64, max_size=64)


@st.composite
def shapes(draw):
    name = draw(st.sampled_from(BUILT_IN))
    v = registered(name).stages_per_device or draw(st.integers(1, 4))
    return name, draw(st.integers(1, 16)), draw(st.integers(1, 64)), v


def test_every_schedule_has_a_bound_here():
    assert set(BOUNDS) == set(BUILT_IN)


@examples(20, 40)
@given(shapes())
def test_every_schedule_is_proved_and_holds_no_more_than_its_bound(shape):
    name, p, m, v = shape
    schedule = make_schedule(name, p, m, v)
    validate(schedule)
    for lane in schedule.lanes:
        held = accumulate((action.kind == "F") - action.ends_microbatch for action in lane)
        assert max(held) <= BOUNDS[name](p, m, v)


@examples(20, 40)
@given(shapes(), COSTS, COSTS, COSTS)
def test_every_schedule_takes_as_long_as_its_busiest_device_or_longer(
    shape, forward, backward, transfer
):
    name, p, m, v = shape
    schedule = make_schedule(name, p, m, v)
    durations = Durations.of(*(costs[: p * v] for costs in (forward, backward)), transfer)
    busy = [m * sum(forward[s] + backward[s] for s in {a.stage for a in lane})
            for lane in schedule.lanes]  # fmt: skip
    one = sum(forward[: p * v]) + sum(backward[: p * v])  # a micro-batch passes all stages
    through = one - sum(durations.weight[1 : p * v]) * registered(name).splits_backward
    least = max(*busy, through)
    assert least - 1e-6 <= durations.length(schedule)
    assert durations.length(schedule) <= m * one + 2 * m * sum(transfer[: p * v - 1])


@examples(3, 10)
@given(shapes(), st.integers(0, 3))
def test_the_gradients_of_any_shape_are_bitwise_those_of_the_unsplit_model(shape, more):
    name, p, m, v = shape
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(p * v)))
    plain = copy.deepcopy(net)
    model = hybrid(net, p, chunks=m, schedule=name, stages_per_device=v)
    x, y = torch.randn(2, m + more, 2)  # micro-batches of one or two samples
    plain_step(plain, x, y, mse_loss, chunks=m)
    model.train_step(x, y, mse_loss)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("p", "rows"), [(2, 9), (3, 5)])
@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_the_gradients_of_every_schedule_are_those_of_the_unsplit_model(name, p, rows, recompute):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    plain = copy.deepcopy(net)
    v = registered(name).stages_per_device or 1
    model = hybrid(net, p, chunks=4, schedule=name, stages_per_device=v, recompute=recompute)
    for _ in range(2):
        x, y = torch.randn(2, rows, 8)
        plain_step(plain, x, y, mse_loss, chunks=4)
        model.train_step(x, y, mse_loss)
        assert_same_gradients(net, plain)
