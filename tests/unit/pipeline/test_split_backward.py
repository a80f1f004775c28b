"""A backward in two parts: equal to the whole one, and whole where that cannot be."""

import copy
import weakref

import pytest
import torch
from support.compare import hybrid, plain_step
from support.nets import WIDTH, TanhLinear, regression
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hybridtrain.errors import UserError
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.split_backward import SplitBackward, divide

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def in_parts(output, gradient, x):
    division = divide([output], [x])
    assert division is not None
    return SplitBackward(division, [(output, gradient)], [x])


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.inner(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Parts(nn.Module):
    """A node with several outputs, of which each goes another way."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        a, b, c = self.wide(x).chunk(3, dim=-1)
        return a * torch.sigmoid(b) + c.detach()


class CrossAttention(nn.Module):
    """Several nodes lead to parts of one weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x):
        x = x[:, None]
        return self.inner(x, 2 * x, 3 * x)[0][:, 0]


class Twice(TanhLinear):
    def forward(self, x):
        return super().forward(super().forward(x))


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return _Scale.apply(x, self.weight)


class ReentrantCheckpoint(TanhLinear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class OwnCheckpoint(TanhLinear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class OnlyWeights(nn.Module):
    """A way from the output to weights that no input is on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.weight)


DIVIDED = {
    "linear": TanhLinear,
    "two layers": lambda: nn.Sequential(TanhLinear(), nn.LayerNorm(WIDTH), TanhLinear()),
    "several outputs": Parts,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "weights without inputs": OnlyWeights,
    "a frozen layer": lambda: nn.Sequential(TanhLinear().requires_grad_(False), TanhLinear()),
    "no weights": nn.Tanh,
}
WHOLE = {
    "an lstm, which computes all of its gradients at once": Lstm,
    "a checkpoint of the model's own": lambda: OwnCheckpoint(),
    "a weight that is used twice": Twice,
    "parts of a weight": CrossAttention,
    "an autograd.Function with weights": OwnFunction,
    "a reentrant checkpoint": ReentrantCheckpoint,
}


def make(kind):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", DIVIDED.values(), ids=DIVIDED)
def test_the_parts_of_a_backward_equal_the_whole_one_to_the_bit(kind):
    net, x = make(kind), torch.rand(5, WIDTH)
    whole, x_whole, x_parts = copy.deepcopy(net), x.clone(), x.clone()
    weights = list(net.parameters())
    for model, given in ((whole, x_whole), (net, x_parts)):
        given.requires_grad_()
        output = model(given)
        gradient = torch.linspace(-1, 1, output.numel()).view_as(output)
        if model is whole:
            output.backward(gradient)
    parts = in_parts(output, gradient, x_parts)
    parts.to_input()
    assert torch.equal(x_parts.grad, x_whole.grad)
    assert all(weight.grad is None for weight in weights), "a weight's gradient came too early"
    parts.to_weights()
    for mine, theirs in zip(weights, whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("kind", WHOLE.values(), ids=WHOLE)
def test_a_backward_that_cannot_be_divided_is_left_whole(kind):
    x = torch.rand(5, WIDTH, requires_grad=True)
    output = make(kind)(x)
    assert divide([output], [x]) is None


def test_what_only_the_first_part_needs_is_given_up_after_it():
    x = torch.rand(5, WIDTH, requires_grad=True)
    linear = nn.Linear(WIDTH, WIDTH)
    before = x + 1
    inside = before * before  # saves `before`, and is saved by the linear layer for its weight
    y = linear(inside)
    kept, given_up = weakref.ref(inside), weakref.ref(before)
    parts = in_parts(y, torch.ones_like(y), x)
    del before, inside, y
    assert given_up() is not None
    parts.to_input()
    assert given_up() is None
    assert kept() is not None
    parts.to_weights()
    assert kept() is None
    assert linear.weight.grad is not None


def train(net, *batches, **options):
    """Gradients of the pipeline and of the plain model."""
    plain = copy.deepcopy(net)
    model = hybrid(net, **options)
    for batch in batches:
        model.train_step(*batch, F.mse_loss)
        plain_step(plain, *batch)
    return dict(model.named_parameters()), dict(plain.named_parameters())


@pytest.mark.parametrize("kind", [*DIVIDED.values(), *WHOLE.values()], ids=[*DIVIDED, *WHOLE])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.quick_cases(3)
def test_a_pipeline_with_any_layer_in_any_stage_adds_up_the_gradients_of_the_plain_model(kind, at):
    torch.manual_seed(0)
    layers = [TanhLinear() for _ in range(3)]
    layers[at] = nn.Sequential(TanhLinear(), kind(), TanhLinear())
    mine, theirs = train(
        nn.Sequential(*layers), regression(7, 1), regression(6, 2), nb_part=3, schedule="zb-h1"
    )
    for name, parameter in theirs.items():
        assert (parameter.grad is None) == (mine[name].grad is None)
        assert parameter.grad is None or torch.equal(mine[name].grad, parameter.grad), name


class NowAndThen(TanhLinear):
    """Uses its weight twice in every other micro-batch, so that its backward is whole there."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        return x if self.calls % 2 else super().forward(x)


def test_gradients_are_added_up_in_order_where_only_some_micro_batches_are_divided():
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), TanhLinear(), NowAndThen())
    mine, theirs = train(net, regression(23), nb_part=3, chunks=4, schedule="zb-h1")
    for name, parameter in theirs.items():
        assert torch.equal(mine[name].grad, parameter.grad), name


