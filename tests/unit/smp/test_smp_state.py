"""A step that changes what a forward reads besides its inputs is refused in its first call."""

import collections
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hybridtrain.smp as smp
from hybridtrain.errors import UserError

log = logging.getLogger("a script's")

TABLE = {"k": 1.0}
NESTED = {"a": [{"k": 1.0}]}
VALUES = [1.0]
QUEUE = collections.deque([1.0])
NAMES = {"one"}
ARRAY = np.ones(3)
OBJECTS = np.array([[1.0], "text"], dtype=object)
TENSOR = torch.ones(())
SPACE = SimpleNamespace(scale=1.0)
COUNTER = collections.Counter("a")
HISTORY = []


class Settings:
    scale = 1.0

    def __init__(self):
        self.factor, self.steps = 1.0, 0

    def get(self):
        return self.factor


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Scale:
    def __init__(self):
        self.factor = 1.0

    def __call__(self):
        return self.factor


SETTINGS, OBJECT, SLOTTED, CALLED = Settings(), Settings(), Slotted(), Scale()


def helper(table=TABLE):
    return table["k"]


def enclosed():
    cell = {"k": 1.0}

    def read():
        return cell["k"]

    def change():
        cell["k"] += 1

    return read, change


READ_CELL, CHANGE_CELL = enclosed()


def setting(owner, name, by=1.0):
    return lambda net: setattr(owner, name, getattr(owner, name) + by)


# what the forward reads: (its reading, the step's change, the name in the error)
CASES = {
    "a dictionary": (
        lambda net: TABLE["k"],
        lambda net: TABLE.update(k=TABLE["k"] + 1),
        "global variable TABLE",
    ),
    "a nested container": (
        lambda net: NESTED["a"][0]["k"],
        lambda net: NESTED["a"][0].update(k=2.0),
        "global variable NESTED",
    ),
    "a list": (lambda net: VALUES[-1], lambda net: VALUES.append(2.0), "global variable VALUES"),
    "a deque": (lambda net: QUEUE[-1], lambda net: QUEUE.append(2.0), "global variable QUEUE"),
    "a set": (lambda net: len(NAMES), lambda net: NAMES.add("two"), "global variable NAMES"),
    "a counter": (
        lambda net: COUNTER["a"],
        lambda net: COUNTER.update("a"),
        "global variable COUNTER",
    ),
    "an array": (
        lambda net: float(ARRAY[0]),
        lambda net: ARRAY.__iadd__(1),
        "global variable ARRAY",
    ),
    "an array of objects": (
        lambda net: OBJECTS[0][0],
        lambda net: OBJECTS[0].append(1),
        "global variable OBJECTS",
    ),
    "a tensor": (lambda net: TENSOR, lambda net: TENSOR.add_(1), "global variable TENSOR"),
    "a tensor's data": (
        lambda net: TENSOR,
        lambda net: TENSOR.data.add_(1),
        "global variable TENSOR",
    ),
    "an object's attribute": (
        lambda net: OBJECT.factor,
        setting(OBJECT, "factor"),
        "global variable OBJECT",
    ),
    "an attribute behind a method": (
        lambda net: SETTINGS.get(),
        setting(SETTINGS, "factor"),
        "global variable SETTINGS",
    ),
    "an attribute behind a call": (
        lambda net: CALLED(),
        setting(CALLED, "factor"),
        "global variable CALLED",
    ),
    "a slot": (lambda net: SLOTTED.scale, setting(SLOTTED, "scale"), "global variable SLOTTED"),
    "a namespace": (lambda net: SPACE.scale, setting(SPACE, "scale"), "global variable SPACE"),
    "a class attribute": (
        lambda net: Settings.scale,
        setting(Settings, "scale"),
        "class attribute Settings.scale",
    ),
    "a default argument": (
        lambda net: helper(),
        lambda net: TABLE.update(k=TABLE["k"] + 1),
        "default of helper's argument table",
    ),
    "a variable of an enclosing function": (
        lambda net: READ_CELL(),
        lambda net: CHANGE_CELL(),
        "variable cell of an enclosing function",
    ),
    "a module's container": (
        lambda net: net.table["k"],
        lambda net: net.table.update(k=2.0),
        "table of the model",
    ),
    "a buffer": (lambda net: net.factor, lambda net: net.factor.add_(1), "factor of the model"),
    "a class attribute of the model": (
        lambda net: net.shift,
        lambda net: setattr(type(net), "shift", type(net).shift + 1),
        "class attribute .*shift",
    ),
}


def script(read):
    class Net(nn.Module):
        shift = 1.0

        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)
            self.table = {"k": 1.0}
            self.register_buffer("factor", torch.ones(()))

        def forward(self, x):
            return self.two(torch.tanh(self.one(x))) * read(self)

    torch.manual_seed(1)
    return smp.DistributedModel(Net())


@pytest.fixture(autouse=True)
def initialized():
    own = {"engine": "local", "devices": "cpu"}
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "hybridtrain": own})
    yield
    smp.shutdown()


X, Y = torch.randn(8, 4), torch.arange(8) % 3


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_changes_what_a_forward_reads_is_refused_before_the_forward(case):
    read, change, name = CASES[case]
    model = script(read)

    @smp.step
    def train_step(model, x, y):
        change(model.get_module())
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    with pytest.raises(UserError, match=rf"train_step changes (the )?{name}, which .*reads"):
        train_step(model, X, Y)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_change_after_the_models_call_is_refused_too():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * TABLE["k"]

    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Scaled(4, 3)))

    @smp.step
    def train_step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        TABLE["k"] += 1

    with pytest.raises(UserError, match="train_step changes the global variable TABLE"):
        train_step(model, X, Y)


def test_a_step_may_change_what_no_forward_reads():
    class Counted(Settings):
        pass

    settings = Counted()

    def read(net):
        log.debug("a forward")
        return settings.factor * TABLE["k"]

    model = script(read)
    steps, before = settings.steps, len(HISTORY)

    @smp.step
    def train_step(model, x, y):
        log.debug("a step")
        settings.steps += 1
        COUNTER["steps"] += 1
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        HISTORY.append(loss.item())
        return loss

    for _ in range(2):
        train_step(model, X, Y)
    assert settings.steps == steps + 8
    assert len(HISTORY) == before + 8


def test_a_change_between_the_steps_that_is_passed_as_an_argument_gives_each_batch_its_value():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x, factor):
            return self.two(torch.tanh(self.one(x))) * factor

    torch.manual_seed(1)
    net = Net()
    model = smp.DistributedModel(net)

    @smp.step
    def evaluate(model, x):
        TABLE["k"] += 1
        return model(x, torch.tensor(TABLE["k"]))

    start = TABLE["k"]
    parts = [net(x, start + 1 + i).detach() for i, x in enumerate(X.chunk(4))]
    assert torch.equal(evaluate(model, X).concat(), torch.cat(parts))
