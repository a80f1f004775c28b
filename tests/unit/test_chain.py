"""Any module is cut where its own submodules are called, and computes what it computed whole."""

import copy
import random
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain import HybridModel, World
from hybridtrain.errors import BatchError, ConfigError, SplitError
from hybridtrain.graph.chain import ChainBuilder
from hybridtrain.microbatch import chunk_sizes, split

WIDTH, ROWS, CHUNKS = 6, 7, 3


@pytest.fixture(autouse=True)
def _seeded(one_intra_op_thread):
    torch.manual_seed(0)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def rows(seed=0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Any, _: Any = None) -> Tensor:
    """Every tensor of the output counts, each in its own measure."""
    leaves = [t for t in tree_leaves(plain(output)) if isinstance(t, Tensor)]
    return sum(((k + 1) * t.float().tanh().mean() for k, t in enumerate(leaves)), torch.zeros(()))


def plain(output: Any) -> Any:
    """A dataclass as the dict of its fields."""
    return vars(output) if hasattr(output, "__dataclass_fields__") else output


def call(net: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def hybrid(net: nn.Module, stages: int, **options: Any) -> HybridModel:
    return HybridModel(net, World.from_env(nb_part=stages), chunks=CHUNKS, **options)


def assert_same(net: nn.Module, inputs: Any, stages: int, **options: Any) -> HybridModel:
    """`net` in `stages` gives bit for bit what it gives whole: outputs, gradients, buffers."""
    whole = copy.deepcopy(net)
    model = hybrid(net, stages, **options)
    model.train_step(inputs, None, loss_of)
    sizes = chunk_sizes(ROWS, CHUNKS)
    for part, size in zip(split(inputs, sizes), sizes, strict=True):
        loss_of(call(whole, part)).backward(torch.tensor(size / ROWS))
    assert len(model.stages) == stages
    assert list(model.state_dict()) == list(whole.state_dict())
    for (name, ours), (same, theirs) in zip(
        net.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert name == same
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name
    model.eval()
    whole.eval()
    with torch.no_grad():
        outputs = [call(whole, part) for part in split(inputs, sizes)]
    ours = tree_leaves(plain(model(inputs)))
    theirs = [tree_leaves(plain(output)) for output in outputs]
    assert type(model(inputs)) is type(outputs[0])
    for got, *parts in zip(ours, *theirs, strict=True):
        assert torch.equal(got, torch.cat(parts) if parts[0].dim() else torch.stack(parts))
    model.train()
    return model


class Residual(nn.Module):
    """Values that skip submodules, one of them in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (linear() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.first(x))
        z = self.norm(self.second(y))
        z += y
        w = self.third(self.act(z))
        return self.last(w + x) * y.mean() + z


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.both = linear(), linear(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, left, right, *, scale=1.0, mask=None):
        both_sides = torch.cat([self.left(left), self.right(right)], dim=1)
        out = self.both(both_sides) * scale
        return out if mask is None else out * mask


@dataclass
class Answer:
    value: Tensor
    hidden: tuple[Tensor, ...]


class Pair(NamedTuple):
    value: Tensor
    extra: Tensor


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = linear(), linear()

    def forward(self, x):
        y = self.first(x)
        z = self.second(y.tanh())
        return {
            "tuple": lambda: (z, y),
            "dict": lambda: {"value": z, "list": [y, x]},
            "dataclass": lambda: Answer(value=z, hidden=(y, x)),
            "namedtuple": lambda: Pair(z, y),
            "scalar": lambda: (z, z.mean()),
        }[self.kind]()


class Auxiliary(nn.Module):
    """As GoogLeNet: a second output, of other layers, in training only."""

    def __init__(self):
        super().__init__()
        self.first, self.side, self.second = linear(), linear(), linear()

    def forward(self, x):
        x = self.first(x)
        side = self.side(x) if self.training else None
        x = self.second(x)
        return Pair(x, side) if self.training else x


class OwnTensors(nn.Module):
    """Parameters and buffers of the model itself, used in several places."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.plain = torch.randn(WIDTH)
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x):
        y = self.first(x) * self.scale + self.shift
        z = self.second(y) + torch.ones(x.shape[0], 1) * self.scale
        return self.third(z * self.plain) * self.scale - self.shift


class Without(nn.Module):
    """A model that calls no submodule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("checkpoint", ["never", "always", {"every": 2}], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_values_that_skip_stages_arrive_and_so_do_their_gradients(stages, checkpoint):
    assert_same(Residual(), rows(), stages, checkpoint=checkpoint)


@pytest.mark.parametrize("cut", range(1, 7))
def test_every_place_to_cut_gives_the_same(cut):
    assert_same(Residual(), rows(), 2, split=[cut, 7 - cut])


@pytest.mark.parametrize(
    "inputs",
    [
        (rows(0), rows(1)),
        {"left": rows(0), "right": rows(1)},
        {"right": rows(1), "left": rows(0), "mask": rows(2), "scale": 0.5},
    ],
    ids=["positions", "keywords", "more keywords"],
)
def test_several_inputs_by_position_or_keyword(inputs):
    assert_same(TwoInputs(), inputs, 2, example_inputs=inputs)


def test_keywords_may_come_in_any_order():
    model = hybrid(TwoInputs(), 2)
    given = {"left": rows(0), "right": rows(1)}
    assert torch.equal(model(given), model(dict(reversed(given.items()))))
    assert torch.equal(model(given), model((rows(0), rows(1))))


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "namedtuple", "scalar"])
def test_outputs_keep_their_structure(kind):
    assert_same(Outputs(kind), rows(), 2)


def test_outputs_of_training_only_are_there_in_training_only():
    model = assert_same(Auxiliary(), rows(), 2, split=["second"])
    assert [layer.name for layer in model.stages[0].layers] == ["first"]


def test_tensors_of_the_model_itself_are_used_in_every_stage():
    net = OwnTensors()
    expected = copy.deepcopy(net)
    for part in rows().split([3, 2, 2]):
        (loss_of(expected(part)) * len(part) / ROWS).backward()
    hybrid(net, 3).train_step(rows(), None, loss_of)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        # the gradients of the stages' uses of `scale` are added up stage by stage
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


def test_a_model_without_submodules_is_one_layer():
    assert_same(Without(), rows(), 1)
    with pytest.raises(SplitError, match="a model of 1 layer cannot be cut into 2 stages"):
        hybrid(Without(), 2)


def test_tracing_leaves_the_model_as_it_was():
    net = OwnTensors()
    net.second.eval()
    attributes = {name: set(vars(part)) for name, part in net.named_modules()}
    hybrid(net, 3)
    assert {name: set(vars(part)) for name, part in net.named_modules()} == attributes
    assert [part.training for part in net.modules()] == [True, True, False, True]


# What tracing must not lose ------------------------------------------------------------------


class Inner(nn.Module):
    """A submodule with a body of its own, which `inside` fills."""

    def __init__(self, inside):
        super().__init__()
        self.first, self.second = linear(), linear()
        self.inside = inside

    def forward(self, x):
        return self.second(self.inside(self.first(x)))


class Outer(nn.Module):
    def __init__(self, inside):
        super().__init__()
        # the inner module is large enough to be looked into, and small enough to stay whole
        self.before, self.inner = linear(), Inner(inside)
        self.after = nn.Sequential(*(linear() for _ in range(8)))

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def names(model: HybridModel) -> list[str]:
    return [layer.name for stage in model.stages for layer in stage.layers]


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def without_grad(x):
    with torch.no_grad():
        y = x * 2
    return x + y


def by_chance(x):
    return x * 2 if random.random() < 0.5 else x / 2


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: x * 2 if x.sum() > 0 else x / 2,
        without_grad,
        Fivefold.apply,
        lambda x: Fivefold.apply(x),
    ],
    ids=["control flow", "no_grad", "autograd.Function", "autograd.Function by name"],
)
def test_what_a_graph_would_lose_stays_in_a_submodule_that_is_called_as_it_is(inside):
    model = assert_same(Outer(inside), rows(), 2)
    assert "inner" in names(model)
    assert "inner.first" not in names(model)


def test_a_choice_of_pythons_random_is_made_at_each_call():
    net = Outer(by_chance)
    state = random.getstate()
    model = hybrid(net, 2)
    assert random.getstate() == state
    model.eval()
    random.seed(0)
    seen = {tuple(model(rows()).sum(1).tolist()) for _ in range(20)}
    assert len(seen) > 1


def test_a_tensor_that_the_forward_makes_is_made_at_each_call():
    model = hybrid(Outer(lambda x: x + torch.zeros(len(x.shape)).sum() + torch.rand(1)), 2)
    assert not torch.equal(model(rows()), model(rows()))


def test_hooks_of_submodules_run_and_those_of_the_model_are_refused():
    net = Outer(torch.tanh)
    seen = []
    net.inner.register_forward_hook(lambda *args: seen.append("inner"))
    net.after[3].register_full_backward_hook(lambda *args: seen.append("after"))
    model = hybrid(net, 2)
    model.train_step(rows(), None, loss_of)
    assert sorted(seen) == ["after"] * CHUNKS + ["inner"] * CHUNKS
    net.register_forward_hook(lambda *args: None)
    with pytest.raises(SplitError, match="the model itself has hooks"):
        hybrid(net, 2).train_step(rows(), None, loss_of)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = linear(), linear(), nn.Dropout(0.5)

    def forward(self, x):
        x = F.dropout(self.first(x), 0.5, self.training)
        return self.drop(self.second(self.drop(x)))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), Dropping(), Dropping()
        self.rest = nn.Sequential(*(linear() for _ in range(30)))

    def forward(self, x):
        return F.dropout(self.rest(self.c(self.b(self.a(x)))), 0.5, self.training)


@pytest.mark.parametrize(
    "split",
    [["b"], ["c"], ["b.second"], ["c.drop"], ["b.second", "c.second"], ["b.drop", "c", "rest.5"]],
    ids=str,
)
def test_draws_do_not_depend_on_how_deep_the_model_is_cut(split):
    net = Wrapped()
    whole = copy.deepcopy(net)
    options = {"chunks": CHUNKS, "seed": 3}
    model = HybridModel(net, World.from_env(nb_part=len(split) + 1), split=split, **options)
    one = HybridModel(whole, World.from_env(nb_part=1), **options)
    for _ in range(3):
        assert torch.equal(
            model.train_step(rows(), None, loss_of).loss, one.train_step(rows(), None, loss_of).loss
        )
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model.eval()
    one.eval()
    assert torch.equal(model(rows()), one(rows()))


def test_a_part_that_was_switched_to_another_mode_is_not_mistaken_for_the_model():
    net = Wrapped()
    model = hybrid(net, 2, split=["b.second"])
    model.train_step(rows(), None, loss_of)
    net.b.eval()
    with pytest.raises(ConfigError, match="module 'b' was switched to another mode"):
        model.train_step(rows(), None, loss_of)


def test_a_part_that_keeps_its_mode_in_train_keeps_it():
    class Still(Dropping):
        def train(self, mode=True):
            return super().train(False)

    net = Wrapped()
    net.b, net.c = Still(), nn.Identity()
    net.rest.append(nn.Identity())
    net.b.train()

    def mean(model):
        return model(rows()).mean().item()

    model = hybrid(net, 2, split=["b.second"])
    with torch.no_grad():
        net.rest = nn.Sequential()
    assert not net.b.training
    assert mean(model.train()) != mean(model)  # the dropout around it is on
    torch.testing.assert_close(net.b(rows()), net.b(rows()))


class Body(nn.Module):
    """Three layers and a forward of the test's."""

    def __init__(self, body, **attributes):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.body = body
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.body(self, x)


def switched_off(net, x):
    y = net.a(x)
    with torch.set_grad_enabled(False):
        z = net.b(y)
    return net.c(y * z)


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def counts(net, x):
    net.calls += 1
    return net.c(net.b(net.a(x))) * net.calls


def asks_for_a_type(net, x):
    y = net.a(x)
    y = y * 2 if isinstance(y, Tensor) else y * 3
    return net.c(net.b(y))


def asks_for_grad(net, x):
    y = net.a(x) * 2 if torch.is_grad_enabled() else net.a(x)
    return net.c(net.b(y))


def has_a_tensor_hook(net, x):
    y = net.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    return net.c(net.b(y))


def reads_a_table(net, x):
    return net.c(net.b(net.a(x))) * net.c.table


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (switched_off, None),
        (lambda net, x: net.c(net.b(NewStyle.apply(net.a(x)))), r"(autograd\.Function|the type)"),
        (counts, "sets its attribute 'calls'"),
        (asks_for_a_type, None),
        (asks_for_grad, r"torch\.is_grad_enabled"),
        (has_a_tensor_hook, "control flow"),
        (reads_a_table, None),
    ],
)
def test_what_a_graph_would_lose_in_the_model_itself_is_given_up_and_named(body, says):
    net = Body(body, calls=0)
    net.c.register_buffer("table", torch.ones(WIDTH))
    if says is None:  # torch.export can follow these
        assert_same(net, rows(), 2, example_inputs=rows())
        return
    with pytest.raises(SplitError, match=rf"Body cannot be traced.*{says}"):
        hybrid(net, 2, example_inputs=rows())
    assert vars(net)["calls"] == 0


