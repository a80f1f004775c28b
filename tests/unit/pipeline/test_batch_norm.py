"""`batch_norm: deferred`: running statistics move once per step, as on the whole batch."""

import copy
import dataclasses
import re

import pytest
import torch
from support.compare import assert_same, assert_same_gradients, hybrid, plain_step
from support.engine import Faulty
from support.nets import Traced, floats
from support.training import rich_net
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.errors import ConfigError
from hybridtrain.options import LoaderOptions

CHECKPOINTS = ["never", "except_last", "always", {"every": 1}]
NB_PARTS = [1, 2, 3]

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def make(**options):
    """The first norm sees of each sample what it sees in the unsplit model; the second does not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **options), nn.ReLU(inplace=True), Faulty(),
        nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, **options),
    )  # fmt: skip


def data(rows, seed=0):
    # far from 0, so that what is left out shows
    return 3 + floats(rows, 2, 5, 5, seed=seed)


def loss_fn(output, _=None):
    # without the square the gradient through a norm would be nothing
    return (output.square() * torch.arange(3.0)[:, None, None]).mean() + output.exp().mean()


def deferred(net, nb_part=2, **options):
    """The pipeline of `net`, `net` itself, and an unsplit copy."""
    plain = copy.deepcopy(net)
    return hybrid(net, nb_part, batch_norm="deferred", **options), net, plain


def statistics(norm):
    return {name: buffer.clone() for name, buffer in norm.named_buffers()}


def assert_first_norm_is_close(net, plain, what=""):
    # the same sums over the samples, merged from micro-batches
    assert_same(net[1].named_buffers(), plain[1].named_buffers(), what, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, None])
@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(2)
def test_deferred_statistics_move_as_in_the_unsplit_model_on_the_whole_batch(
    nb_part, recompute, momentum
):
    model, net, plain = deferred(make(momentum=momentum), nb_part, recompute=recompute)
    # whole, ragged, and with fewer samples than chunks
    for seed, rows in enumerate([8, 10, 7, 3, 1, 12]):
        x = data(rows, seed)
        plain(x)
        model.train_step(x, None, loss_fn)
        assert_first_norm_is_close(net, plain, f"{rows} samples")
        assert int(net[5].num_batches_tracked) == seed + 1
    assert all(norm.track_running_stats for norm in (net[1], net[5]))


def test_by_default_statistics_move_at_every_micro_batch():
    net = make()
    plain = copy.deepcopy(net)
    plain_step(plain, data(10), None, loss_fn)
    hybrid(net).train_step(data(10), None, loss_fn)
    assert_same(net.named_buffers(), plain.named_buffers())
    assert int(net[1].num_batches_tracked) == 4


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
def test_deferred_statistics_leave_the_gradients_of_micro_batches_as_they_were(recompute):
    model, net, plain = deferred(make(), recompute=recompute)
    plain_step(plain, data(10), None, loss_fn)
    model.train_step(data(10), None, loss_fn)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize(
    "where", [("forward", 2), ("forward", 0), ("backward", 1), ("backward", 3)], ids=str
)
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(4)
def test_no_statistics_of_a_failed_step_leak_into_the_next(nb_part, where):
    model, net, plain = deferred(make(), nb_part)
    x = data(8, 0)
    plain(x)
    model.train_step(x, None, loss_fn)
    before = [statistics(net[index]) for index in (1, 5)]
    net[3].fail_at(*where)
    with pytest.raises(ArithmeticError):
        model.train_step(data(8, 1), None, loss_fn)
    net[3].never()
    for index, old in zip((1, 5), before, strict=True):
        assert net[index].track_running_stats
        assert_same(net[index].named_buffers(), old)
    x = data(10, 2)
    plain(x)
    model.train_step(x, None, loss_fn)
    assert_first_norm_is_close(net, plain)


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_evaluation_uses_deferred_statistics_and_keeps_them(nb_part):
    model, _, plain = deferred(make(), nb_part)
    for seed in range(3):
        model.train_step(data(8, seed), None, loss_fn)
    before = copy.deepcopy(model.state_dict())
    plain.load_state_dict(before)
    x = data(10, 9)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x).detach())
    assert_same(model.state_dict(), before)


def test_a_norm_that_is_frozen_in_eval_mode_stays_while_the_others_move():
    model, net, plain = deferred(make())
    net[5].eval()
    before = statistics(net[5])
    for seed in range(2):
        plain(data(10, seed))
        model.train_step(data(10, seed), None, loss_fn)
    assert_first_norm_is_close(net, plain)
    assert_same(net[5].named_buffers(), before)


def test_a_forward_in_train_mode_moves_deferred_statistics_once():
    model, net, plain = deferred(make())
    plain(data(10))
    model(data(10))
    assert_first_norm_is_close(net, plain)


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
def test_norms_without_affine_parameters_move_alike(recompute):
    model, net, plain = deferred(make(affine=False), recompute=recompute)
    for seed in range(2):
        plain(data(10, seed))
        model.train_step(data(10, seed), None, loss_fn)
    assert_first_norm_is_close(net, plain)


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
def test_a_norm_without_running_statistics_stays_without(recompute):
    model, net, plain = deferred(make(track_running_stats=False), recompute=recompute)
    plain_step(plain, data(10), None, loss_fn)
    model.train_step(data(10), None, loss_fn)
    assert_same_gradients(net, plain)
    assert net[1].running_mean is None
    assert not net[1].track_running_stats
    assert list(net.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("dims", [1, 3])
def test_norms_over_1_and_3_dimensions_move_alike(dims):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d if dims == 1 else nn.BatchNorm3d
    model, net, plain = deferred(nn.Sequential(nn.Identity(), norm(3), nn.Identity()))
    shape = (10, 3) if dims == 1 else (10, 3, 2, 2, 2)
    x = floats(*shape) * 2 + 1
    plain(x)
    model.train_step(x, None, lambda output, _: output.exp().mean())
    assert_first_norm_is_close(net, plain)


# A short last batch of an epoch.
def small_pictures(size):
    """A net whose last batch norm sees pictures of `size` x `size`."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(size),
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * size**2, 3),
    )  # fmt: skip


