"""One process: what a stage is given and sends has the values and gradients of the plain module."""

import pytest
import torch
from support.compare import assert_same_gradients, floats_and_classes, hybrid, plain_step
from support.schedules import BUILT_IN
from torch import nn
from torch.nn import functional as F

from hybridtrain.schedule import registered

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR)"),
]


def assert_steps_equal_the_plain_module(make, batch=None, steps=3, schedule="1f1b", **options):
    """Compares the gradients of several steps, bitwise."""
    torch.manual_seed(0)
    net = make()
    torch.manual_seed(0)
    reference = make()
    inputs, targets = batch or floats_and_classes()
    if registered(schedule).stages_per_device == 2:
        options["stages_per_device"] = 2
        options.pop("split", None)
    model = hybrid(net, schedule=schedule, **options)
    for step in range(steps):
        net.zero_grad()
        reference.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        plain_step(reference, inputs, targets, F.cross_entropy)
        assert_same_gradients(net, reference, f"step {step}")


class Spreading(torch.Tensor):
    """A subclass that what is computed from it has as well, as MONAI's MetaTensor."""


@pytest.mark.parametrize("schedule", BUILT_IN)
@pytest.mark.quick_cases(2)
def test_a_batch_of_a_tensor_subclass_trains_all_stages(schedule):
    inputs, targets = floats_and_classes()
    assert_steps_equal_the_plain_module(
        lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]),
        (inputs.as_subclass(Spreading), targets),
        schedule=schedule,
    )


class Hooked(nn.Module):
    """Clamps the gradient of its input; transposed, in another layout than the input's."""

    def __init__(self, transposes):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.transposes = transposes

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        if self.transposes:
            return torch.tanh(self.inner(x.transpose(0, 1).contiguous().transpose(0, 1)))
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("schedule", BUILT_IN)
@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.quick_cases(3)
def test_a_hook_on_the_input_of_a_stages_first_layer_changes_what_is_sent_back(
    schedule, transposes
):
    def make():
        return nn.Sequential(nn.Linear(8, 8), Hooked(transposes), nn.Linear(8, 8), nn.Linear(8, 3))

    assert_steps_equal_the_plain_module(make, schedule=schedule, split=[1, 3])


class InnerGradient(nn.Module):
    """Takes a gradient of its input in its forward, and hands on nothing of the input's graph."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x):
        energy = self.inner(x.transpose(0, 1).contiguous().transpose(0, 1)).square().sum()
        (gradient,) = torch.autograd.grad(energy, x, retain_graph=True)
        return self.outer(gradient.detach())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gradient_that_a_forward_takes_of_its_input_is_not_sent_back(schedule):
    def make():
        return nn.Sequential(nn.Linear(8, 8), InnerGradient())

    assert_steps_equal_the_plain_module(make, schedule=schedule)


class Forgets(nn.Module):
    """Drops the gradient of its input, which no module can do where the input is not a leaf."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if x.is_leaf and x.requires_grad:
            x.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
        return self.inner(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_input_of_a_stages_first_layer_is_no_leaf_as_in_the_plain_module(schedule):
    assert_steps_equal_the_plain_module(
        lambda: nn.Sequential(nn.Linear(8, 8), Forgets(), nn.Linear(8, 3)),
        schedule=schedule,
        split=[1, 2],
    )


class Detaches(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_layers_before_a_detach_get_no_gradient_as_in_the_plain_module(schedule):
    assert_steps_equal_the_plain_module(
        lambda: nn.Sequential(nn.Linear(8, 8), Detaches(8, 8), nn.Linear(8, 3)),
        schedule=schedule,
        split=[1, 2],
    )


class Graph(nn.Module):
    """A layer of a graph network, whose adjacency is sparse."""

    def __init__(self, adjacency, is_buffer):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if is_buffer:
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x):
        rows = [torch.sparse.mm(self.adjacency, row[:, None])[:, 0] for row in self.inner(x)]
        return torch.stack(rows)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("kind", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.quick_cases(3)
def test_sparse_tensors_in_layers_are_as_good_as_others(kind, is_buffer, recompute):
    adjacency = getattr(torch.eye(8).roll(1, 0) + torch.eye(8), kind)()
    assert_steps_equal_the_plain_module(
        lambda: nn.Sequential(Graph(adjacency, is_buffer), nn.Linear(8, 3)), recompute=recompute
    )


def test_the_memory_of_sparse_tensors_is_counted():
    adjacency = torch.eye(8).to_sparse_coo()
    model = hybrid(nn.Sequential(Graph(adjacency, True)), 1)
    model.train_step(*floats_and_classes(), F.cross_entropy)
    own = sum(p.nbytes for p in model.parameters())
    assert model.memory_bytes()[0] >= 2 * own + adjacency._indices().nbytes


class Packs(nn.Module):
    """Hands on a sparse tensor, or one of unequal rows."""

    def __init__(self, kind):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x):
        x = self.inner(x)
        if self.kind == "coo":
            return x.to_sparse_coo()
        if self.kind == "csr":
            return x.to_sparse_csr()
        ends = torch.tensor([0, 1, len(x)])
        return torch.nested.nested_tensor_from_jagged(x, ends)


class Unpacks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x):
        return self.inner(x.values() if self.kind == "jagged" else x.to_dense())


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"recompute": "always"}], ids=str)
@pytest.mark.parametrize("kind", ["coo", "csr", "jagged"])
@pytest.mark.quick_cases(3)
def test_sparse_and_jagged_tensors_cross_a_cut(kind, options):
    assert_steps_equal_the_plain_module(
        lambda: nn.Sequential(Packs(kind), Unpacks(kind)), **options
    )


class OddBuffers(nn.Module):
    """Has buffers without strides, storage or an operator that compares them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        eye = torch.eye(8)
        self.register_buffer("quantized", torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8))
        self.register_buffer("rows", torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)]))
        self.register_buffer("opaque", eye.to_mkldnn())

    def forward(self, x):
        return self.inner(x) @ self.quantized.dequantize() + self.rows.unbind()[1].sum()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_buffers_of_any_kind_are_counted_and_compared(recompute):
    assert_steps_equal_the_plain_module(
        lambda: nn.Sequential(OddBuffers(), nn.Linear(8, 3)), recompute=recompute
    )
