"""A model whose forward asks for sizes, types or dtypes is traced for each kind of micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from support.traced import WIDTH, assert_same, call, hybrid, linear, loss_of, names, samples
from torch import Tensor, nn

from hybridtrain._base.microbatch import chunk_sizes, split
from hybridtrain.errors import BatchError, SplitError

pytestmark = pytest.mark.usefixtures("seeded")


class Four(nn.Module):
    """Four layers, and code of the test's between them."""

    def __init__(self, body):
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.body = body

    def forward(self, x):
        return self.d(self.c(self.body(x, self.b(self.a(x)))))


def only_export_follows(h: Tensor) -> None:
    assert isinstance(h * 1, Tensor)


def one_sample(x, h):
    return h * 3 if x.shape[0] == 1 else h


def one_sample_of_an_export(x, h):
    only_export_follows(h)
    return h * 3 if x.shape[0] == 1 else h


def centred_if_several(x, h):
    only_export_follows(h)
    return h - h.mean(0) if x.shape[0] > 1 else h


def divisible(x, h):
    if x.shape[0] % 2 != 0 or h.shape[-1] % 4 == 0:
        h = h * 2
    return h


def expanded_to_the_samples(x, h):
    return h + torch.ones(1, WIDTH).expand(len(x), -1) * len(h)


def a_loop_over_samples(x, h):
    for number in range(len(x)):
        h = h + number
    return h


def asks_for_types(x, h):
    parts = h.split(4, dim=1)
    if isinstance(h, Tensor) and isinstance(parts, (tuple, list)) and h.dim() == 2:
        h = torch.cat([part * (n + 1) for n, part in enumerate(parts)], dim=1)
    return h if h.dtype in (torch.float32, torch.float64) else h * 2


def asks_for_a_gradient(x, h):
    return h * 2 if h.requires_grad else h * 3


def contiguous(x, h):
    only_export_follows(h)
    return h * 2 if x.is_contiguous() else h


def asks_for_attributes(x, h):
    if hasattr(h, "logits") or h.dtype is not torch.float32 or x.grad is not None:
        return h * 100
    return h * 2


def asks_for_an_abstract_type(x, h):
    parts = h.chunk(2, dim=1)
    return torch.cat(parts[::-1], dim=1) if isinstance(parts, Sequence) else h


def sets_items(x, h):
    only_export_follows(h)
    h = h.clone()
    h[:, 0] = x[:, 1] * 2
    h[:, 1:] += 1
    return h


def measures_in_a_try(x, h):
    try:
        count = len(h)
    except TypeError:
        count = 100
    return h * count


BODIES = [
    asks_for_attributes,
    asks_for_an_abstract_type,
    sets_items,
    measures_in_a_try,
    one_sample,
    one_sample_of_an_export,
    centred_if_several,
    divisible,
    expanded_to_the_samples,
    a_loop_over_samples,
    asks_for_types,
    asks_for_a_gradient,
    contiguous,
]


def assert_same_step(model, net, whole, inputs, chunks):
    """A step of both on the same micro-batches gives the same gradients, bitwise."""
    net.zero_grad()
    whole.zero_grad()
    count = len(inputs if isinstance(inputs, Tensor) else inputs[0])
    sizes = chunk_sizes(count, chunks)
    model.train_step(inputs, None, loss_of)
    for part, size in zip(split(inputs, sizes), sizes, strict=True):
        loss_of(call(whole, part)).backward(torch.tensor(size / count))
    for (name, ours), theirs in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.quick_cases("one_sample")
def test_micro_batches_of_other_sizes_take_their_own_way_through_the_forward(body):
    net = Four(body)
    whole = copy.deepcopy(net)
    model = hybrid(net, 2, example_inputs=samples(count=6))
    for count in (7, 6, 3, 5, 7):  # micro-batches of 3, 2 and 1 samples
        assert_same_step(model, net, whole, samples(count, count), 3)
    model.eval()
    whole.eval()
    with torch.no_grad():
        for count in (3, 7):
            parts = split(samples(count, count), chunk_sizes(count, 3))
            expected = torch.cat([whole(part) for part in parts])
            assert torch.equal(model(samples(count, count)), expected)


@pytest.mark.parametrize("recompute", ["always", {"every": 1}], ids=str)
@pytest.mark.thorough
def test_a_recomputation_takes_the_way_that_its_micro_batch_took(recompute):
    net = Four(one_sample)
    whole = copy.deepcopy(net)
    model = hybrid(net, 2, example_inputs=samples(count=6), recompute=recompute)
    for count in (5, 3, 5):
        assert_same_step(model, net, whole, samples(count, count), 3)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.thorough
def test_values_that_skip_other_layers_in_a_variant_arrive(length):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()

        def forward(self, x):
            first = self.a(x)
            h = self.c(self.b(first))
            if x.shape[1] == 1:
                h = h + first
            h = self.d(h)
            return h + first if x.shape[1] > 4 else h

    net = Skips()
    whole = copy.deepcopy(net)
    inputs = {size: torch.randn(6, size, WIDTH) for size in (1, 4, 7)}
    model = hybrid(net, 4, example_inputs=inputs[length])
    for size in (4, 1, 7, 1, 4):
        assert_same_step(model, net, whole, inputs[size], 3)