def run_of(net, samples, batch_size=8, chunks=2, pictures=False, **options):
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, world, chunks=chunks, **options.pop("pipeline", {}))
    inputs = floats(samples, 1, 4, 4) if pictures else floats(samples, 6)
    dataset = TensorDataset(inputs, torch.arange(samples) % 3)
    loader = LoaderOptions(drop_last=options.pop("drop_last", False))
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        nn.functional.cross_entropy,
        TrainLoader(dataset, batch_size, world, options=loader),
        **({} if "steps" in options else {"epochs": 1}),
        **options,
    )


@pytest.mark.parametrize(
    ("net", "name", "pictures"),
    [(rich_net, "1", False), (lambda: small_pictures(1), "4", True)],
    ids=["features", "pictures"],
)
@pytest.mark.parametrize("samples", [25, 27])  # a last batch of 1, and of 3 = 2 + 1
def test_a_last_batch_that_a_batch_norm_will_fail_in_is_an_error_of_the_first_step(
    net, name, pictures, samples
):
    ours = run_of(net(), samples, pictures=pictures)
    with pytest.raises(ConfigError) as caught:
        ours.fit()
    assert ours.step == 1
    message = str(caught.value)
    assert f" {samples % 8} samples" in message
    assert f"batch norm {name} " in message
    for fact in ("replicas: 1, chunks=2", "drop_last=True", "lower chunks=", "batch_size="):
        assert fact in message


@pytest.mark.parametrize(
    ("net", "samples", "options"),
    [
        (rich_net, 26 + 2, {}),  # a last batch of 4
        (rich_net, 25, {"drop_last": True}),
        (rich_net, 25, {"steps": 3}),  # the last batch is the fourth
        (lambda: small_pictures(2), 25, {"pictures": True}),
        (Traced, 25, {}),
        (lambda: rich_net().requires_grad_(True), 27, {"chunks": 1}),
    ],
)
@pytest.mark.quick_cases(2)
def test_a_last_batch_that_is_no_danger_is_no_error(net, samples, options, caplog):
    ours = run_of(net(), samples, **options)
    assert ours.fit()["steps"] == ours.total_steps
    assert not caplog.messages


def test_a_batch_norm_in_eval_mode_takes_any_last_batch(caplog):
    ours = run_of(rich_net(), 25)
    for module in ours.model.net.modules():
        module.training = not isinstance(module, nn.BatchNorm1d)
    assert ours.fit()["steps"] == 4
    assert not caplog.messages


def test_where_the_input_of_a_batch_norm_is_not_seen_the_last_batch_is_a_warning(caplog):
    ours = run_of(rich_net(), 25)
    # without a compiler the layers run as they are
    ours.model.options = dataclasses.replace(ours.model.options, compile=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours.fit()
    assert re.search(r"1 samples.*\(replicas: 1, chunks=2\); .*drop_last=True", caplog.text)
