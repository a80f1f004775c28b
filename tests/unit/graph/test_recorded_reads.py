# ruff: noqa: PT017
"""A traced forward knows what it has read, and is not traced where a graph would differ."""

import collections.abc
import contextvars
import copy
import functools
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traced import WIDTH, Body, assert_same, hybrid, linear, loss_of, samples
from torch import nn

from hybridtrain.errors import ConfigError, SplitError, UserError

K, LIMIT = 1.0, 3.0
TABLE = {"scale": 1.0, "nested": [1.0, {"deep": 1.0}]}
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
SETTINGS = types.SimpleNamespace(scale=1.0)


pytestmark = pytest.mark.usefixtures("seeded")


def plain_number(x):
    return K


def made_in(scale):
    def inner(x):
        return x * scale

    def change(value):
        nonlocal scale
        scale = value

    return inner, change


class Config:
    factor = 1.0

    def __init__(self):
        self.scale = self._hidden = 1.0

    @property
    def doubled(self):
        return 2 * self._hidden

    def __getattr__(self, name):  # as transformers' attribute_map
        if name == "mapped":
            return self.__dict__["scale"]
        raise AttributeError(name)


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Reading(Body):
    """Has all that a forward may read."""

    of_class = 1.0

    def __init__(self, body):
        super().__init__(body)
        self._k, self.flag, self.words = 1.0, False, ["a", "b"]
        self.config, self.slots, self.space = Config(), Slots(), types.SimpleNamespace(scale=1.0)
        self.table, self.pair = {"scale": 1.0, "inside": {"deep": [1.0]}}, (1.0, 2.0)
        self.activation, self.partial = torch.tanh, functools.partial(torch.add, alpha=1.0)
        self.closed, self.change_closed = made_in(1.0)
        self.plain = torch.ones(WIDTH)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)

    @property
    def k(self):
        return self._k


def through(read):
    return lambda net, x: net.c(net.b(net.a(x)) * read(net, x))


def with_default(x, scales={"scale": 1.0}):  # noqa: B006
    return x * scales["scale"]


def set_global(net):
    global K
    K = 2.0


CASES = {
    "private": (lambda net, x: net._k, lambda net: setattr(net, "_k", 2.0)),
    "property": (lambda net, x: net.k, lambda net: setattr(net, "_k", 2.0)),
    "config": (lambda net, x: net.config.scale, lambda net: setattr(net.config, "scale", 2.0)),
    "property of a config": (
        lambda net, x: net.config.doubled,
        lambda net: setattr(net.config, "_hidden", 2.0),
    ),
    "class attribute of a config": (
        lambda net, x: net.config.factor,
        lambda net: setattr(net.config, "factor", 2.0),
    ),
    "__getattr__": (
        lambda net, x: net.config.mapped,
        lambda net: setattr(net.config, "scale", 2.0),
    ),
    "slots": (lambda net, x: net.slots.scale, lambda net: setattr(net.slots, "scale", 2.0)),
    "namespace": (lambda net, x: net.space.scale, lambda net: setattr(net.space, "scale", 2.0)),
    "dict": (lambda net, x: net.table["scale"], lambda net: net.table.update(scale=2.0)),
    "nested": (
        lambda net, x: net.table["inside"]["deep"][0],
        lambda net: net.table["inside"]["deep"].append(2.0),
    ),
    "tuple": (lambda net, x: net.pair[0], lambda net: setattr(net, "pair", (2.0, 2.0))),
    "list": (lambda net, x: len(net.words), lambda net: net.words.append("c")),
    "class attribute": (lambda net, x: net.of_class, lambda net: setattr(net, "of_class", 2.0)),
    "getattr": (lambda net, x: getattr(net, "_k"), lambda net: setattr(net, "_k", 2.0)),  # noqa: B009
    "hasattr": (lambda net, x: 1 + hasattr(net, "late"), lambda net: setattr(net, "late", 1)),
    "function": (
        lambda net, x: net.activation(x),
        lambda net: setattr(net, "activation", torch.sigmoid),
    ),
    "partial": (
        lambda net, x: net.partial(x, x),
        lambda net: setattr(net, "partial", functools.partial(torch.add, alpha=2.0)),
    ),
    "closure": (lambda net, x: net.closed(x), lambda net: net.change_closed(2.0)),
    "default": (lambda net, x: with_default(x), lambda net: None),
    "buffer": (
        lambda net, x: net.buffer,
        lambda net: setattr(net, "buffer", torch.full((WIDTH,), 2.0)),
    ),
    "hidden buffer": (
        lambda net, x: net.hidden,
        lambda net: setattr(net, "hidden", torch.full((WIDTH,), 2.0)),
    ),
    "plain tensor": (
        lambda net, x: net.plain,
        lambda net: setattr(net, "plain", torch.full((WIDTH,), 2.0)),
    ),
    "global": (lambda net, x: plain_number(x), set_global),
    "global dict": (
        lambda net, x: TABLE["nested"][1]["deep"],
        lambda net: TABLE["nested"][1].update(deep=2.0),
    ),
    "global object": (lambda net, x: SETTINGS.scale, lambda net: setattr(SETTINGS, "scale", 2.0)),
    "context": (lambda net, x: CONTEXT.get(), lambda net: CONTEXT.set(2.0)),
    "method": (
        lambda net, x: net.extra_repr() or 1,
        lambda net: setattr(net, "extra_repr", lambda: 2),
    ),
}