@pytest.mark.thorough
def test_a_step_may_mix_dtypes_and_empty_inputs_with_the_examples():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x, y):
            h = self.a(x)
            only_export_follows(h)
            if y.shape[1] == 0:
                h = h * 2
            if y.dtype == torch.float64:
                h = h * 3
            return self.b(h)

    net = Two()
    whole = copy.deepcopy(net)
    other = torch.randn(7, 3)
    model = hybrid(net, 2, example_inputs=(samples(), other))
    for second in (other, other[:, :0], other.double(), other):
        assert_same_step(model, net, whole, (samples(), second), 3)


@pytest.mark.thorough
def test_a_model_with_batch_norms_that_checks_a_size_is_traced():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = (
                nn.Conv2d(3, 4, 3),
                nn.BatchNorm2d(4),
                nn.Conv2d(4, 2, 1),
            )

        def forward(self, x):
            height, width = x.shape[-2:]
            if height % 4 != 0 or width % 4 != 0:
                raise RuntimeError(f"wrong size: {height}, {width}")
            y = F.relu(self.norm(self.conv(x)))
            return F.interpolate(self.last(y), size=(height, width), mode="bilinear")

    images = torch.randn(7, 3, 8, 12)
    assert_same(Checked(), images, 2, example_inputs=images)


@pytest.mark.thorough
def test_a_sequence_is_unrolled_for_each_length_up_to_a_number_of_them():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.last = nn.GRUCell(WIDTH, WIDTH), linear()

        def forward(self, x):
            state = x.new_zeros(len(x), WIDTH)
            for step in range(x.shape[1]):
                state = self.cell(x[:, step], state)
            return self.last(state)

    net = Unrolled()
    whole = copy.deepcopy(net)
    model = hybrid(net, 2, example_inputs=torch.randn(6, 3, WIDTH))
    for length in (3, 2, 5, 4, 1, 6, 7, 8, 3):
        assert_same_step(model, net, whole, torch.randn(6, length, WIDTH), 3)
    with pytest.raises(BatchError, match=r"variant 9 of at most 8: pad the inputs"):
        model.train_step(torch.randn(6, 9, WIDTH), None, loss_of)


@pytest.mark.thorough
def test_a_variant_that_uses_what_its_stage_does_not_have_is_one_clear_error():
    class Extra(Four):
        def __init__(self):
            super().__init__(None)
            self.extra = linear()

        def forward(self, x):
            h = self.b(self.a(x))
            return self.d(self.c(self.extra(h) if len(x) == 1 else h))

    net = Extra()
    model = hybrid(net, 2, example_inputs=samples(count=6))
    model.train_step(samples(count=6), None, loss_of)
    message = r"shapes \[1, 6\], .*stages: it uses extra\.weight in stage"
    with pytest.raises(SplitError, match=message):
        model.train_step(samples(count=5), None, loss_of)
    model.train_step(samples(count=6), None, loss_of)


@pytest.mark.parametrize("layer", [nn.Identity(), nn.BatchNorm1d(WIDTH)], ids=["export", "fx"])
@pytest.mark.thorough
def test_a_micro_batch_whose_condition_raises_an_error_takes_no_graph_of_another_size(layer):
    net = Four(lambda x, h: h * 3 if 12 // (x.shape[0] - 3) else h)
    net.b = nn.Sequential(net.b, layer)  # torch.export is not used for a batch norm
    model = hybrid(net, 2, example_inputs=samples(count=6))
    model.train_step(samples(count=6), None, loss_of)
    with pytest.raises(BatchError, match="cannot be traced for these inputs"):
        model.train_step(samples(count=9), None, loss_of)


def test_the_length_of_an_input_stays_variable():
    net = Four(lambda x, h: h + torch.ones(1, WIDTH).expand(len(x), -1) * len(x))
    model = assert_same(net, samples(), 2, example_inputs=samples())
    assert names(model) == ["a", "b", "c", "d"]
    assert model.planned.variants is None


@pytest.mark.thorough
def test_tied_parameters_are_tied_in_each_variant():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.a, self.b, self.head = nn.Embedding(9, WIDTH), linear(), linear(), None
            self.head = nn.Linear(WIDTH, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            h = self.b(self.a(self.embed(x)))
            if x.shape[1] % 2:
                h = h + F.linear(self.head(h), self.embed.weight.t())
            return self.head(h)

    net = Tied()
    whole = copy.deepcopy(net)
    ids = torch.randint(0, 9, (6, 7))
    model = hybrid(net, 2, example_inputs=ids)
    for length in (7, 4, 5, 2):
        net.zero_grad()
        whole.zero_grad()
        model.train_step(ids[:, :length], None, loss_of)
        for part in ids[:, :length].split(2):
            loss_of(whole(part)).backward(torch.tensor(2 / 6))
        for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
            # a shared parameter's parts are added in another order
            torch.testing.assert_close(ours.grad, theirs.grad)
