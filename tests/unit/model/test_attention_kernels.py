"""`attention=`: one kernel of scaled_dot_product_attention, wherever a model's forward runs."""

import copy

import pytest
import torch
from support.compare import assert_same, hybrid, plain_step
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridtrain.errors import ConfigError
from hybridtrain.pipeline import HeadOutput

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

KERNELS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
WIDTH = 16


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), dropout
        self.allowed = []

    def forward(self, x):
        enabled = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
        self.allowed.append(enabled)
        heads = self.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        return x + heads.transpose(1, 2).flatten(2)


def gradients(net):
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def test_a_step_has_the_bits_of_plain_pytorch_with_the_same_kernel():
    torch.manual_seed(0)
    net = nn.Sequential(*[Attention() for _ in range(4)])
    x = torch.randn(8, 64, WIDTH)
    found = {}
    for name, kernel in KERNELS.items():
        ours, plain = copy.deepcopy(net), copy.deepcopy(net)
        hybrid(ours, attention=name, recompute="always").train_step(x, x, F.mse_loss)
        with sdpa_kernel(kernel):
            plain_step(plain, x, x)
        found[name] = gradients(ours)
        assert_same(found[name], gradients(plain), name)
    assert any(not torch.equal(found["math"][name], found["flash"][name]) for name in found["math"])


def test_a_layer_that_a_later_backward_recomputes_has_the_kernel_of_its_forward():
    torch.manual_seed(0)
    ours = nn.Sequential(*[Attention() for _ in range(2)])
    plain, x = copy.deepcopy(ours), torch.randn(2, 64, WIDTH)

    def head(_, output):
        root = output.square().mean()
        return HeadOutput(None, root, torch.ones_like(root))

    model = hybrid(ours, attention="math", recompute="always")
    model.run_backwards(model.run_forwards([x], head)[1])
    with sdpa_kernel(SDPBackend.MATH):
        plain(x).square().mean().backward()
    assert_same(gradients(ours), gradients(plain), "gradients")


def test_every_forward_uses_the_kernel_and_the_callers_comes_back():
    layers = [Attention() for _ in range(2)]
    model = hybrid(nn.Sequential(*layers), attention="math", recompute="always")
    x = torch.randn(8, 4, WIDTH)
    model.train_step(x, None, lambda output, _: output.mean())
    model(x)
    for layer in layers:
        assert set(layer.allowed) == {(True, False)}
        layer.allowed.clear()
    assert torch.backends.cuda.flash_sdp_enabled()
    unchanged = hybrid(nn.Sequential(*copy.deepcopy(layers)), self_check=False)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        unchanged.train_step(x, None, lambda output, _: output.mean())
    assert all(set(layer.allowed) == {(False, True)} for layer in unchanged.net)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_kernel_that_the_device_does_not_have_is_refused_with_those_that_it_has(kernel):
    message = f"attention={kernel}: .* torch.float32 on cpu; use auto, math or flash"
    with pytest.raises(ConfigError, match=message):
        hybrid(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), attention=kernel)


def test_inputs_that_the_kernel_does_not_suit_name_the_layer_and_the_way_out():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(dropout=0.5))
    model = hybrid(net, attention="flash", self_check=False)
    with pytest.raises(RuntimeError, match=r"in layer '1', (.|\n)* set attention=auto"):
        model.train_step(torch.randn(4, 4, WIDTH), None, lambda output, _: output.mean())
