"""The loop in one process: what a step is, counting, logging."""

import copy
import json
import math
import pickle
import threading

import pytest
import torch
from support.training import (
    RAGGED,
    SAMPLES,
    Recorder,
    assert_same,
    assert_same_run,
    cosine,
    data,
    plain_net,
    rich_net,
    trainer,
)
from torch import nn

from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.errors import ConfigError
from hybridtrain.loop import Throughput, TrainerOptions
from hybridtrain.loss import cross_entropy
from hybridtrain.observe import MetricsFile
from hybridtrain.step import FiniteCheck

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


# What one optimizer step is.
@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.quick_cases(1)
def test_accumulating_k_batches_equals_one_k_times_larger(accumulate):
    # the last batch of an epoch has 2 samples
    options = {"data": data(RAGGED), "epochs": 2, "clip_norm": 0.5}
    small = trainer(batch_size=4, accumulate=accumulate, **options)
    large = trainer(batch_size=4 * accumulate, **options)
    for each in (small, large):
        each.fit()
    assert small.step == large.step == 2 * -(-RAGGED // (4 * accumulate))
    assert small.samples == large.samples == 2 * RAGGED
    for name, value in large.model.state_dict().items():
        # the same sums over the same samples in another order, after several AdamW steps
        torch.testing.assert_close(
            small.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name
        )
    for (step, name), value in large.recorder.reproducible().items():
        if name == "train/epoch":  # counted in batches
            continue
        assert small.recorder.values[step, name] == pytest.approx(value, rel=1e-3), (step, name)


@pytest.mark.parametrize("nb_part", [1, 2, 4])
def test_the_norm_is_clipped_over_all_stages(nb_part):
    # SGD, so that a wrong scale shows; Adam would hide it
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    ours = trainer(nb_part=nb_part, chunks=1, clip_norm=0.05, steps=4, optimizer=sgd)
    net = plain_net()
    plain = sgd(net.parameters())
    stream = ours.train.at_start().stream()
    for step in range(1, 5):
        batch = next(stream)
        cross_entropy(net(batch.inputs), batch.targets).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        assert norm > 0.05, "nothing is clipped"
        plain.step()
        plain.zero_grad()
        ours.total_steps = step
        ours.fit()
        assert ours.recorder.values[step, "train/grad_norm"] == float(norm)
        assert_same(ours.model.state_dict(), net.state_dict(), f"step {step}")
    stream.close()


def test_the_gradient_norm_is_logged_without_clipping_too():
    ours = trainer(steps=1)
    ours.fit()
    net = plain_net()
    batch = next(ours.train.at_start().stream())
    cross_entropy(net(batch.inputs), batch.targets).backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert ours.recorder.values[1, "train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_the_logged_loss_is_the_mean_over_the_samples_since_the_last_line():
    # a learning rate of 0, so that every batch sees the same net; 6 batches, the last of 2 samples
    ours = trainer(
        data=data(RAGGED), epochs=1, log_every=6, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    )
    summary = ours.fit()
    inputs, targets = data(RAGGED).tensors
    expected = float(cross_entropy(plain_net()(inputs), targets).detach())
    assert ours.recorder.values[6, "train/loss"] == pytest.approx(expected, rel=1e-5)
    assert summary["train_loss"] == ours.recorder.values[6, "train/loss"]
    assert summary["eval"]["loss"] == ours.recorder.values[6, "eval/loss"]


# Counting.
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"epochs": 1}, 7),
        ({"epochs": 3}, 21),
        ({"epochs": 2, "accumulate": 2}, 8),  # an optimizer step does not reach into the next epoch
        ({"epochs": 2, "accumulate": 7}, 2),
        ({"epochs": 1, "accumulate": 100}, 1),
        ({"steps": 5}, 5),
        ({"steps": 9, "accumulate": 2}, 9),
    ],
)
@pytest.mark.quick_cases(3)
def test_steps_and_epochs_are_counted(options, steps):
    ours = trainer(**options)
    summary = ours.fit()
    assert summary["steps"] == ours.step == ours.total_steps == steps
    assert ours.recorder.started == (steps, 0)
    assert [step for step, _ in ours.recorder.steps] == list(range(1, steps + 1))
    assert sum(samples for _, samples in ours.recorder.steps) == summary["samples"]
    if "epochs" in options:
        assert summary["samples"] == SAMPLES * options["epochs"]
        assert (ours.epoch, ours.batch) == (options["epochs"], 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "one of steps= and epochs=, not steps=None and epochs=None"),
        ({"steps": 3, "epochs": 2}, "one of steps= and epochs=, not steps=3 and epochs=2"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
        ({"steps": 3, "accumulate": None}, "accumulate=None must be a whole number"),
        ({"steps": 3, "log_every": 0}, "log_every=0 must be"),
        ({"steps": 3, "eval_every": -1}, "eval_every=-1 must be"),
        ({"steps": 3, "clip_norm": 0.0}, r"clip_norm=0\.0 must be positive"),
        ({"steps": 3, "loss_scale": float("nan")}, "loss_scale=nan must be positive"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainerOptions(**settings)


def test_options_may_be_given_as_an_object_as_settings_or_as_both():
    made = trainer(steps=4, accumulate=2)
    again = type(made)(
        made.model, made.optimizer, cross_entropy, made.train, made.options, accumulate=3
    )
    assert made.options == TrainerOptions(steps=4, accumulate=2, log_every=1)
    assert again.options == TrainerOptions(steps=4, accumulate=3, log_every=1)


def test_a_trainer_that_has_not_run_has_a_summary_and_a_repr():
    ours = trainer(steps=4)
    assert repr(ours).startswith("Trainer(step 0 of 4, epoch 0, 0 samples, TrainerOptions(steps=4")
    summary = json.loads(json.dumps(ours.summary()))
    assert (summary["steps"], summary["train_loss"], summary["samples_per_second"]) == (0, None, 0)
    assert [layer for stage in summary["stages"] for layer in stage["layers"]] == list("01234")


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_trainer_says_what_to_do_instead(copies):
    with pytest.raises(TypeError, match=r"save a checkpoint .*resume\(\) it in a new Trainer"):
        copies(trainer())


@pytest.mark.parametrize("log_every", [1, 3, 4, 100])
@pytest.mark.quick_cases(2)
def test_every_nth_step_and_the_last_are_logged(log_every):
    ours = trainer(steps=9, log_every=log_every)
    ours.fit()
    logged = sorted(step for step, name in ours.recorder.values if name == "train/loss")
    assert logged == sorted({*range(log_every, 10, log_every), 9})


@pytest.mark.parametrize(
    ("eval_every", "expected"), [(None, [9]), (4, [4, 8, 9]), (3, [3, 6, 9]), (100, [9])]
)
@pytest.mark.quick_cases(2)
def test_every_nth_step_and_the_last_are_evaluated_and_saved(eval_every, expected, tmp_path):
    store = CheckpointStore(tmp_path)
    ours = trainer(steps=9, eval_every=eval_every, checkpoint_every_steps=eval_every, store=store)
    summary = ours.fit()
    assert sorted(s for s, name in ours.recorder.values if name == "eval/loss") == expected
    assert store.steps() == expected
    assert summary["checkpoint"] == str(tmp_path / "step_00000009")
    assert summary["resumed_from"] is None
    json.dumps(summary)


# The learning rate.
@pytest.mark.parametrize("warm_up", [0, 3])
def test_the_learning_rate_warms_up_and_follows_the_cosine(warm_up):
    total = 9
    ours = trainer(steps=total, lr=cosine(warm_up, total))
    ours.fit()
    for step in range(total):
        if step < warm_up:
            expected = 0.02 * (step + 1) / (warm_up + 1)
        else:
            expected = 0.01 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up)))
        found = ours.recorder.values[step + 1, "train/lr"]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12), step


