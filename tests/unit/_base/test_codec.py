"""What processes send one another: values arrive as they were, and no bytes run code."""

import collections
import datetime
import enum
import pickle
import random
import re
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from torch import nn

import hybridtrain
from hybridtrain._base.codec import CodecError, allow, classes_around, decode, encode
from hybridtrain._base.problem import Problem
from hybridtrain.errors import BatchError


@dataclass(frozen=True)
class Point:
    x: int
    y: object = None


class Pair(NamedTuple):
    first: object
    second: object


class Color(enum.Enum):
    RED = 1


class Layer(nn.Module):
    class Output(NamedTuple):
        value: object


allow([Point, Pair, Color])

VALUES = [
    *(None, ..., True, False, 0, 1, 255, -128, -(2**70), 1.5, float("inf"), 1 + 2j),
    *("", "a\u00e9", "\udc80", b"bytes", (), (1, [2, (3,)]), {"a": {1, 2}, 2: None}),
    *(frozenset(["a"]), slice(1, None), range(0, 9, 2)),
    *(torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")),
    *(torch.Size([1, 2]), torch.strided, torch.channels_last),
    *(datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3), datetime.time(4)),
    *(datetime.timedelta(1, 2, 3), Decimal("1.50"), Fraction(1, 3), UUID(int=7), Path("a/b")),
    collections.OrderedDict(a=1, b=2),
    collections.defaultdict(list, {1: [2]}),
    collections.deque([1, 2], maxlen=3),
    *(np.float32(1.5), np.int64(3), np.datetime64("2020-01-01"), int, BatchError),
    *(Problem(1, BatchError, "text"), Point(1, (2,)), Pair(1, [2]), Color.RED),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_with_its_type(value):
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_text_or_number_of_a_subclass_arrives_as_a_plain_one():
    class Seconds(float):
        pass

    version, seconds = decode(encode([torch.__version__, Seconds(1.5)]))
    assert (version, type(version)) == (str(torch.__version__), str)
    assert (seconds, type(seconds)) == (1.5, float)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3).t(),
        torch.randn(3).bfloat16(),
        torch.tensor(True),
        torch.zeros(0, 4),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.randn(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_arrives_with_its_numbers(tensor):
    arrived = decode(encode(tensor))
    assert torch.equal(arrived, tensor)
    assert (arrived.dtype, arrived.requires_grad) == (tensor.dtype, tensor.requires_grad)


def test_arrays_and_results_of_torch_functions_arrive():
    array = np.arange(6.0).reshape(2, 3)
    arrived = decode(encode(array))
    assert np.array_equal(arrived, array)
    arrived += 1  # it can be written to
    result = torch.max(torch.randn(3, 2), 0)
    assert type(decode(encode(result))) is type(result)


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    with pytest.raises(CodecError):
        decode(pickle.dumps(Hostile(mark)))
    assert not mark.exists()


@pytest.mark.parametrize(
    "value",
    [Hostile("x"), len, lambda: 0, re, object(), Layer()],
    ids=lambda value: type(value).__name__,
)
def test_an_object_of_an_unknown_kind_is_refused_by_the_sender(value):
    with pytest.raises(CodecError):
        encode([value])


def test_bytes_import_no_module_and_name_no_class_of_another_kind(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("class Output: pass")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["never_imported:Output", "os:system", "subprocess:Popen", "pathlib:Path"]
    names += ["hybridtrain.model:HybridModel", "hybridtrain._base.codec:sys", ":", "a:b:c"]
    for name in names:
        data = name.encode()
        with pytest.raises(CodecError, match="not a class that this process knows"):
            decode(b"c" + len(data).to_bytes(8, "little") + data)
    assert "never_imported" not in sys.modules


def replaced(value, old, new):
    """The bytes of `value` with the encoding of `old` replaced."""
    data = encode(value)
    assert encode(old) in data
    return data.replace(encode(old), encode(new))


@pytest.mark.parametrize(
    "data",
    [
        replaced(Point(1), Point, Pair),
        replaced(Point(1), Point, BatchError),
        replaced(Point(1), ("x", "y"), ("x", "__class__")),
        replaced(Point(1), ("x", "y"), ("x",)),
        replaced(Pair(1, 2), Pair, Point),
        replaced(Color.RED, Color, Point),
        replaced(Color.RED, "RED", "__init__"),
        replaced(collections.defaultdict(list, a=1), list, Point),
        replaced(torch.zeros(2), (2,), (1 << 40,)),
        replaced(torch.zeros(2), (2,), (-1,)),
        replaced(np.zeros(2), "<f8", "|O"),
        replaced(np.zeros(2), (2,), (1 << 40,)),
        b"t" + (1 << 62).to_bytes(8, "little"),
        b"s" + (1 << 40).to_bytes(8, "little") + b"a",
        b"s" + (2).to_bytes(8, "little") + b"\xff\xfe",
        b"d" + (1).to_bytes(8, "little") + b"N",
        b"d" + (2).to_bytes(8, "little") + encode([1]) + b"N",
        (b"t" + (1).to_bytes(8, "little")) * 5000 + b"N",
        (b"l" + (900).to_bytes(8, "little")) * 900,
        b"",
        b"?",
        encode(1) + b"N",
    ],
    ids=lambda data: f"tag {data[:1].decode()!r}, {len(data)} bytes",
)
def test_hostile_bytes_end_in_one_error(data):
    with pytest.raises(CodecError):
        decode(data)


def test_every_truncation_is_refused():
    data = encode(VALUES)
    for size in range(0, len(data), 7):
        with pytest.raises(CodecError):
            decode(data[:size])


def test_damaged_bytes_give_a_value_or_one_error_in_little_memory():
    data = encode(VALUES)
    draws = random.Random(0)
    tracemalloc.start()
    try:
        for _ in range(1000):
            damaged = bytearray(data)
            for _ in range(draws.randint(1, 8)):
                damaged[draws.randrange(len(data))] = draws.randrange(256)
            with suppress(CodecError):
                decode(damaged)
        for size in range(300):
            with suppress(CodecError):
                decode(draws.randbytes(size))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_model_lets_processes_exchange_the_classes_that_its_modules_define_or_import(monkeypatch):
    outputs, layers = ModuleType("a_package.outputs"), ModuleType("a_package.layers")
    imported = dataclass(type("Imported", (), {"__module__": outputs.__name__}))
    outputs.Imported = imported
    layers.outputs = outputs
    layers.Layer = type("Layer", (nn.Module,), {"__module__": layers.__name__})
    for module in (outputs, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert imported in classes_around([layers.Layer])
    assert {Point, Pair, Color, Layer.Output} <= classes_around([Layer])
    assert Layer not in classes_around([Layer])


# Data of this process alone, of processes that it has started, and of files that the user trusts.
_UNPICKLES = {
    "data/agreement.py",
    "data/stream.py",
    "launch/notebook.py",
    "smp/saving.py",
}


def test_nothing_that_another_process_sends_is_unpickled():
    root = Path(hybridtrain.__file__).parent
    pattern = r"pickle\.loads?\(|Unpickler\(|_object_list\(|(gather|scatter)_object\("
    files = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    assert files == _UNPICKLES
