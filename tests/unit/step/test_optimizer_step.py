"""One optimizer step: the same at every height, skipped and named where it is not finite."""

import math
from itertools import pairwise

import pytest
import torch
from support.heights import Small
from support.nets import Traced
from support.stand_in_gpus import on_host, stand_in_gpus
from support.training import assert_same, data, plain_net, rich_net, trainer
from torch import nn

from hybridtrain import HybridModel, Loader, OptimizerStep, World
from hybridtrain.checkpoint import resume_run, save_run
from hybridtrain.errors import BatchError, CheckpointError, ConfigError, DivergedError
from hybridtrain.launch import activity
from hybridtrain.loss import cross_entropy
from hybridtrain.pipeline.recomputation_proof import is_compared

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def own_loop(net, *, nb_part=2, samples=22, made=None, **settings):
    """A model, an `OptimizerStep` and a loader, for a loop of one's own."""
    world = World.from_env(nb_part=nb_part, devices="cpu")
    model = HybridModel(net, world, chunks=2, seed=3)
    model.train()
    step = OptimizerStep(model, torch.optim.AdamW(model.parameters(), lr=0.02), **settings)
    loader = Loader(made or data(samples), 4, world, seed=1, drop_last=True)
    return model, step, loader


def run(step, loader, steps):
    while step.number < steps:
        for batch in loader.batches():
            step.run([batch], cross_entropy)
            if step.number == steps:
                return


def test_a_loop_of_ones_own_trains_as_a_trainer():
    ours = trainer(rich_net(), steps=7, clip_norm=1.0)
    ours.fit()
    model, step, _ = own_loop(rich_net(), clip_norm=1.0)
    stream = ours.train.at_start().stream()
    for _ in range(7):
        step.run([next(stream)], cross_entropy)
    assert_same(model.state_dict(), ours.model.state_dict(), "weights and buffers")


def test_a_loss_that_is_no_function_is_refused_in_a_loop_of_ones_own():
    _, step, loader = own_loop(plain_net())
    with pytest.raises(ConfigError, match="must be a function, not a int"):
        step.run([next(iter(loader.batches()))], 3)


def test_a_loop_of_ones_own_saves_and_resumes_in_two_lines(tmp_path):
    def decayed(model_and_more):
        model, step, loader = model_and_more
        step.lr_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizers[0], 9)
        return model, step, loader

    whole, step, loader = decayed(own_loop(rich_net()))
    run(step, loader, 9)
    _, step, loader = decayed(own_loop(rich_net()))
    assert resume_run(step, tmp_path, loader, missing_ok=True) is None
    run(step, loader, 6)  # in the second epoch
    save_run(step, tmp_path, loader)
    again, step, loader = decayed(own_loop(rich_net()))
    resume_run(step, tmp_path, loader)
    assert step.number == 6
    run(step, loader, 9)
    assert_same(again.state_dict(), whole.state_dict(), "weights and buffers")


def test_a_directory_without_a_checkpoint_is_one_line(tmp_path):
    _, step, loader = own_loop(plain_net())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        resume_run(step, tmp_path, loader)


