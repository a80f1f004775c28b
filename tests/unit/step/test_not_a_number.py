"""A loss, gradient or weight that is not finite: skipped, counted, named, stopped, not saved."""

import json
import logging
import math
import os
import re
import signal

import pytest
import torch
from support.engine import fp16_trainer
from support.training import SAMPLES, Recorder, assert_same, data, plain_net, rich_net, trainer
from torch import nn

from hybridtrain.checkpoint import CheckpointStore, NoSpaceError
from hybridtrain.errors import ConfigError, DivergedError, Interrupted
from hybridtrain.loss import cross_entropy
from hybridtrain.step.non_finite import BufferSnapshot, non_finite_names

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Weights(Recorder):
    """Keeps copies of the weights, buffers and moments after each step."""

    def __init__(self):
        super().__init__()
        self.after = {}

    def on_step(self, ours, samples):
        super().on_step(ours, samples)
        state = {f"weights.{k}": v.clone() for k, v in ours.model.state_dict().items()}
        for name, entry in enumerate(ours.optimizer.state_dict()["state"].values()):
            state |= {f"moments.{name}.{k}": v.clone() for k, v in entry.items()}
        self.after[ours.step] = state


def watched(*args, **options):
    return trainer(*args, recorder=Weights(), **options)


def poisoned(sample=5, value=float("nan")):
    """The data with one bad feature, and the step of batches of 4 that meets it."""
    made = data()
    made.tensors[0][sample, 2] = value
    return made