def test_evaluating_more_often_changes_no_weight():
    runs = [trainer(rich_net(), eval_every=every) for every in (None, 1)]
    for run in runs:
        run.fit()
    assert_same_run(*runs)


def test_the_split_changes_no_weight():
    # also with dropout, whose masks are independent of the split
    runs = [trainer(rich_net(), nb_part=nb_part) for nb_part in (1, 2, 4)]
    for run in runs:
        run.fit()
    for run in runs[1:]:
        assert_same_run(run, runs[0])


def test_an_exception_in_a_step_ends_the_trackers_and_leaves_no_thread():
    class Closing(Recorder):
        closed = False

        def on_end(self, run):
            self.closed = True

    ours = trainer(recorder=Closing())
    boom = RuntimeError("boom")

    def fail(module, args):
        raise boom

    ours.model.net[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        ours.fit()
    assert ours.recorder.closed
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_a_learning_rate_that_is_a_tensor_is_logged_as_a_number(tmp_path):
    runs = []
    for value in (torch.tensor(0.02), 0.02):
        ours = trainer(
            optimizer=lambda p, value=value: torch.optim.AdamW(p, lr=value),
            lr=cosine(2, 9),
            callbacks=[MetricsFile(tmp_path / "metrics.jsonl")],
        )
        ours.fit()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        runs.append([entry["train/lr"] for entry in map(json.loads, lines) if "train/lr" in entry])
    assert len(runs[0]) == 9
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


def test_the_time_of_a_step_contains_its_own_wait_for_the_gradients(monkeypatch):
    order = []

    def noted(kind, name):
        before = getattr(kind, name)

        def call(*args, **options):
            order.append(name)
            return before(*args, **options)

        monkeypatch.setattr(kind, name, call)

    noted(FiniteCheck, "allows_step")  # reads the norm, which is where a step waits for a GPU
    noted(Throughput, "tick")
    trainer(steps=3).fit()
    assert order == ["allows_step", "tick"] * 3