def in_place_through_a_view(net, x):
    y = net.a(x)
    head = y[:, :2]
    z = net.b(y)
    head.add_(1)
    return net.c(z * y)


def moving_mean(net, x):
    y = net.a(x - net.mean)
    z = net.b(y)
    net.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return net.c(z)


@pytest.mark.parametrize(
    "net",
    [
        lambda: Body(lambda net, x: net.c(net.b(net.a(x).chunk(2, 1)[0].repeat(1, 2).relu_()))),
        lambda: Body(moving_mean, mean=torch.zeros(WIDTH)),
    ],
    ids=["a view", "a buffer"],
)
def test_what_is_changed_in_place_stays_in_one_stage_with_what_it_is_part_of(net):
    assert_same(net(), rows(), 2)
    chain = ChainBuilder(Body(in_place_through_a_view)).chain()
    assert chain.no_cut_before == {1}
    with pytest.raises(SplitError, match=r"no cut between 'a' and 'b': .* changed in place"):
        hybrid(Body(moving_mean, mean=torch.zeros(WIDTH)), 3, split=[1, 1, 1])


def test_a_number_that_was_read_while_tracing_may_not_change():
    net = Body(lambda net, x: net.c(net.b(net.a(x))) * net.scale, scale=1.0)
    model = hybrid(net, 2)
    model(rows())
    net.scale = 0.5
    with pytest.raises(ConfigError, match=r"the model\.scale has changed from 1\.0 to 0\.5 since"):
        model(rows())


