"""A model that cannot be cut is refused in one message that says what to do."""

import copy

import pytest
import torch
from support.in_stages import (
    TwoInputs,
    hybrid,
    linear,
    loss_of,
    samples,
)
from torch import nn

from hybridtrain.errors import BatchError, ConfigError, SplitError

pytestmark = pytest.mark.usefixtures("seeded")


def two_layers():
    return nn.Sequential(linear(), linear())


@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        (
            lambda: nn.DataParallel(two_layers()),
            r"DataParallel.*net\.module",
        ),
        (lambda: torch.compile(two_layers()), r"compiled as a whole.*compile=True"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_wrapped_model_is_refused_in_one_short_line(wrap, what):
    with pytest.raises(ConfigError, match=what) as caught:
        hybrid(wrap(), 2, example_inputs=samples())
    assert len(str(caught.value)) < 200


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_one_layer_and_no_more():
    net = torch.jit.trace(TwoInputs(), (samples(0), samples(1)))
    inputs = samples(0), samples(1)
    hybrid(net, 1, example_inputs=inputs).train_step(inputs, None, loss_of)
    with pytest.raises(SplitError, match="a model of 1 layer cannot be cut"):
        hybrid(net, 2, example_inputs=inputs)


def test_lazy_modules_get_their_shapes_from_example_inputs():
    def net():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))

    with pytest.raises(ConfigError, match=r"0\.weight is lazy.*pass example_inputs="):
        hybrid(net(), 2, example_inputs=None)
    lazy = net()
    model = hybrid(lazy, 2, example_inputs=samples())
    assert lazy.training
    assert not lazy[1].running_mean.any()
    whole = copy.deepcopy(lazy)
    out = model(samples())
    whole.train()
    assert torch.equal(out, torch.cat([whole(part) for part in samples().split([3, 2, 2])]))


def test_inputs_that_a_forward_does_not_take_are_refused_with_its_signature():
    model = hybrid(TwoInputs(), 2, example_inputs=(samples(0), samples(1)))
    for wrong in (samples(), (samples(),) * 5, {"left": samples(), "rihgt": samples()}):
        with pytest.raises(BatchError, match=r"cannot call TwoInputs\.forward\(left, right"):
            model(wrong)