@pytest.fixture
def globals_restored():
    global K
    before, table = (K, SETTINGS.scale), copy.deepcopy(TABLE)
    yield
    K, SETTINGS.scale = before
    TABLE.clear()
    TABLE.update(table)
    with_default.__defaults__[0]["scale"] = 1.0
    CONTEXT.set(1.0)
    if "of_class" in vars(Reading):
        Reading.of_class = 1.0


def output_of(model, net, x):
    """Whether the model has the output of the plain module; None if it refuses."""
    whole = torch.cat([net(part) for part in x.tensor_split(model.options.chunks)])
    try:
        return torch.equal(model(x), whole)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert "since the model was traced: undo the change, or" in str(error)
        return None


@pytest.mark.usefixtures("globals_restored")
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick_cases(11)
def test_what_the_forward_has_read_may_not_change(case, exported):
    read, change = CASES[case]

    def body(net, x):
        if exported:
            assert isinstance(x * 1, torch.Tensor)  # which torch.fx cannot follow
        return net.c(net.b(net.a(x)) * read(net, x))

    net = Reading(body)
    model = hybrid(net, 2, example_inputs=samples()).eval()
    assert output_of(model, net, samples()) is True
    if case == "default":
        with_default.__defaults__[0]["scale"] = 2.0
    change(net)
    assert output_of(model, net, samples()) is None


def test_attributes_of_the_class_count_too():
    net = Reading(through(lambda net, x: net.of_class * type(net).of_class))
    model = hybrid(net, 2).eval()
    Reading.of_class = 2.0
    try:
        with pytest.raises(ConfigError, match=r"of_class has changed from 1\.0 to 2\.0"):
            model(samples())
    finally:
        Reading.of_class = 1.0
    assert output_of(model, net, samples()) is True


def test_a_change_that_is_taken_back_or_makes_no_difference_is_none():
    net = Reading(through(lambda net, x: net._k * net.table["scale"] * len(net.words)))
    model = hybrid(net, 2).eval()
    net._k = 2.0
    assert output_of(model, net, samples()) is None
    net._k = float("1.0")
    net.words, net.table = list(net.words), copy.deepcopy(net.table)
    net.flag, net.config.scale = True, 3.0  # which nothing reads
    assert output_of(model, net, samples()) is True
    net.words.append("c")
    assert output_of(model, net, samples()) is None


def test_a_global_hook_put_on_later_is_an_error():
    net = Reading(through(lambda net, x: 1))
    model = hybrid(net, 2).eval()
    with (
        torch.nn.modules.module.register_module_forward_hook(lambda *args: None),
        pytest.raises(ConfigError, match=r"torch\.nn had a hook registered after tracing"),
    ):
        model(samples())
    assert output_of(model, net, samples()) is True


@pytest.mark.thorough
def test_peft_may_switch_adapters_off_and_on_again():
    peft = pytest.importorskip("peft")
    net = nn.Sequential(*(linear() for _ in range(4)))
    net = Body(lambda net, x: net.c(net.b(net.a(x))))
    config = peft.LoraConfig(r=2, target_modules=["a", "b", "c"], init_lora_weights=False)
    net = peft.get_peft_model(net, config)

    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            assert isinstance(x * 1, torch.Tensor)
            return self.net(x)

    whole = Exported()
    model = hybrid(whole, 2, example_inputs=samples()).eval()
    with net.disable_adapter():
        assert output_of(model, whole, samples()) is None
    assert output_of(model, whole, samples()) is True
    net.merge_adapter()
    assert output_of(model, whole, samples()) is None


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.steps, self.seen = linear(), 0, []
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.steps += 1
        self.seen.append(self.steps)
        self.mean = self.mean + 1
        return self.linear(x)