@pytest.fixture
def parts_run(monkeypatch):
    """The parts of backwards as they begin: (I or W, stage, micro-batch)."""
    seen = []
    whole, to_weights = ForwardStage.backward, ForwardStage.backward_to_weights

    def backward(self, kind, microbatch, *args):
        seen.append((kind, self.index, microbatch))
        return whole(self, kind, microbatch, *args)

    def backward_to_weights(self, microbatch, *args):
        seen.append(("W", self.index, microbatch))
        return to_weights(self, microbatch, *args)

    monkeypatch.setattr(ForwardStage, "backward", backward)
    monkeypatch.setattr(ForwardStage, "backward_to_weights", backward_to_weights)
    return seen


class Spy:
    """A reducer that notes when it is told to reduce."""

    def __init__(self, seen, stage):
        self._seen, self._stage = seen, stage

    def prepare_for_backward(self, roots):
        self._seen.append(("reduce", self._stage))

    def __getattr__(self, name):
        return lambda *args: None


def test_the_replicas_gradients_are_reduced_in_the_last_backward_to_the_weights(parts_run):
    model = hybrid(
        nn.Sequential(TanhLinear(), TanhLinear()), schedule="zb-h1", chunks=3, self_check=False
    )
    for stage in model.pipeline.stages:
        stage.reducer = Spy(parts_run, stage.index)
    model.train_step(*regression(6), F.mse_loss)
    own = [event for event in parts_run if event[1] == 1]
    assert own[-2:] == [("W", 1, 2), ("reduce", 1)]
    assert own.count(("reduce", 1)) == 1


def test_where_a_backward_is_whole_the_reduction_is_in_it_and_not_in_its_empty_second_part(
    parts_run,
):
    model = hybrid(
        nn.Sequential(TanhLinear(), Twice()), schedule="zb-h1", chunks=3, self_check=False
    )
    for stage in model.pipeline.stages:
        stage.reducer = Spy(parts_run, stage.index)
    model.train_step(*regression(6), F.mse_loss)
    own = [event for event in parts_run if event[1] == 1]
    assert own.index(("reduce", 1)) == own.index(("I", 1, 2)) + 1
    assert own.count(("reduce", 1)) == 1


@pytest.mark.parametrize("mode", ["always", "except_last", {"every": 1}], ids=str)
def test_what_is_recomputed_is_recomputed_once(mode):
    calls = []

    class Layer(TanhLinear):
        def forward(self, x):
            calls.append(x)
            return super().forward(x)

    model = hybrid(nn.Sequential(TanhLinear(), Layer()), schedule="zb-h1", recompute=mode)
    model.train_step(*regression(8), F.mse_loss)
    assert len(calls) == {"except_last": 7}.get(str(mode), 8)


@pytest.mark.parametrize("kind", DIVIDED.values(), ids=DIVIDED)
def test_both_parts_compute_the_products_of_the_whole_backward_and_no_more(kind):
    counts = []
    for divided in (False, True):
        x = torch.rand(5, WIDTH, requires_grad=True)
        output = make(kind)(x)
        with FlopCounterMode(display=False) as counter:
            if divided:
                parts = in_parts(output, torch.ones_like(output), x)
                parts.to_input()
                parts.to_weights()
            else:
                output.backward(torch.ones_like(output))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def on_the_tensor(y, hook):
    y.register_hook(hook)


def before_the_node(y, hook):
    y.grad_fn.register_prehook(lambda gradients: hook(gradients[0]))


def after_the_node(y, hook):
    y.grad_fn.register_hook(lambda _, gradients: hook(gradients[0]))


def retained(y, note):
    y.retain_grad()
    note(y)


class Hooking(nn.Linear):
    """Hangs `hook` onto its graph, in every other call."""

    def __init__(self, register, hook):
        super().__init__(WIDTH, WIDTH)
        self.register, self.hook, self.calls = register, hook, 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        if self.calls % 2 == 0:
            self.register(y, self.hook)
        return torch.tanh(y)