def test_accumulated_batches_give_the_gradients_of_one_large_batch():
    gradients = []
    model, step, loader = own_loop(
        plain_net(),
        samples=14,
        on_gradients=lambda: gradients.extend(p.grad.clone() for p in model.parameters()),
    )
    batches = list(loader.batches())  # of 4 samples, 3 of them
    step.run(batches, cross_entropy)
    whole = plain_net()
    inputs, targets = (torch.cat([getattr(b, k) for b in batches]) for k in ("inputs", "targets"))
    nn.functional.cross_entropy(whole(inputs), targets).backward()
    for ours, parameter in zip(gradients, whole.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_a_batch_too_many_is_refused():
    _, step, loader = own_loop(plain_net())
    batch = next(iter(loader.batches()))
    with pytest.raises(BatchError, match="once for each batch"):
        step.train_step(batch.inputs, batch.targets)
    step.begin([batch], cross_entropy)
    step.train_step(batch.inputs, batch.targets)
    with pytest.raises(BatchError, match="once for each batch"):
        step.train_step(batch.inputs, batch.targets)


def poisoned(value=float("nan")):
    made = data(22)
    made.tensors[0][5, 2] = value
    return made


@pytest.mark.parametrize("height", ["own loop", "Session", "traced"])
@pytest.mark.quick_cases(1)
def test_a_step_that_is_not_finite_is_skipped_and_named(height, caplog):
    if height != "Session":
        net = rich_net() if height == "own loop" else Traced()
        model, step, loader = own_loop(net, made=poisoned())
        before = [copies(model)]
        while step.number < 5:
            for batch in loader.batches():
                step.run([batch], cross_entropy)
                before.append(copies(model))
        counts = step.finite.counts()
    else:
        small = Small(made=poisoned())
        before = [small.state()]
        for _ in range(5):
            small.fit(small.session.steps + 1)
            before.append(small.state())
        counts = small.session.state_dict()
        assert sum(loss != loss for loss in small.losses) == 1  # of no step that was taken
    same = [all(map(torch.equal, a.values(), b.values())) for a, b in pairwise(before)]
    assert same.count(True) == counts["skipped_steps"] == 1
    (warning,) = [r.getMessage() for r in caplog.records if "skipping step" in r.getMessage()]
    assert f"skipping step {same.index(True) + 1} because its loss is not finite" in warning
    assert "the inputs of the batch, before stage 0: a tensor has NaN" in warning


def copies(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_session_ends_when_too_many_steps_are_skipped():
    made = data(22)
    made.tensors[0].fill_(float("nan"))
    small = Small(made=made, max_skipped=3)
    with pytest.raises(DivergedError, match="3 consecutive steps, up to step 3"):
        small.fit(5)


def test_a_session_saves_no_weights_that_are_not_finite(tmp_path):
    small = Small().fit(2)
    with torch.no_grad():
        next(small.model.parameters())[0] = float("nan")
    with pytest.raises(DivergedError, match="no checkpoint was saved"):
        small.session.save(tmp_path)
    assert not list(tmp_path.glob("step_*"))


def test_counts_of_a_session_are_kept_over_a_restart(tmp_path):
    small = Small(made=poisoned()).fit(5)
    small.session.save(tmp_path)
    again = Small(made=poisoned())
    assert again.session.resume(tmp_path)
    assert again.session.state_dict()["skipped_steps"] == 1


def net_with_buffers():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


class Rounds:
    """Steps on the devices of `world`, with the host's waits in each."""

    def __init__(self, devices, made, *, fused=True, gpus=None, **settings):
        world = World.from_env(2, [str(device) for device in devices])
        self.model = HybridModel(net_with_buffers(), world, chunks=2, seed=3)
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=fused)
        self.step = OptimizerStep(self.model, optimizer, clip_norm=1.0, **settings)
        self.waits = []
        loader = Loader(made, 4, world, seed=1, drop_last=True)
        for batch in (batch for _ in range(2) for batch in loader.batches()):
            before = gpus.syncs if gpus else 0
            self.step.run([batch], cross_entropy)
            self.waits.append((gpus.syncs if gpus else 0) - before)

    def state(self):
        moments = self.step.optimizer.state_dict()["state"]
        found = {**self.model.state_dict()}
        return on_host(found | {f"{n}.{k}": v for n, e in moments.items() for k, v in e.items()})


@pytest.mark.parametrize(("fused", "waits"), [(True, 0), (False, 1)])
@pytest.mark.thorough
def test_a_fused_optimizer_makes_no_host_wait_for_the_norm(fused, waits):
    with stand_in_gpus(2) as gpus:
        rounds = Rounds(gpus.devices, data(22), fused=fused, gpus=gpus)
    # some steps compare what a layer changes
    found = [wait for step, wait in enumerate(rounds.waits, 1) if not is_compared(step)]
    assert found == [waits] * len(found)
    assert len(found) >= 5


@pytest.mark.parametrize("spoilt", [[], [5], [5, 9], list(range(12, 20))])
@pytest.mark.thorough
def test_what_a_device_decides_is_what_the_host_would_have_decided(spoilt, caplog):
    made = data(22)
    made.tensors[0][spoilt, 2] = float("nan")
    expected = Rounds(["cpu", "cpu"], made)
    losses = expected.step.mean_loss()
    said = warnings_in(caplog)
    with stand_in_gpus(2) as gpus:
        rounds = Rounds(gpus.devices, made, gpus=gpus)
        assert rounds.step.mean_loss() == losses
        assert_same(rounds.state(), expected.state(), "weights, buffers and moments")
    assert rounds.step.state_dict() == expected.step.state_dict()
    assert rounds.step.finite.skipped == 0 if not spoilt else rounds.step.finite.skipped > 1
    assert warnings_in(caplog) == said


def warnings_in(caplog):
    said = [r.getMessage() for r in caplog.records if "skipping step" in r.getMessage()]
    caplog.clear()
    return said


@pytest.mark.thorough
def test_a_run_that_diverges_on_a_device_ends_one_step_later():
    made = data(22)
    made.tensors[0].fill_(float("nan"))
    work = activity.work
    with (
        stand_in_gpus(2) as gpus,
        pytest.raises(DivergedError, match=r"3 .* up to step 3") as error,
    ):
        Rounds(gpus.devices, made, gpus=gpus, max_skipped=3)
    assert activity.work == work  # the watchdog waits for no rest of the step
    assert "the inputs of the batch" in str(error.value)


def test_a_gradient_that_is_clipped_twice_is_clipped_once():
    model, step, loader = own_loop(plain_net())
    batch = next(iter(loader.batches()))
    step.begin([batch], cross_entropy)
    step.train_step(batch.inputs, batch.targets)
    step.clip(0.01)
    once = [p.grad.clone() for p in model.parameters()]
    assert float(step.clip(0.01)) == pytest.approx(0.01, rel=1e-3)
    assert all(
        torch.allclose(p.grad, g, rtol=1e-3) for p, g in zip(model.parameters(), once, strict=True)
    )


def test_a_session_that_leaves_a_batch_out_still_ends_its_step_with_the_last_one():
    small = Small(accumulate=2)
    called = []
    model_step = small.session.model.train_step
    small.session.model.train_step = lambda *a, **k: called.append(k["sync"]) or model_step(*a, **k)
    for number, (inputs, targets) in enumerate(small.train):
        if number == 1:
            small.session.train_step(inputs, targets, cross_entropy)
            small.optimizer.step()
            break
    assert called == [True]
    assert small.session.steps == 1


def test_a_loop_inside_of_a_step_that_trains_too_is_refused():
    small = Small(accumulate=2)
    session = small.session
    (other,) = [session.prepare(Loader(data(22), 4, session.world, seed=2))]
    batches = iter(small.train)
    session.train_step(*next(batches), cross_entropy)
    for inputs, targets in other:
        session.train_step(inputs, targets, cross_entropy)
        break
    with pytest.raises(BatchError, match="another loop trained between the batches"):
        session.train_step(*next(batches), cross_entropy)


def test_losses_do_not_pile_up_where_nothing_is_read():
    _, step, loader = own_loop(plain_net())
    batch = next(iter(loader.batches()))
    (result,) = step.run([batch], cross_entropy).results
    step.losses._added = []
    step.losses.add([result] * 2000)
    step.losses.fold(1000, but=[result])
    assert len(step.losses._added) == 2000  # of the step that a device has still to tell of
    step.losses.fold(1000)
    assert not step.losses._added
    assert step.mean_loss() == pytest.approx(float(result.loss))


def test_an_optimizer_that_is_replaced_in_a_trainer_is_the_one_that_steps():
    training = trainer(plain_net(), steps=2)
    training.fit()
    before = {n: v.clone() for n, v in training.model.state_dict().items()}
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.0)
    training.total_steps = 4
    training.fit()
    assert_same(training.model.state_dict(), before, "weights")