def test_what_a_module_that_is_called_whole_changes_is_no_change():
    net = Body(lambda net, x: net.c(net.b(net.a(x))))
    net.b = Counting()
    model = hybrid(net, 2, example_inputs=samples())
    for _ in range(3):
        model.train_step(samples(), None, loss_of)
    assert net.b.steps == 9


class Leaving(nn.Module):
    scale = 1.0

    def forward(self, x):
        self.scale = 2.0
        return x


def test_a_number_that_a_layer_leaves_to_the_models_forward_is_an_error_in_the_first_step():
    net = Body(lambda net, x: net.c(net.b(net.a(x))) * net.b.scale)
    net.b = Leaving()
    model = hybrid(net, 2, self_check=False).eval()
    with pytest.raises(ConfigError, match=r"b\.scale has changed from missing to 2\.0"):
        model(samples())


# Python that a stand-in for a tensor would answer otherwise

LOSSES, CACHE = [], {}


class Helper:
    calls = 0

    def __init__(self):
        self.steps, self.last = 0, None


HELPER = Helper()


class Pair(nn.Module):
    def forward(self, x):
        return x, 2 * x


def swallowing(ask):
    def read(net, x):
        try:
            return 2 if ask(x) else 3
        except Exception:
            return 5

    return read


def appends_to_a_global(net, x):
    LOSSES.append(x.mean())
    return 1 + sum(LOSSES[-1:])


def appends_to_a_closure(net, x, kept=[]):  # noqa: B006
    kept.append(x.mean())
    return 1 + len(kept)


def counts_in_an_object(net, x):
    HELPER.steps += 1
    return HELPER.steps


def counts_in_a_class(net, x):
    Helper.calls += 1
    return Helper.calls


def counts_in_a_global(net, x):
    global LIMIT
    LIMIT = LIMIT + 1
    return LIMIT


def keeps_in_a_cache(net, x):
    return 1 + CACHE.setdefault("first", x.mean())


def hands_over(net, x):
    HELPER.last = x
    return HELPER.last


def matches(net, x):
    match net.pair_of(x):
        case [first, second]:
            return first + second
        case _:
            return 2


def sets_requires_grad(net, x):
    x.detach().requires_grad = True
    return 2


def counter():
    count = 0

    def read(net, x):
        nonlocal count
        count += 1
        return count

    return read


@functools.lru_cache
def cached(width):
    return torch.ones(width) * 2


