"""A head's output without memory: each operation on it gives what the logits would have given."""

import copy

import pytest
import torch
from support.compare import cpu_world
from torch import nn
from torch.nn import functional as F

from hybridtrain import HybridModel
from hybridtrain.errors import UserError
from hybridtrain.head import LazyLogits, chunked_loss, head_of, install, lazily

CLASSES = 50
# Sums in float32, in another order; relative to the largest entry.
CLOSE = 2e-6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch, seeded):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**9)


def targets():
    classes = torch.randint(CLASSES, (3, 7), generator=torch.Generator().manual_seed(1))
    classes[0, :3] = -100
    return classes


def net_of(dtype=torch.float32, bias=True):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(16, CLASSES, bias=bias)).to(dtype)


def with_gradients(loss_of, head, dtype=torch.float32, bias=True, frozen=False, context=None):
    """The loss, the gradients of hidden states, weight and bias, and the output of the head."""
    net = net_of(dtype, bias).requires_grad_(not frozen)
    hidden = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    hidden.requires_grad_()
    if head == "lazy":
        install(net, ["0"])
    with lazily():
        output = net(hidden)
    assert isinstance(output, LazyLogits) == (head == "lazy")
    loss = loss_of(output)
    # of different size for each token
    (loss * torch.arange(1, loss.numel() + 1).reshape(loss.shape)).sum().backward()
    gradients = [hidden.grad, *(p.grad for p in net.parameters())]
    return [loss.detach(), *(g for g in gradients if g is not None)], output


def difference(first, second):
    first, second = first.double(), second.double()
    return ((first - second).abs().max() / second.abs().max()).item()


def flat(logits, classes, **settings):
    return F.cross_entropy(logits.view(-1, CLASSES), classes.view(-1), **settings)


WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(4)) + 0.5

LOSSLESS = {
    "mean": lambda o, y: flat(o, y),
    "sum": lambda o, y: flat(o, y, reduction="sum"),
    "each token": lambda o, y: flat(o, y, reduction="none"),
    "smoothing": lambda o, y: flat(o, y, label_smoothing=0.2),
    "class weights": lambda o, y: nn.CrossEntropyLoss(WEIGHTS)(o.flatten(0, 1), y.flatten()),
    "class weights and smoothing": lambda o, y: flat(o, y, weight=WEIGHTS, label_smoothing=0.1),
    "another ignored class": lambda o, y: flat(o, y.clamp(min=3), ignore_index=3),
    "shifted": lambda o, y: F.cross_entropy(
        o[..., :-1, :].contiguous().view(-1, o.size(-1)), y[..., 1:].reshape(-1)
    ),
    "classes in dim 1": lambda o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="none"),
    "permuted": lambda o, y: F.cross_entropy(o.permute(1, 2, 0), y.T),
    "one sample": lambda o, y: F.cross_entropy(o[1], y[1]),
    "one token": lambda o, y: F.cross_entropy(o[1, 2], y[1, 2]),
    "a mask": lambda o, y: F.cross_entropy(o[y != -100], y[y != -100]),
    "scaled": lambda o, y: flat(2 * o * 0.25 / 3, y),
    "soft-capped": lambda o, y: flat(torch.tanh(o / 5.0) * 5.0, y),
    "soft-capped, smoothing": lambda o, y: flat((o / 2).tanh() * 2, y, label_smoothing=0.1),
    "cast": lambda o, y: flat(o.float().to(torch.float32).to(o.device), y),
    "two heads": lambda o, y: flat(o + o * 0.5, y),
    "detached beside": lambda o, y: flat(o, y) + 0 * flat(o.detach(), y),
}

