"""A comparison runs copies of the model, and restores everything else that its code can reach."""

import abc
import enum
import io
import random
import threading
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from support.compare import hybrid, square_loss
from support.nets import TanhLinear, floats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import Session, World
from hybridtrain.errors import UserError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Text(str, enum.Enum):  # noqa: UP042
    A = "a"


class Number(enum.IntEnum):
    A = 1


class Word(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Mixed(float, enum.Enum):
    A = 0.5


class Refusing(type):
    """Makes classes whose attributes cannot be assigned or read."""

    def __setattr__(cls, name, value):
        raise AttributeError(f"cannot reassign {name}")

    def __getattribute__(cls, name):
        if name == "hidden":
            raise RuntimeError("cannot read hidden")
        return super().__getattribute__(name)


class Constants(metaclass=Refusing):
    limit, hidden, name = 3, 4, "constants"


@dataclass(frozen=True)
class Frozen:
    scale: float = 1.0
    limit = 3


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    scale: float = 1.0


class Slots:
    __slots__ = ("__private", "unset", "value")

    def __init__(self):
        self.value = self.__private = 1


class ReadOnly:
    kind = "read-only"

    @property
    def value(self):
        raise ValueError("not available")

    @cached_property
    def computed(self):
        return 3

    def __setattr__(self, name, value):
        raise TypeError("read-only")


class Pair(NamedTuple):
    first: int = 1
    second: object = None


@runtime_checkable
class Sized(Protocol):
    size: int = 3


class Abstract(abc.ABC):
    size = 3

    @abc.abstractmethod
    def run(self): ...


class Descriptor:
    def __get__(self, value, kind=None):
        raise RuntimeError("no value yet")

    def __set__(self, value, contents):
        raise RuntimeError("read-only")


class Described:
    size = Descriptor()


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("cannot be compared")

    def __hash__(self):
        return 1

    def __bool__(self):
        raise RuntimeError("has no truth value")


class Proxy:
    """A proxy of an object that is not there."""

    @property
    def __class__(self):
        raise RuntimeError("no object")

    def __getattr__(self, name):
        raise RuntimeError("no object")


class Output(OrderedDict):
    """Refuses changes, as the outputs of transformers do."""

    def __init__(self):
        super().__init__()
        OrderedDict.__setitem__(self, "loss", 1)

    def __setitem__(self, key, value):
        raise TypeError("read-only")

    __delitem__ = pop = clear = update = setdefault = __setitem__


class Unreadable(UserDict):
    def __iter__(self):
        raise RuntimeError("dictionary changed size during iteration")

    items = keys = __iter__


class Guarded(nn.Module):
    """A module with its own rules for attributes."""

    def __setattr__(self, name, value):
        if name == "fixed" and "fixed" in vars(self):
            raise AttributeError("fixed")
        super().__setattr__(name, value)

    def __init__(self):
        super().__init__()
        self.fixed = 3


def read_only_array():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


def dead_proxy():
    return weakref.proxy(Frozen())


def pydantic_model():
    pydantic = pytest.importorskip("pydantic")

    class Settings(pydantic.BaseModel, frozen=True):
        size: int = 3

    return Settings()


def generator():
    yield 1


OBJECTS = {
    "text enum": lambda: Text.A,
    "enum class": lambda: Text,
    "int enum": lambda: Number.A,
    "string enum": lambda: Word.A,
    "flag": lambda: Bits.A | Bits.B,
    "float enum": lambda: Mixed.A,
    "metaclass that refuses": Constants,
    "frozen dataclass": Frozen,
    "frozen dataclass with slots": FrozenSlots,
    "slots": Slots,
    "read-only properties": ReadOnly,
    "named tuple": lambda: Pair(second=np.zeros(2)),
    "protocol": lambda: Sized,
    "abstract class": lambda: Abstract,
    "descriptor": Described,
    "no comparison": lambda: {Incomparable(): [Incomparable()], "set": {Incomparable()}},
    "proxy": Proxy,
    "dead proxy": dead_proxy,
    "dictionary that refuses": Output,
    "mapping that cannot be read": Unreadable,
    "module with rules": Guarded,
    "read-only array": read_only_array,
    "arrays": lambda: [np.zeros(2), np.array([None, "a"]), np.float64(3.0), np.ma.array([1, 2])],
    "pydantic": pydantic_model,
    "no copies": lambda: [threading.Lock(), io.StringIO("a"), generator(), iter([1])],
    "system's generator": random.SystemRandom,
    "counters": lambda: [Counter("ab"), defaultdict(list), deque([1], maxlen=2), bytearray(3)],
    "exported bytes": lambda: memoryview(bytearray(3)),
    "expanded tensor": lambda: torch.ones(1).expand(3, 3),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "partial": lambda: partial(Slots),
}


class Holds(nn.Module):
    """Reaches an object by an attribute, a class and a closure."""

    def __init__(self, value):
        super().__init__()
        self.linear = TanhLinear()
        self.hook = lambda: value
        self.kind = type("Kind", (), {"__module__": __name__, "value": value})()

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_model_that_reaches_an_object_that_cannot_be_written_trains(name):
    value = OBJECTS[name]()
    layers = [Holds(value), TanhLinear(), TanhLinear()]
    model = hybrid(nn.Sequential(*layers), 2)
    model.train_step(floats(8), None, square_loss)
    model.verify(floats(8), None, square_loss, reference=nn.Sequential(*map(same, layers)))
    assert model.eval()(floats(8)).isfinite().all()


def same(layer):
    """Returns a layer with the same weights."""
    twin = TanhLinear()
    twin.load_state_dict(getattr(layer, "linear", layer).state_dict(), strict=False)
    return twin


def test_a_layer_that_asks_for_a_member_of_an_enum_trains_at_every_level():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kind = TanhLinear(), Text.A

        def forward(self, x):
            return self.linear(x) if self.kind == Text.A and Word.A != Mixed.A else x + Number.A

    net = nn.Sequential(Asks(), Asks(), TanhLinear())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = Session(world=World.from_env(nb_part=2, devices="cpu"), seed=0, chunks=2)
    loader = DataLoader(TensorDataset(floats(8), floats(8)), batch_size=8)
    model, optimizer, loader = session.prepare(net, optimizer, loader)
    for inputs, targets in loader:
        session.forward_backward(inputs, targets, square_loss)
        optimizer.step()
    assert model.verify(floats(8), None, square_loss).exact


class Counted(metaclass=Refusing):
    calls = 0


class Plain:
    pass


def count_in_class():
    type.__setattr__(Counted, "calls", Counted.calls + 1)


def count_in_new_attribute():
    Plain.calls = getattr(Plain, "calls", 0) + 1


def count_in(value, name="scale"):
    object.__setattr__(value, name, getattr(value, name, 0) + 1)


FROZEN, SLOTTED, SLOTS, OUTPUT = Frozen(), FrozenSlots(), Slots(), Output()
ARRAY = np.arange(3.0)
VIEW = ARRAY.view()
VIEW.flags.writeable = False
BASE = torch.ones(1)
EXPANDED = BASE.expand(3)


def change_array():
    assert VIEW.shape
    ARRAY[:] += 1


def change_tensor():
    assert EXPANDED.shape
    BASE.add_(1)


CHANGES = {
    "class whose metaclass refuses": (count_in_class, lambda: Counted.calls),
    "new attribute of a class": (count_in_new_attribute, lambda: vars(Plain).get("calls")),
    "frozen dataclass": (lambda: count_in(FROZEN), lambda: FROZEN.scale),
    "slot of a frozen dataclass": (lambda: count_in(SLOTTED), lambda: SLOTTED.scale),
    "new value of a slot": (
        lambda: count_in(SLOTS, "unset"),
        lambda: hasattr(SLOTS, "unset"),
    ),
    "dictionary that refuses": (
        lambda: OrderedDict.__setitem__(OUTPUT, "loss", OUTPUT["loss"] + 1),
        lambda: dict(OUTPUT),
    ),
    "read-only view of an array": (change_array, lambda: (ARRAY.tolist(), VIEW.tolist())),
    "expanded tensor": (change_tensor, lambda: (BASE.tolist(), EXPANDED.tolist())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_code_changes_in_an_object_that_refuses_changes_is_restored(name):
    change, read = CHANGES[name]

    class Changes(TanhLinear):
        def forward(self, x):
            change()
            return super().forward(x)

    before = read()
    model = hybrid(nn.Sequential(Changes(), TanhLinear()), 2)
    assert model.verify(floats(8), None, square_loss).exact
    assert read() == before


LOCKED = np.zeros(3)


class Locks(TanhLinear):
    def forward(self, x):
        LOCKED.flags.writeable = True
        LOCKED[:] += 1
        LOCKED.flags.writeable = False
        return super().forward(x)


class Keeps(TanhLinear):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_change_that_cannot_be_undone_is_an_error_that_names_the_object():
    model = hybrid(nn.Sequential(Locks(), TanhLinear()), 2)
    with pytest.raises(UserError, match="changes an object of type ndarray, which cannot be rest"):
        model.train_step(floats(8), None, square_loss)
    model = hybrid(nn.Sequential(Keeps(), TanhLinear()), 2)
    model.train_step(floats(8), None, square_loss)
    assert model.verify(floats(8), None, square_loss).exact