class PoisonedGradient(torch.autograd.Function):
    """Passes its input on; its gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Faulty(nn.Module):
    """Spoils what `what` says, at the given calls in training."""

    def __init__(self, what, calls):
        super().__init__()
        self.what, self.calls, self.count = what, calls, 0

    def forward(self, x):
        if not self.training:
            return x
        self.count += 1
        if self.count in self.calls:
            return PoisonedGradient.apply(x) if self.what == "gradient" else x * float(self.what)
        return x


def faulty_net(what, calls):
    net = rich_net()
    return nn.Sequential(*net[:4], Faulty(what, calls), *net[4:])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.quick_cases(1)
def test_a_step_with_a_bad_sample_changes_no_weight_no_buffer_and_no_moment(value, optimizer):
    ours = watched(rich_net(), data=poisoned(value=value), optimizer=lambda p: optimizer(p, 0.02))
    summary = ours.fit()
    after = ours.recorder.after
    assert summary["steps"] == 9
    assert summary["skipped_steps"] in (1, 2)  # the sample comes in the first epoch of 7 steps
    skipped = [step for step in range(2, 10) if same(after[step], after[step - 1])]
    assert len(skipped) == summary["skipped_steps"]
    for state in after.values():
        assert not non_finite_names(state)
    logged = [(s, v) for (s, name), v in ours.recorder.values.items() if "skipped" in name]
    assert logged[0] == (skipped[0], 1)
    assert logged[-1] == (9, len(skipped))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_skipped_step_leaves_the_run_as_if_its_batch_had_not_been():
    # plain SGD on a net without draws: leaving a batch out is the same as skipping it
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    ours = trainer(plain_net(), data=poisoned(), optimizer=sgd, steps=7, clip_norm=0.5)
    ours.fit()
    net = plain_net()
    plain = sgd(net.parameters())
    stream = ours.train.at_start().stream()
    for _ in range(7):
        batch = next(stream)
        if batch.inputs.isfinite().all():
            parts = zip(batch.inputs.split(2), batch.targets.split(2), strict=True)
            for inputs, targets in parts:
                (cross_entropy(net(inputs), targets) / 2).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            plain.step()
            plain.zero_grad()
    stream.close()
    assert_same(ours.model.state_dict(), net.state_dict(), "weights")


def test_the_logged_loss_is_that_of_the_steps_that_were_taken():
    ours = trainer(data=poisoned(), epochs=1, log_every=7)
    ours.fit()
    assert math.isfinite(ours.recorder.values[7, "train/loss"])


@pytest.mark.parametrize(
    ("net", "where"),
    [
        (faulty_net("nan", [3]), "stage 1, layer '4': its output has NaN, and its inputs"),
        (faulty_net("inf", [4]), "stage 1, layer '4': its output has"),
        (faulty_net("gradient", [3]), "stage 0, the backward of layer '1': the gradient of 1."),
    ],
)
@pytest.mark.quick_cases(1)
def test_the_warning_names_the_step_the_stage_and_the_layer(net, where, caplog):
    # calls 3 and 4 are the two micro-batches of step 2; the diagnosis repeats them
    net[4].calls = {*net[4].calls, *(call + 2 for call in net[4].calls)}
    ours = trainer(net, nb_part=3, chunks=2, steps=4)
    with caplog.at_level(logging.WARNING):
        assert ours.fit()["skipped_steps"] == 1
    [record] = [r for r in caplog.records if "skipping step" in r.message]
    assert record.message.startswith("skipping step 2 because its ")
    assert where in record.message


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda ours: ours.train.dataset.tensors[0].fill_(math.nan), "the inputs of the batch"),
        (
            lambda ours: ours.model.net[2].weight.data.fill_(math.inf),
            "stage 0, layer '2': its parameter 'weight' is not finite",
        ),
    ],
)
def test_too_many_consecutive_skipped_steps_end_the_run_and_name_the_last_good_checkpoint(
    spoil, where, tmp_path
):
    store = CheckpointStore(tmp_path, keep=1)
    ours = trainer(store=store, steps=4, checkpoint_every_steps=1, max_skipped=3)
    ours.fit()
    ours.total_steps = 20
    spoil(ours)
    with pytest.raises(DivergedError) as caught:
        ours.fit()
    message = str(caught.value)
    assert "3 consecutive steps, up to step 7" in message
    assert f"Origin in step 5: {where}" in message
    assert f"The last good checkpoint is {tmp_path / 'step_00000004'}" in message
    assert caught.value.exit_code == 3
    assert store.steps() == [4]


def test_an_interruption_among_skipped_steps_keeps_the_good_checkpoint_and_the_count(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    options = {"data": poisoned(slice(None)), "store": store, "steps": 40, "max_skipped": 6}
    good = trainer(**{**options, "data": data(), "steps": 2})
    good.fit()
    ours = trainer(**options)
    ours.resume(store.newest())

    def stop(run, samples):
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    ours.recorder.on_step = stop
    with pytest.raises(Interrupted, match="at step 5 of 40"):
        ours.fit()
    assert store.steps() == [2, 5]
    again = trainer(**options)
    again.resume(store.newest())
    with pytest.raises(DivergedError) as caught:
        again.fit()
    assert "6 consecutive steps, up to step 8" in str(caught.value)
    assert "Origin in step 3: the inputs of the batch" in str(caught.value)
    assert f"The last good checkpoint is {tmp_path / 'step_00000002'}" in str(caught.value)
    assert store.steps() == [2, 5]


def test_a_checkpoint_that_was_not_saved_in_the_background_is_not_named_as_the_last(tmp_path):
    store = CheckpointStore(tmp_path, background=True)
    ours = trainer(store=store, steps=20, checkpoint_every_steps=1, max_skipped=2)
    save = store.begin

    def full_at_step_3(step, *args):
        if step == 3:
            raise NoSpaceError("the disk is full")
        return save(step, *args)

    def spoil(run, samples):
        if run.step == 3:
            ours.model.net[0].register_forward_pre_hook(lambda module, args: args[0] * math.nan)

    store.begin, ours.recorder.on_step = full_at_step_3, spoil
    with pytest.raises(DivergedError) as caught:
        ours.fit()
    assert f"The last good checkpoint is {tmp_path / 'step_00000002'}" in str(caught.value)
    assert ours.summary()["checkpoint"] == str(tmp_path / "step_00000002")


def test_a_run_without_a_limit_skips_on():
    ours = trainer(data=poisoned(slice(None)), max_skipped=None, steps=20)
    assert ours.fit()["skipped_steps"] == 20


def test_a_finite_step_begins_a_new_row():
    ours = trainer(data=poisoned(slice(0, SAMPLES, 8)), max_skipped=6, steps=28)
    assert ours.fit()["skipped_steps"] >= 8


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    ours = trainer(store=store, steps=2)
    ours.fit()
    ours.total_steps = 3

    def spoil(optimizer, args, kwargs):
        ours.model.net[2].weight.data[0, 0] = math.inf

    ours.optimizer.register_step_post_hook(spoil)
    with pytest.raises(DivergedError, match=r"2\.weight is not finite at step 3, .*saved\. "):
        ours.fit()
    assert store.steps() == [2]


def test_a_mask_of_minus_infinity_in_a_buffer_is_no_divergence(tmp_path):
    net = plain_net()
    net[0].register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    ours = trainer(net, store=CheckpointStore(tmp_path), steps=2)
    assert ours.fit()["skipped_steps"] == 0


def test_a_loss_that_is_nan_beside_finite_derivatives_is_seen():
    ours = trainer(steps=3, max_skipped=None)
    ours.evaluation = None
    calls = []

    def loss_fn(output, targets):
        calls.append(None)
        return cross_entropy(output, targets) + (math.nan if len(calls) <= 2 else 0.0)

    ours.loss_fn = loss_fn
    assert ours.fit()["skipped_steps"] == 1


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_finite_gradients_whose_norm_overflows_are_skipped_and_named(clip_norm, caplog):
    # clipping would make them 0, and Adam's second moments would be infinite for ever
    ours = trainer(steps=3, clip_norm=clip_norm)
    ours.evaluation = None
    factor = iter([1, 1, 1e25, 1e25, 1, 1])
    ours.loss_fn = lambda output, targets: cross_entropy(output, targets) * next(factor)
    assert ours.fit()["skipped_steps"] == 1
    [record] = [r for r in caplog.records if "skipping step" in r.message]
    assert (
        "skipping step 2 because its gradient's norm is not finite; origin: the gradient of "
        in (record.message)
    )
    assert "finite, but the norm overflows" in record.message


def test_moments_that_are_not_finite_are_never_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    ours = trainer(store=store, steps=2)

    def spoil(optimizer, args, kwargs):
        optimizer.state[ours.model.net[2].weight]["exp_avg_sq"][0, 0] = math.inf

    ours.optimizer.register_step_post_hook(spoil)
    with pytest.raises(DivergedError, match=r"optimizer's exp_avg_sq of 2\.weight is not finite"):
        ours.fit()
    assert store.steps() == []


def test_a_mask_that_appears_later_is_no_divergence(tmp_path):
    net = plain_net()
    net[0].register_buffer("lazy", None)

    def mask():
        return torch.full((2, 2), -math.inf).triu(1)

    def make_mask(module, args):
        module.lazy = mask()

    net[0].register_forward_pre_hook(make_mask)
    ours = trainer(net, store=CheckpointStore(tmp_path), steps=3, checkpoint_every_steps=1)

    def add(run, samples):
        if run.step == 2:
            net[1].register_buffer("mask", mask())

    ours.recorder.on_step = add
    assert ours.fit()["skipped_steps"] == 0


def test_the_skipped_steps_are_counted_over_a_restart(tmp_path):
    store = CheckpointStore(tmp_path)
    first = trainer(data=poisoned(), epochs=1, store=store)
    assert first.fit()["skipped_steps"] == 1
    again = trainer(data=poisoned(), epochs=2, store=store)
    again.resume(store.newest())
    assert again.fit()["skipped_steps"] == 2


def test_an_overflow_of_fp16_adapts_the_scale_and_is_no_fault():
    ours = fp16_trainer(at=(3,), layer=1)
    summary = ours.fit()
    assert summary["skipped_steps"] == 0
    assert summary["overflow_steps"] == 1


def test_a_scale_that_falls_to_nothing_ends_as_diverged():
    ours = fp16_trainer(at=range(1, 100), layer=1, scale=8.0, steps=60, max_skipped=4)
    with pytest.raises(DivergedError, match="4 consecutive steps"):
        ours.fit()
    assert ours.scaler.get_scale() < 1


def test_a_fixed_scale_that_overflows_in_each_step_ends_as_diverged():
    ours = fp16_trainer(at=range(1, 100), layer=1, scale=8.0, loss_scale=8.0, steps=60)
    with pytest.raises(DivergedError, match="10 consecutive steps"):
        ours.fit()


def test_the_evaluation_says_that_its_loss_is_not_finite(caplog):
    ours = trainer(steps=1)
    ours.model.net[4].bias.data.fill_(math.nan)
    with caplog.at_level(logging.WARNING):
        ours.evaluate()
    assert re.search("evaluation.* loss is nan: the model has diverged", caplog.text)


@pytest.mark.parametrize(("settings", "message"), [({"max_skipped": 0}, "max_skipped=0 must be a")])
def test_the_limit_must_be_a_whole_number(settings, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**settings)


def test_the_summary_is_json_with_counts():
    summary = json.loads(json.dumps(trainer(steps=1).fit()))
    assert summary["skipped_steps"] == 0


# What a snapshot of the buffers brings back.
class Counter(nn.Module):
    """Changes buffers in every way that a forward can."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("constant", torch.ones(4))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced + 1
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_snapshot_brings_back_buffers_however_they_were_changed(steps_before):
    net = nn.Sequential(Counter(), nn.BatchNorm1d(3))
    snapshot = BufferSnapshot(net)
    for _ in range(steps_before):
        snapshot.take()
        net(torch.randn(5, 3))
    snapshot.take()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(2):
        net(torch.full((5, 3), math.nan))
        snapshot.restore()
        assert_same(net.state_dict(), before, "after a restore")
    net(torch.randn(5, 3))
    snapshot.take()
    assert int(net[0].calls) == steps_before + 1


