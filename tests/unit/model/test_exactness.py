"""One process: a pipelined step equals the unsplit model fed the same micro-batches in order.

Every operation is the same one on the same numbers, and gradients are added up micro-batch by
micro-batch, as in gradient accumulation: comparisons are bitwise unless a line says otherwise.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.cases import thinned
from support.compare import (
    assert_same,
    assert_same_gradients,
    copied,
    grads,
    hybrid,
    mean_loss,
    plain_step,
)
from support.nets import CASES, classification, conv_net, mlp
from torch import nn

NB_PARTS = [1, 2, 3, 4]
SHAPES = list(itertools.product([1, 4, 7], [10, 13]))  # (chunks, samples)
# Dropout has tests of its own: plain PyTorch draws its masks from one generator, in another order.
KINDS = ["linear", "conv", "inplace", "scaling_inplace", "nested", "pytree", "transformer"]
CHECKPOINTS = ["never", "except_last", "always"]
CELLS = list(itertools.product(KINDS, NB_PARTS, ["gpipe", "1f1b"], CHECKPOINTS))

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def optimizer_of(net):
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def recording(loss_fn=F.cross_entropy):
    """A loss function, and the outputs that it was given."""
    outputs = []

    def wrapped(output, targets):
        outputs.append(output.detach())
        return loss_fn(output, targets)

    return outputs, wrapped


def assert_step_as_plain(net, nb_part=2, chunks=4, **options):
    """One step of a small classifier as a pipeline, and of its unsplit copy."""
    plain = copy.deepcopy(net)
    inputs, targets = classification(10)
    plain_step(plain, inputs.clone(), targets, F.cross_entropy, chunks)
    hybrid(net, nb_part, chunks=chunks, **options).train_step(inputs, targets, F.cross_entropy)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize(("kind", "nb_part", "schedule", "recompute"), thinned(CELLS, 5))
@pytest.mark.quick_cases(3)
def test_steps_equal_the_unsplit_model_on_the_same_micro_batches(
    kind, nb_part, schedule, recompute
):
    case = CASES[kind]
    plain = case.net()
    ours = copy.deepcopy(plain)
    plain_optimizer, optimizer = optimizer_of(plain), optimizer_of(ours)
    for seed, (chunks, rows) in enumerate(SHAPES):
        what = f"chunks {chunks}, {rows} samples"
        model = hybrid(ours, nb_part, chunks=chunks, schedule=schedule, recompute=recompute)
        inputs, targets = case.batch(rows, seed)
        expected, expected_loss = plain_step(plain, copied(inputs), targets, case.loss, chunks)
        outputs, loss_fn = recording(case.loss)
        out = model.train_step(inputs, targets, loss_fn)

        assert out.samples == rows
        # the same losses, weighted in float32 here and in Python's double precision there
        assert float(out.loss) == pytest.approx(expected_loss, rel=1e-6), what
        assert_same(enumerate(outputs), enumerate(expected), f"{what}, output of micro-batch")
        assert_same_gradients(ours, plain, what)
        for each in (plain_optimizer, optimizer):
            each.step()
            each.zero_grad()
        # weights and buffers (running statistics) alike
        assert_same(model.state_dict(), plain.state_dict(), f"{what}, after the step")


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_gradients_add_up_over_several_steps_with_their_weights(nb_part):
    plain = mlp()
    ours = copy.deepcopy(plain)
    model = hybrid(ours, nb_part)
    for seed, (rows, weight) in enumerate([(10, 0.5), (13, 1.75), (3, 0.25)]):
        batch = classification(rows, seed)
        plain_step(plain, *batch, F.cross_entropy, weight=weight)
        model.train_step(*batch, F.cross_entropy, weight=weight)
        assert_same_gradients(ours, plain, f"after batch {seed}")


@pytest.mark.parametrize("kind", ["linear", "conv", "transformer"])
@pytest.mark.parametrize("nb_part", [1, 3])
@pytest.mark.parametrize("how", ["precision", "around"])
@pytest.mark.quick_cases(5)
def test_a_step_in_bf16_equals_the_unsplit_model_under_the_same_autocast(kind, nb_part, how):
    case = CASES[kind]
    plain = case.net()
    ours = copy.deepcopy(plain)
    model = hybrid(ours, nb_part, precision="bf16" if how == "precision" else "fp32")
    batch = case.batch(10, 0)
    outputs, loss_fn = recording(case.loss)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "around"):
        model.train_step(*batch, loss_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        expected, _ = plain_step(plain, *batch, case.loss)
    assert_same(enumerate(outputs), enumerate(expected), "output of micro-batch")
    assert all(output.dtype == torch.bfloat16 for output in outputs)
    assert_same_gradients(ours, plain)
    assert all(gradient.dtype == torch.float32 for gradient in grads(ours).values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "conv"])
@pytest.mark.quick_cases(2)
def test_without_batch_norm_the_number_of_micro_batches_changes_nothing(kind):
    case = CASES[kind]
    results = []
    for chunks in (1, 4, 7):
        net = case.net()
        out = hybrid(net, chunks=chunks).train_step(*case.batch(13, 0), case.loss)
        results.append((float(out.loss), grads(net)))
    (loss, whole), *others = results
    for other_loss, parts in others:
        # the same sums over 13 samples, in another order
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert_same(parts, whole, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_ragged_batch_counts_every_sample_once():
    net = nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False))
    x = torch.arange(10.0)[:, None] ** 2
    out = hybrid(net).train_step(x, None, mean_loss)
    # a mean of the means of 3, 3, 2 and 2 samples would be another number
    torch.testing.assert_close(out.loss, net(x).mean().detach())
    torch.testing.assert_close(net[1].weight.grad, x.mean().reshape(1, 1))


def test_a_net_in_double_precision_keeps_its_precision():
    net = mlp().double()
    x, targets = classification(10)
    out = hybrid(net).train_step(x.double(), targets, F.cross_entropy)
    expected = F.cross_entropy(net(x.double()), targets).detach()
    assert out.loss.dtype == torch.float64
    # sums of 10 samples in another order
    torch.testing.assert_close(out.loss, expected, rtol=1e-13, atol=0)


def test_frozen_layers_get_no_gradient_and_change_nothing_else():
    net = mlp()
    for layer in (0, 2):  # all parameters of stage 0, and half of those of stage 1
        net[layer].requires_grad_(False)
    assert_step_as_plain(net, 3, split=[2, 3, 3])
    assert grads(net)["0.weight"] is None


@pytest.mark.parametrize("nb_part", [1, 2])
def test_a_first_layer_that_overwrites_the_batch_is_recomputed_from_the_batch(nb_part):
    net = nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(6, 6), nn.Linear(6, 3))
    plain = copy.deepcopy(net)
    x, targets = classification(10)
    plain_step(plain, x.clone(), targets, F.cross_entropy)
    hybrid(net, nb_part, recompute="always").train_step(x, targets, F.cross_entropy)
    # the stage works on copies, whose memory is aligned unlike that of the batch's views
    assert_same_gradients(net, plain, rtol=1e-5, atol=1e-6)


def test_the_inputs_of_the_caller_are_not_changed_where_the_net_does_not_change_them():
    x, targets = classification(10)
    before = x.clone()
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    hybrid(net, 3).train_step(x, targets, F.cross_entropy)
    assert torch.equal(x, before)


def test_the_users_net_keeps_its_names_and_takes_the_state_back():
    net, other = conv_net(), conv_net()
    model = hybrid(net, 3)
    assert list(model.state_dict()) == list(other.state_dict())
    assert list(dict(model.named_parameters())) == list(dict(other.named_parameters()))
    assert len(list(model.parameters())) == len(list(net.parameters()))
    other.load_state_dict(model.state_dict())
    assert_same(other.state_dict(), net.state_dict())
