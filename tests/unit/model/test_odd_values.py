"""One process: values that are no tensors are exact in cuts and outputs, or are refused by name."""

import copy
import functools
import types
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.compare import (
    assert_same,
    assert_same_gradients,
    floats_and_classes,
    grads,
    hybrid,
    micro_batches,
    plain_step,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hybridtrain import shared
from hybridtrain._base.values import named_leaves
from hybridtrain.errors import BatchError, UserError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Bag(dict):
    """A subclass of dict."""


class Row(list):
    """A subclass of list."""


class Pair(tuple):
    """A subclass of tuple without names."""

    __slots__ = ()


class Slots:
    """An object without a dict of its attributes."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


@dataclass
class Doubled:
    """A dataclass whose constructor computes, and with an attribute that it does not take."""

    x: torch.Tensor
    twice: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.x = self.x * 2
        self.twice = self.x * 2
        self.more = self.x + 1


def array_of(x):
    array = numpy.empty(2, dtype=object)
    array[0] = x
    return array


ODD = {
    "a subclass of dict": lambda x: Bag(x=x),
    "a subclass of list": lambda x: Row([x]),
    "a subclass of tuple": lambda x: Pair([x]),
    "slots": Slots,
    "attributes": lambda x: types.SimpleNamespace(x=x),
    "UserDict": lambda x: UserDict(x=x),
    "a closure": lambda x: lambda: x,
    "partial": lambda x: functools.partial(torch.add, x),
    "an iterator": lambda x: iter([x]),
    "a generator": lambda x: (part for part in [x]),
    "mappingproxy": lambda x: types.MappingProxyType({"x": x}),
    "an array": lambda x: x.detach().numpy(),
    "an array of tensors": lambda x: array_of(x),
}


class Returns(nn.Module):
    """A linear layer that returns its output and what `make` makes of it."""

    def __init__(self, make):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.make = make

    def forward(self, x):
        x = self.inner(x)
        return {"x": x, "more": [self.make(x)]}


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, values):
        return self.inner(values["x"])


def inside(value):
    """The tensor that an odd value hides."""
    if isinstance(value, Bag | UserDict | types.MappingProxyType):
        return value["x"]
    if isinstance(value, Slots | types.SimpleNamespace):
        return value.inner if isinstance(value, Slots) else value.x
    if isinstance(value, functools.partial | types.FunctionType):
        return value(*[0] * isinstance(value, functools.partial))
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return torch.from_numpy(value)
    return next(iter(value))


class TakesBoth(Takes):
    """Uses the hidden tensor too."""

    def forward(self, values):
        return self.inner(values["x"] + inside(values["more"][0]).tanh())


@pytest.mark.parametrize("takes", [Takes, TakesBoth])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.quick_cases(8)
def test_a_value_that_hides_tensors_crosses_a_cut_as_in_plain_pytorch(kind, takes):
    net = nn.Sequential(Returns(ODD[kind]), takes())
    plain, model = copy.deepcopy(net), hybrid(net)
    for _ in range(3):
        for each in (plain, net):
            each.zero_grad()
        plain_step(plain, *floats_and_classes(), F.cross_entropy)
        model.train_step(*floats_and_classes(), F.cross_entropy)
        assert_same(grads(net), grads(plain))
    inputs = floats_and_classes()[0]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs), plain.eval()(inputs))


@pytest.mark.parametrize("kind", ODD)
def test_a_value_that_may_hide_tensors_does_not_leave_the_model_in_several_parts(kind):
    model = hybrid(nn.Sequential(nn.Identity(), Returns(ODD[kind]))).eval()
    with pytest.raises(BatchError, match=r"output\['more'\]\[0\] is a \w+.*map_outputs"):
        model(floats_and_classes(8)[0])
    assert len(model.map_outputs(floats_and_classes(8)[0], None, lambda output, _: output)) == 4


DEPENDS = {
    "the number of samples": lambda x: len(x),
    "names": lambda x: ["a"] * len(x),
    "a row for each": lambda x: [{"boxes": row[:2]} for row in x],
    "losses in a list": lambda x: [row.sum() for row in x],
    "a similarity": lambda x: x @ x.T,
    "a similarity of two views": lambda x: torch.cat([x, x]) @ torch.cat([x, x]).T,
    "states with the samples in dim 1": lambda x: torch.stack([x, x]),
    "a table": lambda x: torch.zeros(4, 3),
    "the first sample": lambda x: x[:1],
    "a table with as many rows": lambda x: torch.ones(2, 3),
}


@pytest.mark.parametrize("rows", [8, 7, 4], ids="{} samples".format)
@pytest.mark.parametrize("kind", DEPENDS)
@pytest.mark.quick_cases(7)
def test_an_output_that_depends_on_the_number_of_samples_is_refused(kind, rows):
    model = hybrid(nn.Sequential(nn.Identity(), Returns(DEPENDS[kind]))).eval()
    if rows == 4 and kind == "states with the samples in dim 1":
        rows = 12  # one sample in each would make the states of two rows
    with pytest.raises(BatchError, match="map_outputs"):
        model(floats_and_classes(rows)[0])


@pytest.mark.parametrize("rows", [8, 7, 4])
def test_classes_and_constants_that_happen_to_equal_the_samples_are_returned(rows):
    size = -(-rows // 4)
    net = nn.Sequential(nn.Linear(8, size), Constant((size, "a", None, [0.5] * size)))
    inputs, _ = floats_and_classes(rows)
    x, constants = hybrid(net).eval()(inputs)
    torch.testing.assert_close(x, net(inputs)[0].detach())
    assert constants == (size, "a", None, [0.5] * size)


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x, self.value


def test_a_dataclass_crosses_a_cut_with_all_attributes_and_is_not_computed_again():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def forward(self, values):
            return self.inner(values.x + values.twice + values.more)

    class Makes(nn.Linear):
        def forward(self, x):
            return Doubled(super().forward(x))

    torch.manual_seed(0)
    net = nn.Sequential(Makes(8, 8), Sums())
    torch.manual_seed(0)
    reference = nn.Sequential(Makes(8, 8), Sums())
    hybrid(net).train_step(*floats_and_classes(), F.cross_entropy)
    plain_step(reference, *floats_and_classes(), F.cross_entropy)
    assert_same_gradients(net, reference)


class Masked(nn.Module):
    """Traced; its mask is the same for all samples."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x, mask):
        return self.last(self.first(x) @ mask)


@pytest.mark.parametrize("rows", [8, 7])
def test_a_shared_input_goes_whole_to_every_micro_batch_of_a_traced_model(rows):
    torch.manual_seed(0)
    net = Masked()
    torch.manual_seed(0)
    reference = Masked()
    mask = torch.rand(8, 8)
    x, y = floats_and_classes(rows)
    inputs = {"x": x, "mask": shared(mask)}
    model = hybrid(net, example_inputs=inputs)
    assert len(model.stages) == 2
    model.train_step(inputs, y, F.cross_entropy)
    for part, target in micro_batches(x, y, 4):
        (F.cross_entropy(reference(part, mask), target) * (len(part) / rows)).backward()
    assert_same_gradients(net, reference)
    assert model.verify(inputs, y, F.cross_entropy, times=1).exact


class Unnamed(UserDict):
    """A registered container without names for its parts, as the outputs of diffusers are."""


torch.utils._pytree.register_pytree_node(
    Unnamed,
    lambda value: (list(value.data.values()), list(value.data)),
    lambda values, keys: Unnamed(zip(keys, values, strict=True)),
)


def test_outputs_whose_container_has_no_names_are_joined_compared_and_named():
    net = nn.Sequential(nn.Linear(8, 8), Returns(lambda x: Unnamed(sample=x)))
    model = hybrid(net).eval()
    inputs, _ = floats_and_classes(8)
    assert torch.equal(model(inputs)["more"][0]["sample"], model(inputs)["x"])
    assert model.verify(inputs, None, lambda output, _: output["x"].mean(), times=1).exact
    net = nn.Sequential(nn.Linear(8, 8), Returns(lambda x: Unnamed(sample=x[:1])))
    with pytest.raises(BatchError, match=r"output\['more'\]\[0\]\['sample'\] of a micro-batch"):
        hybrid(net).eval()(inputs)


# --- any value

LEAVES = st.sampled_from(
    [
        *("x", "half", "sum", "pairs", "wide", "first", "row names", "table"),
        *(None, 3, 2, True, 0.5, "name", torch.float32, torch.Size([2, 3])),
        *ODD,
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


def value_of(tree, x):
    """The value that a description says, made of a tensor."""
    if isinstance(tree, list):
        return [value_of(part, x) for part in tree]
    if type(tree) is tuple:
        return tuple(value_of(part, x) for part in tree)
    if isinstance(tree, dict):
        return {name: value_of(part, x) for name, part in tree.items()}
    made = {
        "x": lambda x: x,
        "half": lambda x: x / 2,
        "sum": torch.sum,
        "pairs": lambda x: x @ x.T,
        "wide": lambda x: x.expand(2, -1, -1),
        "first": lambda x: x[:1],
        "row names": lambda x: [f"{float(value):.3f}" for value in x[:, 0]],
        "table": lambda x: torch.arange(6).view(2, 3),
        **ODD,
    }
    return made[tree](x) if isinstance(tree, str) and tree in made else tree


class Any(nn.Module):
    """Returns any value, or adds up all floating-point tensors of any value."""

    def __init__(self, tree=None):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.tree = tree

    def forward(self, value):
        x = self.inner(value[0])
        for leaf in tree_leaves(value[1:]):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                x = x + leaf.square().mean()
        return x, value_of(self.tree, x)


@examples(15, 40)
@given(tree=TREES, end=TREES, rows=st.sampled_from([2, 3, 4, 5, 6]), chunks=st.sampled_from([2, 3]))
def test_any_value_is_as_in_the_plain_module_or_refused(tree, end, rows, chunks):
    torch.manual_seed(0)
    net = nn.Sequential(Any(tree), Any(end))
    torch.manual_seed(0)
    reference = nn.Sequential(Any(tree), Any(end))
    inputs, _ = floats_and_classes(rows)
    model = hybrid(net, chunks=chunks)

    def loss_fn(output, _):
        return output[0].square().mean()

    try:
        model.train_step((inputs,), None, loss_fn)
    except UserError:
        return
    plain_step(reference, (inputs,), None, loss_fn, chunks)
    assert_same_gradients(net, reference)
    model.eval()
    try:
        with torch.no_grad():
            found = model((inputs,))
    except UserError:
        return
    expected = [reference(part) for part, _ in micro_batches((inputs,), None, chunks)]
    whole, structure = tree_flatten(reference((inputs,)))
    leaves = tree_flatten(found)[0]
    # PyTorch gives a torch.Size back as a tuple, once it has been registered as a node of a tree
    assert tree_flatten(found)[1] == tree_flatten(tree_unflatten(whole, structure))[1]
    for number, (name, leaf) in enumerate(named_leaves(found)):
        parts = [tree_flatten(part)[0][number] for part in expected]
        if isinstance(leaf, torch.Tensor):
            joined = torch.cat(parts) if parts[0].dim() else torch.stack(parts)
            assert torch.equal(leaf, joined), name
            if parts[0].dim():
                assert leaf.shape == whole[number].shape, name
        else:
            assert leaf == leaves[number] == whole[number], name


def tensors_in(value):
    """The tensors of a batch, in which mappings are as good as dicts."""
    leaves = tree_leaves(value)
    parts = [tensors_in(dict(leaf)) if isinstance(leaf, Mapping) else [leaf] for leaf in leaves]
    return [leaf for part in parts for leaf in part if isinstance(leaf, torch.Tensor)]


@examples(15, 40)
@given(tree=TREES, rows=st.sampled_from([2, 3, 4, 5]), marks=st.booleans())
def test_any_input_is_as_in_the_plain_module_or_refused(tree, rows, marks):
    inputs, _ = floats_and_classes(rows)
    more = value_of(tree, inputs)
    seen = []

    class Sees(nn.Linear):
        def forward(self, value):
            seen.append(value)
            return super().forward(value[0])

    model = hybrid(nn.Sequential(Sees(8, 8), nn.Linear(8, 3)), chunks=2)
    try:
        batch = (inputs, shared(more) if marks else more)
        model.train_step(batch, None, lambda output, _: output.mean())
    except UserError:
        assert not marks
        return
    sizes = [len(value[0]) for value in seen]
    assert sum(sizes) == rows
    for (_, part), start in zip(seen, (0, sizes[0]), strict=True):
        if marks:
            leaves = zip(tree_leaves(part), tree_leaves(more), strict=True)
            assert all(one is other for one, other in leaves)
            continue
        for one, leaf in zip(tensors_in(part), tensors_in(more), strict=True):
            assert torch.equal(one, leaf[start : start + len(one)] if leaf.dim() else leaf)