class Lazy(nn.Module):
    """Makes its batch norm in its first forward."""

    def forward(self, x):
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(x.shape[1])
        return self.norm(x)


def test_a_snapshot_has_the_buffers_of_modules_that_a_forward_made():
    net = nn.Sequential(Lazy())
    snapshot = BufferSnapshot(net)
    snapshot.take()
    net(torch.randn(5, 3))
    snapshot.take()
    net(torch.full((5, 3), math.nan))
    snapshot.restore()
    assert net[0].norm.running_mean.isfinite().all()


class Growing(nn.Module):
    """Makes, adds and deletes buffers in its forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("made", None)
        self.register_buffer("deleted", torch.ones(2))

    def forward(self, x):
        self.made = x.sum(0)
        if hasattr(self, "deleted"):
            del self.deleted
        if not hasattr(self, "added"):
            self.register_buffer("added", x.mean(0))
        return x


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_snapshot_brings_back_buffers_that_were_made_added_or_deleted(steps_before):
    net = nn.Sequential(Growing(), nn.BatchNorm1d(3))
    snapshot = BufferSnapshot(net)
    for _ in range(steps_before):
        snapshot.take()
        net(torch.randn(5, 3))
    snapshot.take()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net(torch.full((5, 3), math.nan))
    snapshot.restore()
    assert_same(net.state_dict(), before, "after a restore")


def test_a_buffer_of_float8_does_not_keep_a_run_from_training(tmp_path):
    net = plain_net()
    net.register_buffer("scales", torch.ones(3).to(torch.float8_e4m3fn))
    ours = trainer(net, data=poisoned(), store=CheckpointStore(tmp_path))
    ours.fit()
    assert ours.skipped_steps > 0
    assert ours.finished