@pytest.mark.parametrize("register", [on_the_tensor, before_the_node, after_the_node])
def test_a_hook_inside_a_stage_that_looks_at_gradients_sees_each_once(register):
    seen = []
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), Hooking(register, lambda g: seen.append(g.clone())))
    plain = copy.deepcopy(net)
    for batch in (regression(8, 1), regression(7, 2)):
        plain_step(plain, *batch)
    expected, seen[:] = list(seen), []
    model = hybrid(net, schedule="zb-h1", split=[1, 1])
    net[1].calls = 0
    for batch in (regression(8, 1), regression(7, 2)):
        model.train_step(*batch, F.mse_loss)
    assert len(seen) == len(expected) == 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_gradient_that_is_retained_inside_a_stage_is_not_added_twice():
    made = []
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), Hooking(retained, made.append))
    train(net, regression(8), schedule="zb-h1")
    pipeline, plain = made[:2], made[2:]
    for mine, theirs in zip(pipeline, plain, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def new_tensor(gradient):
    return 2 * gradient


def in_place(gradient):
    gradient.mul_(2)


@pytest.mark.parametrize("hook", [new_tensor, in_place])
def test_a_hook_that_changes_a_gradient_inside_a_stage_does_so_once(hook):
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), Hooking(on_the_tensor, hook))
    mine, theirs = train(net, regression(8, 1), regression(7, 2), schedule="zb-h1")
    for name, parameter in theirs.items():
        assert torch.equal(mine[name].grad, parameter.grad), name


class SharedGradient(nn.Module):
    """One gradient goes to two layers; the second one's hook changes it for both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a = self.a(x)
        a.register_hook(in_place)
        return a + self.b(x)


def test_a_gradient_that_is_changed_in_place_after_its_use_is_refused():
    model = hybrid(nn.Sequential(TanhLinear(), SharedGradient()), schedule="zb-h1")
    with pytest.raises(UserError, match=r"a gradient inside the model .* is changed in") as error:
        model.train_step(*regression(8), F.mse_loss)
    assert "use schedule=1f1b" in str(error.value)
    assert "in the backward to the weights of micro-batch 0 on stage 1" in error.value.__notes__[0]


class LaterCheckpoint(TanhLinear):
    """Recomputes itself from its sixth call on."""

    def __init__(self):
        super().__init__()
        self.calls = self.runs = 0

    def run(self, x):
        self.runs += 1
        return super().forward(x)

    def forward(self, x):
        self.calls += 1
        if self.calls < 6:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=False)


def test_a_checkpoint_that_a_layer_begins_later_recomputes_once_for_each_micro_batch():
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), LaterCheckpoint())
    mine, theirs = train(net, regression(8, 1), regression(8, 2), schedule="zb-h1")
    assert net[1].runs == 8 + 3
    for name, parameter in theirs.items():
        assert torch.equal(mine[name].grad, parameter.grad), name


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class NoGradient(nn.Module):
    """A layer with weights, for which no gradient comes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + _NoGradient.apply(self.inner(x))


def test_a_layer_that_no_gradient_reaches_has_none_to_add():
    net = nn.Sequential(TanhLinear(), NoGradient())
    mine, theirs = train(net, regression(8), schedule="zb-h1")
    for name, parameter in theirs.items():
        assert (mine[name].grad is None) == (parameter.grad is None)
        assert parameter.grad is None or torch.equal(mine[name].grad, parameter.grad)


def test_nothing_of_a_step_is_kept_after_it():
    made = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = torch.tanh(super().forward(x))
            made.append(weakref.ref(y.untyped_storage()))
            return torch.tanh(y)

    model = hybrid(nn.Sequential(TanhLinear(), Watched(WIDTH, WIDTH)), schedule="zb-h1")
    for _ in range(2):
        model.train_step(*regression(8), F.mse_loss)
    assert not any(storage() is not None for storage in made)


def test_a_step_after_a_failed_backward_to_the_weights_is_exact(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(TanhLinear(), TanhLinear())
    plain, model = copy.deepcopy(net), hybrid(net, schedule="zb-h1", self_check=False)
    batch = regression(8)
    run = ForwardStage.backward_to_weights

    def failing(self, microbatch, reduce):
        if microbatch == 1:
            raise ArithmeticError("boom")
        run(self, microbatch, reduce)

    monkeypatch.setattr(ForwardStage, "backward_to_weights", failing)
    with pytest.raises(ArithmeticError, match="boom"):
        model.train_step(*batch, F.mse_loss)
    monkeypatch.undo()
    model.zero_grad()
    model.train_step(*batch, F.mse_loss)
    plain_step(plain, *batch)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
