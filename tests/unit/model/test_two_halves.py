"""A step in two halves: forwards that keep their graphs, and their backwards later."""

import copy

import pytest
import torch
from support.compare import CLOSE, hybrid
from torch import nn

from hybridtrain.pipeline import HeadOutput
from hybridtrain.schedule import backward_only, forward_only

pytestmark = pytest.mark.usefixtures("seeded")


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)])


def head(_, output):
    loss = output.square().sum()
    return HeadOutput(loss.detach(), loss, torch.ones_like(loss))


@pytest.mark.parametrize("per_device", [1, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_several_steps_may_wait_for_their_backwards(devices, per_device):
    plain = net()
    schedule = "zb-v" if per_device == 2 else "1f1b"
    model = hybrid(copy.deepcopy(plain), devices, per_device, schedule=schedule)
    batches = torch.randn(2, 6, 6)
    steps = [model.run_forwards(batch.split(2), head) for batch in batches]
    assert all(p.grad is None for p in model.parameters())
    for (losses, held), batch in zip(reversed(steps), batches.flip(0), strict=True):
        model.run_backwards(held)
        torch.testing.assert_close(sum(losses), plain(batch).square().sum().detach(), **CLOSE)
    sum(plain(batch).square().sum() for batch in batches).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


def test_a_schedule_of_backwards_satisfies_all_dependencies():
    schedule = backward_only(forward_only(3, 4, 2, "v"))
    order = [action for _, action in schedule.in_one_order]
    assert len(set(order)) == 6 * 4
    places = {(action.stage, action.microbatch): n for n, action in enumerate(order)}
    for stage, microbatch in places:
        assert stage == 5 or places[stage, microbatch] > places[stage + 1, microbatch]
