"""Layers that change themselves: recomputation is as if there had been none."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same, assert_same_gradients, hybrid, plain_step
from support.nets import WIDTH, Codebook, Counting, TanhLinear, regression
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from hybridtrain.errors import ConfigError
from hybridtrain.graph import Layer
from hybridtrain.pipeline.layer_state import StageState
from hybridtrain.pipeline.recomputation_proof import FIRST_STEPS

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Reassigning(TanhLinear):
    """Moving averages that are other tensors each time: a buffer, an attribute, a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.last = torch.zeros(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        y = super().forward(x) * self.scale + self.mean + self.last
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = x.detach()[0]
        self.scale = nn.Parameter(0.9 * self.scale + 0.01, requires_grad=False)
        return y


class Containers(TanhLinear):
    """State in a list, a dict and an attribute that is made in the first forward."""

    def __init__(self):
        super().__init__()
        self.history = []
        self.counts = {"runs": 0}

    def forward(self, x):
        self.history.append(float(x.detach().mean()))
        self.counts["runs"] += 1
        self.first = getattr(self, "first", 0.0) + 0.5
        return super().forward(x) * self.counts["runs"] + sum(self.history) + self.first


class SwitchedOff(TanhLinear):
    """Ends its training mode in its first forward."""

    def forward(self, x):
        y = super().forward(x) * (2.0 if self.training else 1.0)
        self.training = False
        return y


class Renorming(nn.Module):
    """Changes a parameter that is trained."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(3, WIDTH, max_norm=0.5)

    def forward(self, x):
        with torch.no_grad():
            self.rows.weight.mul_(0.9)
        return x + self.rows((x[:, 0] > 0).long())


class Late(TanhLinear):
    """Changes a buffer for micro-batches of 2 samples alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            if x.shape[0] == 2:
                self.scale += 1
        return super().forward(x) * self.scale


class Remembering(TanhLinear):
    """Keeps an activation with its graph, and uses its value in the next forward."""

    before = None

    def forward(self, x):
        y = super().forward(x)
        result = y if self.before is None else y + self.before.detach().mean(0)
        self.before = y
        return result


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))


def scripted_counter():
    return torch.jit.script(ScriptCounting())


class ScriptCounting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return torch.tanh(self.linear(x)) * self.count


@torch.jit.script
def scripted_function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * torch.sigmoid(x)


class Calls(TanhLinear):
    def forward(self, x):
        return scripted_function(super().forward(x))


LAYERS = {
    "spectral_norm by a hook": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm by a hook": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "codebook": Codebook,
    "counter": Counting,
    "in a block": lambda: nn.Sequential(Counting(), nn.Dropout(0.0), nn.BatchNorm1d(WIDTH)).append(
        Codebook()
    ),
    "other tensors": Reassigning,
    "containers": Containers,
    "training mode": SwitchedOff,
    "trained parameter": Renorming,
    "kept activation": Remembering,
    "torchscript function": Calls,
    "torchscript": scripted,
    "torchscript counter": scripted_counter,
}


def net_with(layer):
    torch.manual_seed(0)
    return nn.Sequential(
        TanhLinear(), LAYERS[layer](), TanhLinear(), LAYERS[layer](), nn.Linear(WIDTH, WIDTH)
    )


@pytest.mark.parametrize("recompute", ["always", "except_last", ["1", "3"]], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.quick_cases(3)
def test_a_layer_that_changes_itself_is_recomputed_from_what_it_was(layer, recompute):
    plain, net = net_with(layer), net_with(layer)
    # by default, micro-batches run between a forward and its recomputation
    model = hybrid(net, 2, recompute=recompute, schedule="1f1b")
    # TorchScript computes otherwise from the third run on
    close = {"rtol": 1e-5, "atol": 1e-7} if "torchscript" in layer else {}
    for seed in range(2):
        x, y = regression(13, seed)
        plain_step(plain, x, y)
        model.train_step(x, y, F.mse_loss)
        assert_same_gradients(net, plain, f"step {seed}", **close)
        assert_same(net.state_dict(), plain.state_dict(), f"step {seed}", **close)
        for mine, theirs in zip(net.modules(), plain.modules(), strict=True):
            for name in ("runs", "history", "counts", "first"):
                assert getattr(mine, name, None) == getattr(theirs, name, None)


def test_a_state_that_cannot_be_restored_is_refused_with_the_layer_and_its_buffer():
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), Late())
    model = hybrid(net, 1, recompute="always")
    for _ in range(FIRST_STEPS):
        model.train_step(*regression(12), F.mse_loss)
    with pytest.raises(ConfigError, match=r"'1' has changed buffer 'scale' in place.*recompute="):
        model.train_step(*regression(8), F.mse_loss)
    # without recomputation it is as in any module
    plain = copy.deepcopy(net)
    free = hybrid(net, 1)
    for each in (net, plain):
        each.zero_grad()
    plain_step(plain, *regression(8))
    free.train_step(*regression(8), F.mse_loss)
    assert_same_gradients(net, plain)


def test_the_states_of_past_micro_batches_are_not_kept():
    linear = spectral_norm(nn.Linear(WIDTH, WIDTH))
    state = StageState([Layer("0", linear)])
    for _ in range(3):
        snapshot = state.save([0])
        linear(torch.randn(4, WIDTH))
        held = [v for _, values in snapshot.holders for v in values.values()]
        tensors = [v for v in held if isinstance(v, torch.Tensor)]
        assert tensors
        assert all(tensor.grad_fn is None for tensor in tensors)
