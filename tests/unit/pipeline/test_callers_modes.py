"""One process: modes and context variables of the caller of a step hold in the stages too."""

import contextvars
import copy

import pytest
import torch
from support.compare import assert_same_gradients, floats_and_classes, hybrid, plain_step
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

FACTOR = contextvars.ContextVar("factor", default=1.0)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * FACTOR.get()


class Triple(TorchFunctionMode):
    """Changes what a function of PyTorch computes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is F.linear else result


def pair():
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(8, 8), nn.Tanh(), Scaled(8, 8), nn.Linear(8, 3))
    torch.manual_seed(0)
    return net, nn.Sequential(Scaled(8, 8), nn.Tanh(), Scaled(8, 8), nn.Linear(8, 3))


def assert_steps_are_equal(net, reference, model):
    for step in range(3):
        net.zero_grad()
        reference.zero_grad()
        model.train_step(*floats_and_classes(), F.cross_entropy)
        plain_step(reference, *floats_and_classes(), F.cross_entropy)
        assert_same_gradients(net, reference, f"step {step}")


def test_context_variables_have_the_callers_values():
    net, reference = pair()
    model = hybrid(net)
    for value in (1.0, 3.0):
        token = FACTOR.set(value)
        assert_steps_are_equal(net, reference, model)
        FACTOR.reset(token)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_function_mode_around_a_step_and_an_evaluation_holds_in_all_stages(schedule):
    net, reference = pair()
    model = hybrid(net, schedule=schedule)
    inputs, _ = floats_and_classes(24)  # more micro-batches than may be in the pipeline at once
    with Triple():
        assert_steps_are_equal(net, reference, model)
        found = hybrid(net, chunks=24).eval()(inputs)
        torch.testing.assert_close(found, reference(inputs).detach())
    assert_steps_are_equal(net, reference, model)


def test_the_operations_of_all_stages_are_counted():
    net, reference = pair()
    model = hybrid(net)
    with FlopCounterMode(display=False) as counted:
        model.train_step(*floats_and_classes(), F.cross_entropy)
    with FlopCounterMode(display=False) as expected:
        plain_step(reference, *floats_and_classes(), F.cross_entropy)
    assert counted.get_total_flops() == expected.get_total_flops() > 0


def compressing():
    """Returns hooks that double saved tensors and round them to bfloat16."""

    def pack(tensor):
        return (tensor * 2).bfloat16() if tensor.is_floating_point() else tensor

    def unpack(tensor):
        return tensor.float() if tensor.is_floating_point() else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def test_hooks_on_saved_tensors_hold_in_all_stages_from_the_first_micro_batch_on():
    net, reference = pair()
    model = hybrid(net)
    with compressing():
        assert_steps_are_equal(net, reference, model)


class Follows(nn.Linear):
    """Changes a buffer without a new version, so that saved tensors are compared."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(sizes[0]))

    def forward(self, x):
        y = super().forward(x) + self.mean.clone()
        self.mean.data.add_(x.detach().mean(0))
        return torch.exp(y)


def test_hooks_on_saved_tensors_hold_where_saved_tensors_are_compared():
    torch.manual_seed(0)
    net = nn.Sequential(Follows(8, 8), nn.Linear(8, 3))
    reference = copy.deepcopy(net)
    model = hybrid(net)
    with compressing():
        assert_steps_are_equal(net, reference, model)


def test_a_default_device_holds_in_all_stages():
    class Zeros(nn.Linear):
        def forward(self, x):
            assert torch.empty(()).device.type == "meta"
            return super().forward(x)

    model = hybrid(nn.Sequential(nn.Linear(8, 8), Zeros(8, 3)), schedule="1f1b")
    inputs, _ = floats_and_classes()
    with torch.device("meta"), torch.no_grad():
        outputs = model.map_outputs(inputs, None, lambda output, _: output)
    assert [len(output) for output in outputs] == [2, 2, 2, 1]
