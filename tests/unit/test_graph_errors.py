"""A model or a batch that cannot be traced is refused in one message that says what to do."""

import pytest
import torch
from support.traced import Shapes, TwoInputs, assert_same, hybrid, linear, loss_of, samples
from torch import nn

from hybridtrain.errors import BatchError, ConfigError, SplitError


@pytest.fixture(autouse=True)
def _seeded(one_intra_op_thread):
    torch.manual_seed(0)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.second(x)


def test_control_flow_in_the_models_own_forward_is_named_with_its_line():
    net = Decides()
    net.forward = lambda x: Decides.forward(net, x)  # of which there is no source to take apart
    message = (
        r"Decides cannot be traced.*test_graph_errors\.py:\d+: `if x\.sum\(\) > 0:`.*submodule"
    )
    with pytest.raises(SplitError, match=message):
        hybrid(net, 2, example_inputs=samples())
    assert_same(Decides(), samples(), 1, example_inputs=samples())


class AnyInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear()

    def forward(self, *inputs):
        return self.first(sum(inputs))


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Shapes, r"Shapes\.forward has optional arguments \(mask\)"),
        (AnyInputs, r"AnyInputs\.forward has \*args"),
        (Decides, r"torch\.fx cannot trace Decides \(.*test_graph_errors\.py:\d+: `if x\.sum"),
    ],
)
def test_a_model_that_is_traced_with_a_batch_asks_for_example_inputs_and_says_why(net, why):
    with pytest.raises(ConfigError, match=f"{why}.*pass example_inputs=<the inputs of a batch>"):
        hybrid(net(), 2)


def test_a_batch_with_other_inputs_than_the_model_was_traced_with_is_refused():
    model = hybrid(TwoInputs(), 2, example_inputs=(samples(0), samples(1)))
    message = "TwoInputs was traced with left, right, and this batch gives left, right, mask: .*in"
    with pytest.raises(BatchError, match=message):
        model({"left": samples(0), "right": samples(1), "mask": samples(2)})
    for wrong in (samples(), (samples(),) * 5, {"left": samples(), "rihgt": samples()}):
        with pytest.raises(BatchError, match=r"TwoInputs\.forward\(left, right.* cannot be called"):
            model(wrong)
    inputs = {"left": samples(0), "right": samples(1), "scale": 0.5}
    model = hybrid(TwoInputs(), 2, example_inputs=inputs)
    with pytest.raises(BatchError, match=r"traced with scale=0\.5, and this batch gives scale=2"):
        model(inputs | {"scale": 2})


class Carrier:
    def __init__(self, tensor):
        self.tensor = tensor


def test_an_object_that_may_hide_tensors_does_not_cross_a_cut():
    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return Carrier(self.linear(x))

    class Takes(nn.Module):
        def forward(self, carrier):
            return carrier.tensor * 2

    net = nn.Sequential(Puts(), Takes())
    with pytest.raises(SplitError, match="layer '0' passes a Carrier to a later stage, "):
        hybrid(net, 2).train_step(samples(), None, loss_of)
    hybrid(net, 1).train_step(samples(), None, loss_of)
