"""`torch.func` in a layer, as of a force field or a physics-informed net, runs as it does whole."""

import copy

import pytest
import torch
from support.compare import assert_same_gradients, hybrid, plain_step
from torch import nn

from hybridtrain._base.tensors import count_saved

WIDTH = 6
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Force(nn.Module):
    """The gradient of an energy, which the backward differentiates once more."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def energy(x):
            return self.energy(x).tanh().square().sum()

        return x - torch.func.grad(energy)(x)


class Pulled(Force):
    def forward(self, x):
        y, pull = torch.func.vjp(lambda x: self.energy(x).sigmoid(), x)
        return y + pull(torch.ones_like(y))[0]


def force_field():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Force(), nn.Tanh(), Pulled(), nn.Linear(WIDTH, WIDTH), Force(),
        Pulled(), nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


@pytest.mark.parametrize("recompute", ["never", "always", {"every": 2}], ids=str)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("1f1b", {"split": "time"}),
        ("gpipe", {}),
        ("1f1b", {"stages_per_device": 2}),
        ("zb-h1", {}),
        ("zb-v", {"stages_per_device": 2}),
        ("v-half", {"stages_per_device": 2}),
        ("v-min", {"stages_per_device": 2}),
    ],
    ids=str,
)
@pytest.mark.quick_cases(2)
def test_gradients_inside_a_layer_are_exact_in_every_schedule(schedule, options, recompute):
    net, x, y = force_field(), torch.randn(10, WIDTH), torch.randn(10, WIDTH)
    plain = copy.deepcopy(net)
    model = hybrid(net, 2, schedule=schedule, recompute=recompute, example_inputs=x, **options)
    for _ in range(2):
        plain_step(plain, x, y)
        model.train_step(x, y, nn.functional.mse_loss)
        assert_same_gradients(net, plain)


def test_what_torch_func_refuses_elsewhere_it_still_refuses():
    x = torch.randn(3, WIDTH)
    with count_saved(nn.Identity()) as saved:
        force_field()(x).sum()
    assert saved.bytes > 0
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        Force()(x)
