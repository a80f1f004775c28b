"""One process: a pipelined forward equals the net itself."""

import copy

import pytest
import torch
from support.compare import assert_same, copied, hybrid
from support.nets import CASES, DictToTuple, ToDict, floats
from torch import nn

KINDS = [kind for kind in CASES if kind not in ("u_net", "tied_gpt")]

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nb_part", [1, 2, 3, 4])
def test_the_forward_in_eval_mode_equals_the_net_itself(kind, nb_part):
    case = CASES[kind]
    net = case.net()
    if kind == "conv":  # running statistics worth the name
        for seed in range(3):
            net(case.batch(16, 50 + seed)[0])
    reference = copy.deepcopy(net).eval()
    model = hybrid(net, nb_part).eval()
    before = copy.deepcopy(model.state_dict())
    for rows in (10, 13, 2):
        inputs, _ = case.batch(rows, rows)
        output = model(copied(inputs))
        assert not output.requires_grad
        expected = reference(copied(inputs)).detach()
        # the kernels choose their blocks by the number of samples: the last bits differ
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert_same(model.state_dict(), before)


def test_the_forward_gives_back_pytrees_of_all_samples():
    net = nn.Sequential(ToDict(), DictToTuple())
    x = floats(10)
    h, (mask, none, skips), _ = hybrid(net).eval()(x)
    expected, (expected_mask, _, expected_skips), _ = net(x)
    torch.testing.assert_close(h, expected.detach())
    assert torch.equal(mask, expected_mask)
    assert none is None
    torch.testing.assert_close(skips["again"], expected_skips["again"].detach())
