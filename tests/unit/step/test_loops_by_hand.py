"""Loops over `train_step` that the docs show: SAM, LBFGS, shared modules, own micro-batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import CLOSE, assert_same_gradients, cpu_world
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.pipeline import HeadOutput

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 5))


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=g), torch.randint(5, (8,), generator=g)


def assert_same_weights(model, reference, **tolerance):
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 0, "atol": 0}))


def sam_step(parameters, optimizer, run, norm):
    run()
    scale = 0.05 / (float(norm()) + 1e-12)
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.add_(p.grad, alpha=scale)
    optimizer.zero_grad()
    run()
    with torch.no_grad():
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sam_by_two_passes_is_that_of_the_plain_module(schedule):
    inputs, targets = batch()
    reference = net()
    model = HybridModel(net(), cpu_world(2), chunks=2, schedule=schedule)

    def plain():
        for part in (slice(0, 4), slice(4, 8)):
            loss = F.cross_entropy(reference(inputs[part]), targets[part])
            loss.backward(torch.tensor(0.5))

    def norm():
        return torch.nn.utils.get_total_norm(p.grad for p in reference.parameters())

    sgd = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for _ in range(3):
        sam_step(list(reference.parameters()), sgd[1], plain, norm)
        run = lambda: model.train_step(inputs, targets, F.cross_entropy)  # noqa: E731
        sam_step(list(model.parameters()), sgd[0], run, model.grad_norm)
    assert_same_weights(model, reference, **CLOSE)  # the norms are added up in another order


def test_a_second_pass_draws_the_same_masks():
    model = HybridModel(net(0.5), cpu_world(2), chunks=2)
    losses = []
    for _ in range(2):
        draws = model.rng.step
        losses.append(float(model.train_step(*batch(), F.cross_entropy).loss))
        model.rng.step = draws
    other = float(HybridModel(net(0.5), cpu_world(2), chunks=2, seed=1).train_step(
        *batch(), F.cross_entropy
    ).loss)  # fmt: skip
    assert losses[0] == losses[1] != other


def test_lbfgs_over_train_step_is_that_of_the_plain_module():
    inputs, targets = batch()
    reference, model = net(), HybridModel(net(), cpu_world(2), chunks=2)

    def plain():
        optimizers[1].zero_grad()
        loss = F.cross_entropy(reference(inputs), targets)
        loss.backward()
        return float(loss.detach())

    def closure():
        optimizers[0].zero_grad()
        return float(model.train_step(inputs, targets, F.cross_entropy).loss)

    optimizers = [
        torch.optim.LBFGS(m.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        for m in (model, reference)
    ]
    optimizers[0].step(closure)
    optimizers[1].step(plain)
    # it divides small differences of gradients, which are added up in another order
    assert_same_weights(model, reference, rtol=1e-3, atol=1e-4)


def test_two_models_over_shared_modules_train_them_as_the_plain_modules():
    def gan(make):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        both, alone = make(nn.Sequential(*generator, *critic)), make(critic)
        sgd = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (generator, critic)]
        g = torch.Generator().manual_seed(1)
        for _ in range(3):
            noise, real = torch.randn(4, 3, generator=g), torch.randn(4, 6, generator=g)
            critic.requires_grad_(False)
            both(noise, torch.ones(4, 1))
            sgd[0].step()
            sgd[0].zero_grad()
            critic.requires_grad_(True)
            with torch.no_grad():
                made = generator(noise)
            alone(torch.cat([real, made]), torch.cat([torch.ones(4, 1), torch.zeros(4, 1)]))
            sgd[1].step()
            sgd[1].zero_grad()
        return nn.ModuleList([generator, critic])

    loss_fn = F.binary_cross_entropy_with_logits

    def pipelined(module):
        model = HybridModel(module, cpu_world(2), chunks=2)
        return lambda x, y: model.train_step(x, y, loss_fn)

    def plain(module):
        def run(x, y):
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                loss_fn(module(part[0]), part[1]).backward(torch.tensor(0.5))

        return run

    assert_same_weights(gan(pipelined), gan(plain))


def test_own_micro_batches_train_the_sum_of_their_losses():
    torch.manual_seed(0)

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    bags = nn.Sequential(nn.Embedding(10, 8), Mean(), nn.Linear(8, 2))
    reference = copy.deepcopy(bags)
    parts = [(torch.randint(10, size), torch.randint(2, size[:1])) for size in [(5, 3), (2, 7)]]
    model = HybridModel(bags, cpu_world(2))

    def loss_of(output, targets):
        return F.cross_entropy(output, targets, reduction="sum") / 7

    def head(number, output):
        loss = loss_of(output, parts[number][1])
        return HeadOutput(loss.detach(), loss, torch.ones_like(loss))

    losses = model.run_microbatches([tokens for tokens, _ in parts], head, trains=True)
    for (tokens, targets), mine in zip(parts, losses, strict=True):
        loss = loss_of(reference(tokens), targets)
        loss.backward()
        assert torch.equal(mine, loss.detach())
    assert_same_gradients(model, reference)
