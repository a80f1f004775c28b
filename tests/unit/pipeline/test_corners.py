"""Promises where two features meet, each once broken."""

import copy

import pytest
import torch
from support.compare import assert_same_gradients, hybrid
from torch import nn
from torch.nn import functional as F

from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader, InMemoryDataset, TrainLoader, already_batched
from hybridtrain.errors import ConfigError, NotExactError, SplitError
from hybridtrain.loop import Trainer, evaluate
from hybridtrain.options import LoaderOptions

ROWS = LoaderOptions(collate=already_batched)


def tied_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def batch(rows=8):
    torch.manual_seed(1)
    return torch.randn(rows, 4), torch.randn(rows, 4)


def assert_gradients_of_a_whole_batch(net):
    plain = tied_net()
    F.mse_loss(plain(batch()[0]), batch()[1]).backward()
    assert_same_gradients(net, plain, rtol=1.3e-6, atol=1e-5)


def test_a_failed_step_leaves_no_gradient_of_a_tied_parameter_behind():
    net = tied_net()
    model = hybrid(net, 2, chunks=2, max_inflight=1)  # the first backward before the second loss
    calls = iter(range(100))

    def loss(output, target):
        if next(calls) == 1:
            raise ValueError("second micro-batch")
        return F.mse_loss(output, target)

    with pytest.raises(ValueError, match="second micro-batch"):
        model.train_step(*batch(), loss)
    model.zero_grad()
    model.train_step(*batch(), F.mse_loss)
    assert_gradients_of_a_whole_batch(net)


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return self.shared(x)


def test_stages_may_share_a_module_that_has_parameters():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(Block(shared), Block(shared))
    plain = copy.deepcopy(net)
    for inputs, targets in zip(*(whole.chunk(4) for whole in batch()), strict=True):
        (F.mse_loss(plain(inputs), targets) / 4).backward()
    hybrid(net, 2, split=[1, 1], chunks=4).train_step(*batch(), F.mse_loss)
    assert_same_gradients(net, plain)


def test_autocast_sums_the_uses_of_a_weight_in_the_same_groups_every_time():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(torch.tanh(self.linear(torch.tanh(self.linear(x)))))

    torch.manual_seed(0)
    net = nn.Sequential(*[Thrice() for _ in range(4)])
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 32), torch.randn(16, 32)
    seen = set()
    for nb_part in (1, 2, 2, 2, 2, 4):
        model = hybrid(copy.deepcopy(net), nb_part, chunks=8, precision="bf16", schedule="gpipe")
        model.train_step(inputs, targets, F.mse_loss)
        seen.add(tuple(float(p.grad.double().sum()) for p in model.parameters()))
    assert len(seen) == 1


def test_a_recomputed_layer_that_begins_to_draw_draws_the_same_twice():
    masks = []

    class Noisy(nn.Module):
        rate = 0.0

        def forward(self, x):
            mask = torch.ones_like(x) if not self.rate else (torch.rand_like(x) > self.rate)
            masks.append(mask.clone())
            return x * mask

    net = nn.Sequential(nn.Linear(4, 4), Noisy(), nn.Linear(4, 4))
    model = hybrid(net, 2, chunks=1, recompute="always")
    model.train_step(*batch(), F.mse_loss)
    net[1].rate, masks[:] = 0.5, []
    model.train_step(*batch(), F.mse_loss)
    assert len(masks) == 2
    assert torch.equal(*masks)


def test_the_loss_of_an_evaluation_in_half_precision_is_taken_as_in_training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 7))
    data = InMemoryDataset(torch.randn(12, 4), torch.randint(0, 7, (12,)))
    model = hybrid(net, 2, chunks=1, precision="bf16")
    loader = EvalLoader(data, 12, model.world, options=ROWS)
    found = evaluate(model, loader, F.cross_entropy, {})["loss"]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert found == float(F.cross_entropy(net(data.inputs), data.targets))


def trainer(lr, batch_size=4, weight_decay=0.0, store=None, **length):
    torch.manual_seed(0)
    model = hybrid(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    return Trainer(
        model,
        optimizer,
        F.mse_loss,
        TrainLoader(InMemoryDataset(*batch(16)), batch_size, model.world, options=ROWS),
        lr_schedule=torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
        store=store,
        **length,
    )


def test_a_resumed_run_takes_its_hyperparameters_from_the_config(tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(0.1, steps=4, store=store).fit()
    again = trainer(0.04, weight_decay=0.3, steps=8)
    again.resume(store.newest())
    (group,) = again.optimizer.param_groups
    assert group["weight_decay"] == 0.3
    assert group["lr"] == pytest.approx(0.04 * 0.5)
    assert again.optimizer.state_dict()["state"], "the moments are the checkpoint's"


def test_a_run_counted_in_epochs_keeps_its_batch_size(tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(0.1, epochs=1, store=store).fit()
    with pytest.raises(ConfigError, match=r"batch_size=8 .*made with 4.*steps="):
        trainer(0.1, batch_size=8, epochs=2).resume(store.newest())


class RunningSum(nn.Module):
    """Passes on a buffer that its next call changes in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, value):
        value = self.linear(value)
        with torch.no_grad():
            self.total.add_(value.mean(0))
        return value, self.total


class Product(nn.Module):
    def forward(self, values):
        return values[0] * values[1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_buffer_that_crosses_a_cut_is_refused_if_micro_batches_run_ahead(schedule):
    torch.manual_seed(0)
    net = nn.Sequential(RunningSum(), Product())
    model = hybrid(net, 2, chunks=4, schedule=schedule)
    with pytest.raises(NotExactError, match="the first layer with a different output is '1'"):
        model.train_step(*batch(), F.mse_loss)


class CountsBetween(nn.Module):
    """Adds to one buffer after each of its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        for layer in (self.first, self.last):
            x = layer(x)
            with torch.no_grad():
                self.total += x.mean().round()  # exact in any order
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_buffer_that_two_stages_change_is_refused_by_its_name(schedule):
    model = hybrid(CountsBetween(), 2, chunks=4, schedule=schedule, example_inputs=batch()[0])
    with pytest.raises(SplitError, match=r"stage 0 and stage 1 both change the buffer 'total'"):
        model.train_step(*batch(), F.mse_loss)


class Scales(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_the_first_layer_of_a_stage_may_change_its_input_in_place():
    net = nn.Sequential(nn.Linear(4, 4), Scales(), nn.Linear(4, 4))
    plain = copy.deepcopy(net)
    for inputs, targets in zip(*(whole.chunk(4) for whole in batch()), strict=True):
        (F.mse_loss(plain(inputs), targets) / 4).backward()
    hybrid(net, 2, split=[1, 2], chunks=4).train_step(*batch(), F.mse_loss)
    assert_same_gradients(net, plain)


def test_a_micro_batch_that_is_too_small_for_a_batch_norm_says_what_to_set():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        hybrid(net, 2, chunks=2).train_step(*batch(2), F.mse_loss)
    assert any("lower" in note and "chunks" in note for note in caught.value.__notes__)