def test_buffers_of_submodules_stay_as_the_model_has_them():
    net = Body(lambda net, x: net.c(net.b(net.a(x))) + net.table)
    net.register_buffer("table", torch.ones(WIDTH), persistent=False)
    assert_same(net, rows(), 3)
    assert "table" not in net.state_dict()


def test_other_threads_do_not_see_that_a_model_is_traced():
    made, inside, done = [], threading.Event(), threading.Event()

    def elsewhere():
        inside.wait()
        made.append(nn.Sequential(linear(), nn.ReLU())(torch.zeros(1, WIDTH) + torch.arange(WIDTH)))
        done.set()

    def body(net, x):
        inside.set()
        done.wait()
        return net.c(net.b(net.a(x)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    hybrid(Body(body), 2)
    thread.join()
    assert type(made[0]) is Tensor


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_the_first_batch_may_come_without_gradients(grad):
    net = Shapes()
    model = hybrid(net, 2)
    with grad():
        model(sequences())
    model.train_step(sequences(), None, loss_of)
    assert net.first.weight.grad is not None


def test_a_scripted_submodule_is_called_as_it_is():
    net = Body(lambda net, x: net.c(net.b(net.a(x))))
    net.b = torch.jit.trace(linear(), rows())
    model = hybrid(net, 2)
    model.train_step(rows(), None, loss_of)
    assert len(names(model)) == 3


def test_parameters_that_no_layer_uses_keep_their_values():
    def make():
        torch.manual_seed(1)
        net = Body(lambda net, x: net.c(net.a(x)))
        net.unused = nn.Parameter(torch.randn(3))
        return net

    net = make()
    hybrid(net, 2)
    assert torch.equal(net.unused, make().unused)
    assert torch.equal(net.b.weight, make().b.weight)


# Where torch.fx cannot follow ----------------------------------------------------------------


class Shapes(nn.Module):
    """Python that looks at shapes and types, which torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = linear(), linear(), nn.Dropout(0.0)

    def forward(self, x, mask=None):
        if x.dim() == 3 and x.dtype == torch.float32:
            x = x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1]))
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.first(x) + positions[None, :, None]
        if mask is not None:
            x = x * mask[..., None]
        return {"out": self.drop(self.second(x.relu())), "hidden": x}


def sequences(length=5) -> Tensor:
    return torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(length))


def test_torch_export_follows_where_torch_fx_cannot(capfd):
    sample = {"x": sequences(), "mask": (sequences()[..., 0] > 0).float()}
    model = assert_same(Shapes(), sample, 2, example_inputs=sample)
    assert names(model) == ["first", "second", "drop"]
    assert capfd.readouterr() == ("", "")


def test_exported_models_take_other_numbers_of_rows_and_lengths():
    net = Shapes()
    whole = copy.deepcopy(net).eval()
    model = hybrid(net, 2, example_inputs=sequences()).eval()
    for given in (sequences()[:1], sequences()[:4], sequences(3), sequences(9)):
        torch.testing.assert_close(model(given)["out"], whole(given)["out"])


def test_a_model_that_needs_a_batch_to_be_traced_waits_for_it_with_its_parameters():
    net = Shapes()
    model = hybrid(net, 2)
    with pytest.raises(ConfigError, match=r"divided at its first batch.*example_inputs="):
        _ = model.stages
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = net.first.weight.clone()
    model.train_step(sequences(), None, loss_of)
    optimizer.step()
    assert len(model.stages) == 2
    assert not torch.equal(net.first.weight, before)


# What cannot be done is said -----------------------------------------------------------------


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.second(x)


def test_control_flow_in_the_model_itself_is_named_with_its_line():
    message = r"Decides cannot be traced.*test_chain\.py:\d+: `if x\.sum\(\) > 0:`.*submodule"
    with pytest.raises(SplitError, match=message):
        hybrid(Decides(), 2, example_inputs=rows())
    assert_same(Decides(), rows(), 1, example_inputs=rows())


def test_a_batch_with_other_inputs_than_the_model_was_traced_with_is_refused():
    model = hybrid(TwoInputs(), 2, example_inputs=(rows(0), rows(1)))
    message = "TwoInputs was traced with left, right, and this batch gives left, right, mask: .*sam"
    with pytest.raises(BatchError, match=message):
        model({"left": rows(0), "right": rows(1), "mask": rows(2)})
    for wrong in (rows(), (rows(),) * 5, {"left": rows(), "rihgt": rows()}):
        with pytest.raises(BatchError, match=r"TwoInputs\.forward\(left, right.* cannot be called"):
            model(wrong)
    sample = {"left": rows(0), "right": rows(1), "scale": 0.5}
    model = hybrid(TwoInputs(), 2, example_inputs=sample)
    with pytest.raises(BatchError, match=r"traced with scale=0\.5, and this batch gives scale=2"):
        model(sample | {"scale": 2})


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
    with pytest.raises(SplitError, match="'0' hands a Carrier to a later stage"):
        hybrid(net, 2).train_step(rows(), None, loss_of)
    hybrid(net, 1).train_step(rows(), None, loss_of)


def test_a_parameter_and_a_value_under_two_names_may_cross_a_cut():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            y = self.linear(x)
            return y, self.linear.weight, y

    class Uses(nn.Module):
        def forward(self, values):
            y, weight, again = values
            return (y.exp() @ weight) * again + again.tanh()

    assert_same(nn.Sequential(Twice(), Uses()), rows(), 2)


def test_a_dataclass_may_cross_a_cut():
    @dataclass
    class Package:
        value: Tensor
        note: str

    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return Package(self.linear(x), "note")

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, package):
            return self.linear(package.value)

    assert_same(nn.Sequential(Puts(), Takes()), rows(), 2)


def test_a_chain_is_cut_as_such_and_another_model_by_what_its_forward_calls():
    chain = ChainBuilder(nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()))).chain()
    assert [layer.name for layer in chain.layers] == ["0", "1.0", "1.1"]
    chain = ChainBuilder(Wrapped()).chain()
    assert [layer.name for layer in chain.layers][:4] == ["a", "b", "c", "rest.0"]
    finer = ChainBuilder(Wrapped()).chain({"c"})
    assert [layer.name for layer in finer.layers][:6] == [
        "a", "b", "c.first", "c.drop", "c.second", "c.drop@2",
    ]  # fmt: skip
    assert finer.units[:7] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]