def test_a_session_that_goes_back_forgets_the_steps_that_it_gives_up(tmp_path):
    whole = Small().fit(4)
    small = Small().fit(2)
    small.session.save(tmp_path)
    small.fit(3)  # given up
    for inputs, targets in small.train:  # and one that is trained, and not taken
        small.session.train_step(inputs, targets, cross_entropy)
        break
    small.optimizer.zero_grad()
    again = Small()
    again.session.resume(tmp_path)
    expected = again.fit(4).losses
    small.schedule.scheduler.last_epoch = small.schedule.steps = 0  # which alone cannot go back
    small.losses.clear()
    small.session.resume(tmp_path)
    assert math.isnan(small.session.mean_loss())  # nothing is left of them
    small.schedule.scheduler.step(2)
    small.fit(4)
    assert small.losses == expected
    assert_same(small.state(), whole.state(), "weights and buffers")


def test_an_error_after_a_step_was_taken_does_not_train_on_its_batches_again():
    class Ends(torch.optim.lr_scheduler.ConstantLR):
        def step(self, epoch=None):
            if self.last_epoch == 1:
                raise ValueError("past its end")
            super().step(epoch)

    training = trainer(plain_net(), steps=4, lr=lambda optimizer: Ends(optimizer, 1.0))
    with pytest.raises(ValueError, match="past its end"):
        training.fit()
    assert training.step == training.train.batch == 2
