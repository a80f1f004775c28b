"""`batch_norm: deferred`: running statistics move once a step, as if the batch had come whole."""

import copy

import pytest
import torch
from torch import nn

from hybridtrain import HybridModel, World

CHECKPOINTS = ["never", "except_last", "always", {"every": 1}]
NB_PARTS = [1, 2, 3]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Faulty(nn.Module):
    """Raises at one micro-batch, in the forward or in the backward."""

    where = None
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.where == ("forward", self.calls):
            raise ArithmeticError("boom")
        if self.where == ("backward", self.calls):
            x.register_hook(self._raise)
        return x

    @staticmethod
    def _raise(grad):
        raise ArithmeticError("boom")


def make(**options):
    """The first norm sees of each row what it sees in the unsplit model; the second does not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **options), nn.ReLU(inplace=True), Faulty(),
        nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3, **options),
    )  # fmt: skip


def data(rows, seed):
    # far from 0, so that what is left out shows
    return 3 + torch.randn(rows, 2, 5, 5, generator=torch.Generator().manual_seed(seed))


def loss_fn(output, _):
    # without the square the gradient through a norm would be nothing
    return (output.square() * torch.arange(3.0)[:, None, None]).mean() + output.exp().mean()


def hybrid(net, nb_part=2, **options):
    options = {"chunks": 4, "batch_norm": "deferred", **options}
    return HybridModel(net, World.from_env(nb_part=nb_part, devices="cpu"), **options)


def statistics(norm):
    return {name: getattr(norm, name).clone() for name in STATISTICS}


def assert_first_norm_is_close(net, plain, what=""):
    for name in STATISTICS:
        # the same sums over the rows, merged from micro-batches
        torch.testing.assert_close(
            getattr(net[1], name), getattr(plain[1], name), rtol=1e-5, atol=1e-6,
            msg=lambda m, n=name: f"{what} {n}: {m}",
        )  # fmt: skip


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, None])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_statistics_move_as_in_the_unsplit_model_on_the_whole_batch(nb_part, checkpoint, momentum):
    net = make(momentum=momentum)
    plain = copy.deepcopy(net)
    model = hybrid(net, nb_part, checkpoint=checkpoint)
    # whole, ragged, and with fewer rows than chunks
    for seed, rows in enumerate([8, 10, 7, 3, 1, 12]):
        x = data(rows, seed)
        plain(x)
        model.train_step(x, None, loss_fn)
        assert_first_norm_is_close(net, plain, f"{rows} rows")
        assert int(net[5].num_batches_tracked) == seed + 1
    assert all(norm.track_running_stats for norm in (net[1], net[5]))


def test_the_default_moves_them_at_every_micro_batch():
    net = make()
    plain = copy.deepcopy(net)
    x = data(10, 0)
    for part in x.tensor_split(4):
        plain(part)
    HybridModel(net, World.from_env(nb_part=2, devices="cpu"), chunks=4).train_step(
        x, None, loss_fn
    )
    for index in (1, 5):
        for name in STATISTICS:
            assert torch.equal(getattr(net[index], name), getattr(plain[index], name))
    assert int(net[1].num_batches_tracked) == 4


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_gradients_are_those_of_statistics_per_micro_batch_all_the_same(checkpoint):
    net = make()
    plain = copy.deepcopy(net)
    x = data(10, 0)
    for part in x.tensor_split(4):
        (loss_fn(plain(part), None) * (len(part) / 10)).backward()
    hybrid(net, 2, checkpoint=checkpoint).train_step(x, None, loss_fn)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(
    "where", [("forward", 3), ("forward", 1), ("backward", 2), ("backward", 4)], ids=str
)
@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_nothing_of_a_failed_step_leaks_into_the_next(nb_part, where):
    net = make()
    plain = copy.deepcopy(net)
    model = hybrid(net, nb_part)
    x = data(8, 0)
    plain(x)
    model.train_step(x, None, loss_fn)
    before = [statistics(net[index]) for index in (1, 5)]
    net[3].calls, net[3].where = 0, where
    with pytest.raises(ArithmeticError):
        model.train_step(data(8, 1), None, loss_fn)
    net[3].where = None
    for index, old in zip((1, 5), before, strict=True):
        assert net[index].track_running_stats
        for name in STATISTICS:
            assert torch.equal(getattr(net[index], name), old[name]), name
    x = data(10, 2)
    plain(x)
    model.train_step(x, None, loss_fn)
    assert_first_norm_is_close(net, plain)


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_evaluation_uses_and_keeps_the_statistics(nb_part):
    net = make()
    plain = copy.deepcopy(net)
    model = hybrid(net, nb_part)
    for seed in range(3):
        model.train_step(data(8, seed), None, loss_fn)
    before = copy.deepcopy(model.state_dict())
    plain.load_state_dict(before)
    x = data(10, 9)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x).detach())
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_norm_that_is_frozen_in_eval_mode_stays_while_the_others_move():
    net = make()
    plain = copy.deepcopy(net)
    model = hybrid(net, 2)
    net[5].eval()
    before = statistics(net[5])
    for seed in range(2):
        plain(data(10, seed))
        model.train_step(data(10, seed), None, loss_fn)
    assert_first_norm_is_close(net, plain)
    for name in STATISTICS:
        assert torch.equal(getattr(net[5], name), before[name])


def test_a_forward_in_train_mode_moves_them_once_too():
    net = make()
    plain = copy.deepcopy(net)
    x = data(10, 0)
    plain(x)
    hybrid(net, 2)(x)
    assert_first_norm_is_close(net, plain)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_without_affine_parameters(checkpoint):
    net = make(affine=False)
    plain = copy.deepcopy(net)
    model = hybrid(net, 2, checkpoint=checkpoint)
    for seed in range(2):
        plain(data(10, seed))
        model.train_step(data(10, seed), None, loss_fn)
    assert_first_norm_is_close(net, plain)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_a_norm_without_running_statistics_stays_without(checkpoint):
    net = make(track_running_stats=False)
    plain = copy.deepcopy(net)
    model = hybrid(net, 2, checkpoint=checkpoint)
    x = data(10, 0)
    for part in x.tensor_split(4):
        (loss_fn(plain(part), None) * (len(part) / 10)).backward()
    model.train_step(x, None, loss_fn)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert net[1].running_mean is None
    assert not net[1].track_running_stats
    assert list(net.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("dims", [1, 3])
def test_norms_of_other_dimensions(dims):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d if dims == 1 else nn.BatchNorm3d
    net = nn.Sequential(nn.Identity(), norm(3), nn.Identity())
    plain = copy.deepcopy(net)
    shape = (10, 3) if dims == 1 else (10, 3, 2, 2, 2)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2 + 1
    plain(x)
    hybrid(net, 2).train_step(x, None, lambda output, _: output.exp().mean())
    assert_first_norm_is_close(net, plain)