# Operations that need the logits, and their losses.
MAKING = {
    "log-probabilities": lambda o, y: F.nll_loss(F.log_softmax(o, -1).flatten(0, 1), y.flatten()),
    "probabilities as targets": lambda o, y: F.cross_entropy(
        o.flatten(0, 1), torch.full((21, CLASSES), 1 / CLASSES)
    ),
    "a part of the classes": lambda o, y: F.cross_entropy(
        o[..., :40].flatten(0, 1), y.clamp(max=39).flatten()
    ),
    "changed in place": lambda o, y: flat(o.mul_(2.0), y),
    "changed after a view": lambda o, y: [
        v := o[:, 1:], o.add_(o.detach() ** 2), flat(v.contiguous(), y[:, 1:].contiguous())
    ][-1],
    "changed after a cast": lambda o, y: [v := o * 2, o.zero_(), flat(v, y)][-1],
    "padded classes": lambda o, y: [
        o.__setitem__((..., slice(40, CLASSES)), -5.0), flat(o, y.clamp(max=39))
    ][-1],
    "hooked": lambda o, y: [o.register_hook(lambda g: 2 * g), flat(o * 3, y)][-1],
    "a scale per class": lambda o, y: flat(o * WEIGHTS, y),
    "two tanh": lambda o, y: flat(o.tanh().tanh(), y),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_loss_without_logits_has_the_value_and_gradients_of_the_plain_one(name):
    def loss_of(output):
        return LOSSLESS[name](output, targets())

    ours, output = with_gradients(loss_of, "lazy")
    plain, _ = with_gradients(loss_of, "plain")
    assert output.origin.value is None
    assert max(map(difference, ours, plain)) < CLOSE


@pytest.mark.parametrize("name", MAKING)
def test_an_operation_that_needs_the_logits_gets_them(name):
    def loss_of(output):
        return MAKING[name](output, targets())

    ours, output = with_gradients(loss_of, "lazy")
    plain, logits = with_gradients(loss_of, "plain")
    assert all(map(torch.equal, ours, plain))
    assert torch.equal(output + 0, logits + 0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_only_what_is_trained_gets_a_gradient(frozen, bias):
    def loss_of(output):
        return flat(output, targets())

    ours, _ = with_gradients(loss_of, "lazy", bias=bias, frozen=frozen)
    plain, _ = with_gradients(loss_of, "plain", bias=bias, frozen=frozen)
    assert len(ours) == len(plain)
    assert max(map(difference, ours, plain)) < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_half_precision_a_loss_is_at_least_as_close_to_float32_as_the_plain_one(dtype, autocast):
    def loss_of(output):
        with torch.autocast("cpu", dtype, enabled=autocast):
            return flat(output.float(), targets())

    def results(head):
        with torch.autocast("cpu", dtype, enabled=autocast):
            return with_gradients(loss_of, head, torch.float32 if autocast else dtype)[0]

    exact = with_gradients(loss_of, "plain")[0]
    for ours, plain, best in zip(results("lazy"), results("plain"), exact, strict=True):
        assert ours.dtype == plain.dtype
        # the plain one rounds the gradient of the logits once, too
        assert difference(ours, best) < 1.5 * difference(plain, best) + 1e-3


def test_a_small_gradient_is_not_lost_in_float16():
    hidden = torch.randn(4, 8, dtype=torch.float16)
    net = nn.Sequential(nn.Linear(8, CLASSES)).half()
    classes = net(hidden).argmax(1)
    install(net, ["0"])
    gradients = []
    for kind in (torch.float16, torch.float32):
        values = (hidden * 20).to(kind).requires_grad_()
        with lazily():
            loss = F.cross_entropy(net.to(kind)(values).float(), classes)
        (loss * 2.0**16).backward()
        gradients.append(values.grad.float())
    assert difference(*gradients) < 1e-2


def test_a_target_out_of_range_is_an_error():
    net = net_of()
    install(net, ["0"])
    with lazily():
        output = net(torch.randn(2, 16))
    for wrong in (-3, CLASSES):
        with pytest.raises((IndexError, RuntimeError)):
            F.cross_entropy(output, torch.tensor([0, wrong]))


def test_the_largest_logits_are_found_without_all_logits():
    net = net_of()
    hidden = torch.randn(3, 7, 16)
    plain = net(hidden)
    install(net, ["0"])
    with lazily():
        output = net(hidden)
    for dim, logits, whole in ((-1, output, plain), (1, output.mT, plain.mT)):
        assert torch.equal(logits.argmax(dim), whole.argmax(dim))
    assert torch.equal(output.float().argmax(-1, keepdim=True), plain.argmax(-1, keepdim=True))


def test_logits_can_be_read_as_long_as_the_weight_is_the_same():
    net = net_of()
    hidden = torch.randn(3, 16)
    plain = net(hidden)
    install(net, ["0"])
    with lazily():
        first, second = net(hidden), net(hidden)
    assert (first.shape, first.dtype, first.device) == (plain.shape, plain.dtype, plain.device)
    assert first.requires_grad
    assert len(first) == 3
    with torch.inference_mode():
        assert torch.equal(first, plain)
    F.cross_entropy(first, torch.tensor([1, 2, 3])).backward()
    with torch.no_grad():
        net[0].weight.add_(1)
    assert torch.equal(first.detach(), plain)  # made before
    with pytest.raises(UserError, match=r"head=plain"):
        second.sum()
    with pytest.raises(UserError, match=r"before optimizer.step"):
        F.cross_entropy(second, torch.tensor([1, 2, 3]))


def test_a_custom_function_gets_logits_with_a_gradient():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES)

        def forward(self, x):
            return Double.apply(self.head(self.layer(x)))

    plain = Net()
    net = copy.deepcopy(plain)
    x, classes = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    model = HybridModel(net, cpu_world(), head="fused", example_inputs=x)
    model.train_step(x, classes, F.cross_entropy)
    F.cross_entropy(plain(x), classes).backward()
    assert difference(net.head.weight.grad, plain.head.weight.grad) < CLOSE


def test_the_head_is_the_last_linear_layer_or_what_a_model_says_it_is():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 70_000), nn.Linear(4, 3))
    assert head_of(net, "fused").names == ("2",)
    assert head_of(net, "auto").names == head_of(net, "plain").names == ()
    net.get_output_embeddings = lambda: net[1]
    assert head_of(net, "auto").names == ("1",)
    assert head_of(nn.Sequential(nn.Tanh()), "fused").names == ()
