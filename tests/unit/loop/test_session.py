"""Session and Loader in one process: the trainer's losses, saving in mid-epoch, plain errors."""

import copy

import pytest
import torch
from support.heights import NAMES, Small, losses_of
from support.training import assert_same, data, plain_net, rich_net
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from hybridtrain import HybridModel, Loader, Session, Trainer, World
from hybridtrain.errors import BatchError, CheckpointError, ConfigError, DataError
from hybridtrain.loop import Tracker
from hybridtrain.loss import cross_entropy

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Numbers(IterableDataset):
    """A stream of `length` samples."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for number in range(self.length):
            yield torch.full((2,), float(number)), torch.tensor(number)


@pytest.mark.parametrize("nb_part", [1, 2])
@pytest.mark.quick_cases(1)
def test_the_three_heights_have_the_same_losses(nb_part, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)  # without MNIST
    monkeypatch.setenv("HYBRIDTRAIN_NB_PART", str(nb_part))
    losses = [losses_of(name) for name in NAMES]
    assert len(losses[0]) == 23
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == printed[2] == printed[4]
    assert printed[1] == printed[3] == printed[5]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.quick_cases(1)
def test_a_session_trains_as_a_trainer(accumulate):
    small = Small(accumulate=accumulate).fit(7)
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(rich_net(), world, chunks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    Trainer(
        model,
        optimizer,
        cross_entropy,
        Loader(data(22), 4, world, seed=1, drop_last=True),
        steps=7,
        accumulate=accumulate,
        clip_norm=1.0,
        lr_schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ).fit()
    assert_same(small.state(), model.state_dict(), "weights and buffers")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.quick_cases(1)
def test_a_session_resumes_in_mid_epoch(accumulate, tmp_path):
    whole = Small(accumulate=accumulate).fit(8)
    first = Small(accumulate=accumulate).fit(4)
    first.session.save_state(tmp_path)
    again = Small(accumulate=accumulate)
    again.session.load_state(tmp_path)
    assert again.session.steps == 4
    again.fit(8)
    assert_same(again.state(), whole.state(), "weights and buffers")
    assert again.losses == whole.losses[4:]
    assert again.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_the_trackers_of_a_session_have_the_hooks_of_those_of_a_trainer(caplog):
    class Diary(Tracker):
        def __init__(self, fails=False):
            self.lines, self.fails = [], fails

        def on_start(self, run):
            self.lines.append(("start", run.step, run.total_steps))

        def on_log(self, run, values):
            if self.fails:
                raise ConnectionError("the server is away")
            self.lines.append(("log", run.step, values))

        def on_exception(self, run, error):
            self.lines.append(("exception", str(error)))

        def on_end(self, run):
            self.lines.append(("end", run.finished))

    away, diary = Diary(fails=True), Diary()

    def train():
        with Session(world=World.from_env(1, "cpu"), trackers=[away, diary]) as session:
            for loss in (1.0, 0.5):
                session.log({"train/loss": loss})
            raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError):
        train()
    assert diary.lines == [
        ("start", 0, None), ("log", 0, {"train/loss": 1.0}), ("log", 0, {"train/loss": 0.5}),
        ("exception", "boom"), ("end", False),
    ]  # fmt: skip
    assert away.lines == [("start", 0, None)]
    (warning,) = [line for line in caplog.messages if line.startswith("Diary ")]
    assert warning.endswith(": ConnectionError: the server is away")


def test_metrics_are_of_every_sample_once_and_in_order():
    small = Small()
    targets, predicted = small.gathered()
    expected = data(11, seed=9)
    assert torch.equal(targets, expected.tensors[1])
    with torch.no_grad():
        output = small.session.unwrap(small.model).eval()(expected.tensors[0])
    assert torch.equal(predicted, output.argmax(1))


@pytest.mark.parametrize("make", [lambda: data(22), lambda: Numbers(22)], ids=["map", "iterable"])
def test_a_loader_resumes_in_mid_epoch(make):
    world = World.from_env(devices="cpu")
    loader = Loader(make(), 4, world, seed=1)
    epochs = [[targets.tolist() for _, targets in loader] for _ in range(2)]
    assert len(epochs[0]) == 6
    assert loader.epoch == 2
    for cut in (1, 5, 6, 8):
        loader, seen = Loader(make(), 4, world, seed=1), []
        while len(seen) < cut:
            for _, targets in loader:
                seen.append(targets.tolist())
                if len(seen) == cut:
                    break
        again = Loader(make(), 4, world, seed=1)
        again.load_state_dict(loader.state_dict())
        rest = []
        while len(seen) + len(rest) < 12:
            rest += [targets.tolist() for _, targets in again]
        assert seen + rest == epochs[0] + epochs[1], cut


def test_a_loop_that_is_left_early_begins_the_next_epoch():
    loader = Loader(data(22), 4, World.from_env(devices="cpu"), seed=1)
    for _ in loader:
        break
    assert len(list(loader)) == 6
    assert loader.epoch == 2


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3)])
def test_another_batch_size_continues_at_the_same_sample_or_just_before_it(before, after):
    world = World.from_env(devices="cpu")
    loader = Loader(data(22), before, world, seed=1)
    order = torch.cat([targets for _, targets in Loader(data(22), 22, world, seed=1)])
    for number, _ in enumerate(loader):
        if number == 2:
            break
    again = Loader(data(22), after, world, seed=1)
    again.load_state_dict(loader.state_dict())
    start = 3 * before // after * after
    assert torch.equal(torch.cat([targets for _, targets in again]), order[start:])


def test_a_batch_that_was_not_trained_on_is_in_no_checkpoint(tmp_path):
    small = Small()
    for inputs, targets in small.train:
        with pytest.raises(CheckpointError, match=r"save after optimizer\.step"):
            small.session.save_state(tmp_path)
        small.session.forward_backward(inputs, targets, cross_entropy)
        with pytest.raises(CheckpointError, match=r"save after optimizer\.step"):
            small.session.save_state(tmp_path)
        small.optimizer.step()
        small.gathered()  # a loop inside this one
        small.session.save_state(tmp_path)
        break
    small.gathered()
    small.session.save_state(tmp_path)


def test_a_step_counts_once_whichever_of_several_optimizers_takes_it():
    session = Session(world=World.from_env(nb_part=2, devices="cpu"))
    net = rich_net()
    own = list(net.parameters())
    both = [torch.optim.SGD(part, 0.1) for part in (own[:2], own[2:])]
    _, first, last, loader = session.prepare(net, *both, DataLoader(data(22), 4))
    for number, (inputs, targets) in enumerate(loader):
        session.forward_backward(inputs, targets, cross_entropy)
        first.step()
        if number > 2:
            last.step()
        assert session.steps == number + 1


def test_two_loaders_in_one_loop_are_refused():
    session = Session(world=World.from_env(nb_part=2, devices="cpu"))
    net = rich_net()
    one, other = (DataLoader(data(22), 4) for _ in range(2))
    _, _, one, other = session.prepare(net, torch.optim.SGD(net.parameters(), 0.1), one, other)
    with pytest.raises(BatchError, match=r"two prepared loaders.*prepare\(\)"):
        for _ in zip(one, other, strict=True):
            pass


def mixed(part):
    return lambda y, t: part * F.cross_entropy(y, t) + (1 - part) * F.cross_entropy(y, (t + 1) % 3)


def test_each_batch_of_a_step_may_have_its_own_loss():
    """As mixup has, with a part for each batch; and two losses of one batch."""
    inputs, targets = data(16).tensors
    session = Session(nb_part=2, accumulate=2, chunks=2)
    net, plain = plain_net(), plain_net()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    _, optimizer, loader = session.prepare(net, sgd, DataLoader(data(16), batch_size=8))
    for number, (x, t) in enumerate(loader):
        found = session.forward_backward(x, t, mixed(0.9 - 0.8 * number))
        also = session.forward_backward(x, t, lambda y, t: y.square().mean())
        rows = slice(8 * number, 8 * number + 8)
        expected = mixed(0.9 - 0.8 * number)(plain(inputs[rows]), targets[rows])
        squares = plain(inputs[rows]).square().mean()
        ((expected + squares) / 2).backward()
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
        assert float(also) == pytest.approx(float(squares), rel=1e-5)
    for mine, its in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-6)
    optimizer.step()


def test_a_loss_that_averages_over_something_else_than_the_steps_first_is_refused():
    session = Session(nb_part=2, accumulate=2, chunks=2)
    net = rich_net()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    _, _, loader = session.prepare(net, sgd, DataLoader(data(16), batch_size=8))
    batches = iter(loader)
    session.forward_backward(*next(batches), mixed(1.0))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))
    with pytest.raises(BatchError, match="EntropyLoss averages over something else than the first"):
        session.forward_backward(*next(batches), weighted)


def test_mistakes_are_named(tmp_path):
    world = World.from_env(devices="cpu")
    session = Session(world=world, accumulate=2)
    net = nn.Linear(6, 3)
    with pytest.raises(ConfigError, match=r"prepare\(\) .* str: "):
        session.prepare(net, "adam")
    with pytest.raises(ConfigError, match="prepares only one model"):
        session.prepare(nn.Linear(2, 2))
    session = Session(world=world, accumulate=2)
    with pytest.raises(ConfigError, match=r"the optimizer holds .*: .*model\.parameters\(\)"):
        session.prepare(net, torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    session = Session(world=world, accumulate=2)
    sampler = WeightedRandomSampler([1.0] * 22, 22)
    with pytest.raises(DataError, match=r"DataLoader.* sampler.*: pass Loader"):
        session.prepare(DataLoader(data(22), 4, sampler=sampler))
    model, optimizer, loader = session.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data(22), 4)
    )
    with pytest.raises(BatchError, match=r"no batch .* in use: .*prepare\(\)"):
        session.forward_backward(torch.zeros(4, 6), torch.zeros(4).long(), cross_entropy)
    with pytest.raises(ConfigError, match=r"prepare\(\) .*ReduceLROnPlateau"):
        session.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer))
    for inputs, targets in loader:
        session.forward_backward(inputs, targets, cross_entropy)
        with pytest.raises(CheckpointError, match="step is not complete"):
            session.save_state(tmp_path)
        with pytest.raises(BatchError, match="samples in dim 0"):
            session.gather_for_metrics(torch.tensor(1.0))
        break
    with pytest.raises(CheckpointError, match="no checkpoint"):
        session.load_state(tmp_path)
    with pytest.raises(ConfigError, match="nb_part= or world="):
        Session(2, world=world)
    assert model(torch.zeros(4, 6)).shape == (4, 3)
    assert optimizer.param_groups[0]["lr"] == 0.1


def grads(small):
    return {n: p.grad.clone() for n, p in small.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("first", [True, False], ids=["zero_grad first", "zero_grad last"])
@pytest.mark.quick_cases(1)
def test_gradients_may_be_dropped_before_a_batch_or_after_it(first):
    whole = Small(accumulate=2).fit(4)
    small = Small(accumulate=2)
    while small.session.steps < 4:
        for inputs, targets in small.train:
            if first:
                small.optimizer.zero_grad()
            small.session.forward_backward(inputs, targets, cross_entropy)
            small.session.clip_grad_norm_(1.0)
            small.optimizer.step()
            if not first:
                small.optimizer.zero_grad()
            small.schedule.step()
            if small.session.steps == 4:
                break
    assert_same(small.state(), whole.state(), "weights and buffers")


def test_an_evaluation_inside_a_step_leaves_the_step_as_it_was():
    found = []
    for evaluates in (False, True):
        small = Small(accumulate=2)
        for number, (inputs, targets) in enumerate(small.train):
            small.session.forward_backward(inputs, targets, cross_entropy)
            if evaluates and number == 0:
                with torch.no_grad():
                    for _ in small.evaluation:
                        break
                    small.gathered()
                small.model.train()
                assert not small.session.sync_gradients
            if small.session.sync_gradients:
                break
        assert number == 1
        found.append(grads(small))
    assert found[0]
    assert_same(found[1], found[0], "gradients")


def test_a_loop_left_in_the_middle_of_a_step_drops_its_gradients(tmp_path):
    small = Small(accumulate=2)
    for inputs, targets in small.train:
        small.session.forward_backward(inputs, targets, cross_entropy)
        break
    assert not grads(small)
    assert small.session.sync_gradients
    with pytest.raises(BatchError, match=r"no batch .* in use: .*prepare\(\)"):
        small.session.forward_backward(inputs, targets, cross_entropy)


def test_a_batch_may_be_used_after_its_loop():
    small = Small()
    inputs, targets = next(iter(small.train))
    small.session.forward_backward(inputs, targets, cross_entropy)
    assert grads(small)


def test_a_clipped_step_that_is_not_taken_leaves_the_next_one_scaled():
    small = Small(precision="fp16")
    norms = []
    for inputs, targets in small.train:
        small.session.forward_backward(inputs, targets, cross_entropy)
        norms.append(float(small.session.clip_grad_norm_(1e9)))
        small.optimizer.zero_grad()  # and no step
        if len(norms) == 2:
            break
    assert 0 < norms[1] < 100 * norms[0]


def test_a_schedule_continues_where_it_was_or_is_refused(tmp_path):
    first = Small().fit(3)
    first.session.save_state(tmp_path)
    first.session.load_state(tmp_path)  # already there
    saved = first.schedule.get_last_lr()
    again = Small()
    again.session.load_state(tmp_path)
    assert again.schedule.get_last_lr() == saved == first.schedule.get_last_lr()
    assert again.schedule.last_epoch == 3
    once = Small()
    once.schedule.step()  # one of the three
    once.session.load_state(tmp_path)
    assert once.schedule.get_last_lr() == saved
    state = first.fit(5).state()
    with pytest.raises(CheckpointError, match=r"CosineAnnealingLR .* step 5, .* step 3 "):
        first.session.load_state(tmp_path)
    assert_same(first.state(), state, "nothing was loaded")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": RandomSampler(range(22), replacement=True)}, "DataLoader has a .*sampler"),
        ({"sampler": RandomSampler(range(22), num_samples=4)}, "DataLoader has a .*sampler"),
        ({"shuffle": True, "generator": torch.Generator()}, "has a generator"),
        ({"sampler": RandomSampler(range(22), generator=torch.Generator())}, "has a generator"),
        ({"worker_init_fn": print}, "has a worker_init_fn"),
    ],
)
def test_what_would_have_no_effect_on_a_loader_is_refused(options, message):
    session = Session(world=World.from_env(devices="cpu"))
    with pytest.raises(DataError, match=message):
        session.prepare(DataLoader(data(22), 4, **options))


def test_prepared_objects_have_the_attributes_of_those_of_the_user():
    small = Small()
    assert len(small.train.dataset) == 22
    assert small.train.batch_size == 4
    for each in (small.model, small.optimizer, small.schedule, small.train):
        assert vars(copy.copy(each)) == vars(each)
        assert not hasattr(each, "no_such_attribute")