ODD = {
    "abc": lambda net, x: 2 if isinstance(net.pair_of(x), collections.abc.Sequence) else 3,
    "mapping": lambda net, x: 2 if isinstance(net.pair_of(x), collections.abc.Mapping) else 3,
    "type": lambda net, x: 2 if type(net.pair_of(x)) is tuple else 3,
    "type of a tensor": lambda net, x: 2 if type(net.a(x)) is torch.Tensor else 3,
    "hasattr": lambda net, x: 2 if hasattr(net.a(x), "logits") else 3,
    "getattr": lambda net, x: 1 + getattr(net.a(x), "aux_loss", 1),
    "callable": lambda net, x: 2 if callable(net.a(x)) else 3,
    "match": matches,
    "condition": swallowing(lambda x: x.mean() > 0),
    "len": swallowing(lambda x: len(x.sum(0)) == WIDTH),
    "float": swallowing(lambda x: float(x.mean()) > 100),
    "int": swallowing(lambda x: int(x.mean() * 100) > 1000),
    "in": swallowing(lambda x: 3.0 in x),
    "sorted": swallowing(lambda x: sorted([x.mean(), x.sum()])[0] is None),
    "enumerate": swallowing(lambda x: list(enumerate(x.sum(0)))),
    "zip": lambda net, x: sum(a * b for a, b in zip(x.sum(0), x.sum(0), strict=True)),
    "a global list": appends_to_a_global,
    "a default argument": appends_to_a_closure,
    "an object": counts_in_an_object,
    "a class": counts_in_a_class,
    "a global": counts_in_a_global,
    "nonlocal": counter(),
    "setdefault": keeps_in_a_cache,
    "an object in between": hands_over,
    "requires_grad": sets_requires_grad,
    "lru_cache": lambda net, x: cached(WIDTH),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.quick_cases(2)
def test_python_that_a_stand_in_answers_otherwise_is_exact_or_refused(case):
    net = Body(lambda net, x: net.c(net.b(x) * ODD[case](net, net.a(x))))
    net.pair_of = Pair()
    cached.cache_clear()
    try:
        assert_same(net, samples(), 2, example_inputs=samples())
    except SplitError as error:
        assert "\n" not in str(error)
        assert "Body cannot be traced" in str(error)
    assert not LOSSES
    assert not CACHE
    assert (HELPER.steps, HELPER.last, Helper.calls, LIMIT) == (0, None, 0, 3.0)
    assert "type" not in globals()
    assert type(cached(WIDTH)) is torch.Tensor


def forces(net, x):
    x = x.detach().requires_grad_()
    h = net.b(torch.tanh(net.a(x)) + x)
    energy = net.c(h + x).pow(2).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def of_an_input(net, x):
    h = net.b(torch.tanh(net.a(x)))
    return net.c(torch.autograd.grad(h.sum(), x, create_graph=True)[0])


def backward(net, x):
    h = net.b(torch.tanh(net.a(x)))
    h.sum().backward(retain_graph=True)
    return net.c(h)


def by_vjp(net, x):
    h, pullback = torch.func.vjp(lambda y: net.b(torch.tanh(net.a(y))), x)
    return net.c(pullback(h)[0])


@pytest.mark.parametrize("body", [forces, of_an_input, backward, by_vjp])
@pytest.mark.quick_cases(2)
def test_a_gradient_that_the_forward_takes_itself_is_refused_or_exact(body):
    try:
        assert_same(Body(body), samples(), 2, example_inputs=samples())
    except SplitError as error:
        assert "\n" not in str(error)
        assert "separate nn.Module" in str(error)
        assert body is by_vjp or "computes a gradient in the forward itself" in str(error)


# Any Python

GLOBALS = {"number": 1.0, "flag": True, "items": [1.0, 2.0]}
CHANGING = [
    "_k",
    "flag",
    "config",
    "table",
    "words",
    "global",
    "closure",
    "buffer",
    "class",
    "none",
]


def helper(net, x):
    return x * GLOBALS["number"] + len(GLOBALS["items"]) * net.config.scale


STATEMENTS = [
    lambda net, x: x * net._k,
    lambda net, x: net.a(x) if net.flag else torch.tanh(x),
    lambda net, x: x + net.config.scale,
    lambda net, x: x * net.table["scale"] + sum(net.table["inside"]["deep"]),
    lambda net, x: x * len(net.words),
    helper,
    lambda net, x: net.closed(x),
    lambda net, x: x + net.buffer * net.hidden,
    lambda net, x: x * type(net).of_class + net.of_class,
    lambda net, x: x * 2 if isinstance(net.config, Config) and GLOBALS["flag"] else x,
    lambda net, x: (lambda y: y + net._k)(x),
    lambda net, x: [x * word.count("a") + x for word in net.words][-1],
    lambda net, x: x * 2 if isinstance(x, torch.Tensor) else x,
    lambda net, x: x * 2 if x.dim() == 2 else x,
    lambda net, x: (net.pair[0] * x).clamp(max=net.config.doubled),
]


def change_at_random(net, what):
    match what:
        case "_k":
            net._k = 2.0
        case "flag":
            net.flag = not net.flag
        case "config":
            net.config.scale, net.config._hidden = 3.0, 0.25
        case "table":
            net.table["inside"]["deep"][0] = 4.0
        case "words":
            net.words.append("aa")
        case "global":
            GLOBALS["items"].append(3.0)
            GLOBALS["number"], GLOBALS["flag"] = 2.0, False
        case "closure":
            net.change_closed(3.0)
        case "buffer":
            net.buffer, net.hidden = net.buffer * 2, net.hidden * 3
        case "class":
            Reading.of_class = 2.0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(range(len(STATEMENTS))), min_size=1, max_size=4),
    st.sampled_from(CHANGING),
    st.booleans(),
)
@pytest.mark.thorough
def test_any_python_is_exact_or_refused_before_and_after_a_change(numbers, change, trains):
    def body(net, x):
        x = net.a(x)
        for number in numbers:
            x = STATEMENTS[number](net, x)
        x = net.b(x)
        for number in numbers[::-1]:
            x = STATEMENTS[number](net, x)
        return net.c(x)

    before = copy.deepcopy(GLOBALS)
    net = Reading(body).train(trains)
    try:
        model = hybrid(net, 2, example_inputs=samples()).train(trains)
        for what in ("none", change):
            change_at_random(net, what)
            whole = torch.cat([net(part) for part in samples().tensor_split(3)])
            try:
                assert torch.equal(model(samples()), whole)
            except UserError as error:
                assert what != "none"
                assert "since the model was traced" in str(error)
    finally:
        GLOBALS.clear()
        GLOBALS.update(before)
        Reading.of_class = 1.0
