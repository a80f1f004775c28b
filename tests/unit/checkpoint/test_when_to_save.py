"""When a run evaluates, saves and stops; the best checkpoint; what a stopped run goes on with."""

import itertools
import json
import os
import re
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from support.clock import Clock
from support.training import (
    RAGGED,
    SAMPLES,
    Recorder,
    assert_same_run,
    cosine,
    data,
    rich_net,
    trainer,
)
from torch.distributed import HashStore

from hybridtrain.checkpoint import CheckpointStore, NoSpaceError
from hybridtrain.errors import ConfigError, Interrupted
from hybridtrain.launch import ProcessStore, activity
from hybridtrain.loop import BestCheckpoint, Interruptions, interruption
from hybridtrain.options import TrainerOptions, seconds
from hybridtrain.world import World

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

BATCHES = SAMPLES // 4


class After(Recorder):
    """Calls a function after a step."""

    def __init__(self, at, function):
        super().__init__()
        self.at, self.function, self.closed = at, function, False

    def on_step(self, run, samples):
        super().on_step(run, samples)
        if run.step in self.at:
            self.function()

    def on_end(self, run):
        self.closed = True


def with_clock(ours, seconds_per_step):
    """Gives the trainer a clock on which a step takes so many seconds."""
    clock = Clock()
    options = ours.options
    ours._interruptions = Interruptions(
        ours.world, options.max_seconds, options.checkpoint_every_minutes, clock
    )

    def step(optimizer, args, kwargs):
        clock.now += seconds_per_step

    ours.optimizer.register_step_post_hook(step)
    return ours


# Times.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), (90, 90), (1e-9, 1e-9), ("90", 90), ("90s", 90), ("1.5h", 5400),
        ("2 d", 172800), ("90m", 5400), ("01:30:00", 5400), ("100:00:01", 360001),
        ("1-12:00:00", 129600),
    ],
)  # fmt: skip
def test_a_time_is_read_in_each_of_its_forms(text, expected):
    assert seconds(text) == expected
    assert TrainerOptions(steps=1, max_time=text).max_seconds == expected


@pytest.mark.parametrize("text", ["soon", 0, -1, "1:30", "0s", "nan", True, "1h30"])
def test_a_time_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match=f"max_time={text} must be a positive number of seconds"):
        TrainerOptions(steps=1, max_time=text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_every_minutes": 0}, "checkpoint_every_minutes=0 must be positive"),
        ({"checkpoint_every_epochs": 0}, "checkpoint_every_epochs=0 must be a whole number"),
        ({"eval_every_epochs": 1.5}, "eval_every_epochs=1.5 must be a whole number"),
        ({"best": "loss", "best_mode": "least"}, "best_mode=least is unknown"),
        ({"best": "acuracy"}, "best=acuracy is not a value of the evaluation: did you mean 'acc"),
    ],
)
def test_settings_of_saving_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**settings)


def test_the_best_needs_an_evaluation():
    with pytest.raises(ConfigError, match="best=loss needs an evaluation"):
        BestCheckpoint("loss", "min", None)


# When.
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.quick_cases(1)
def test_every_nth_epoch_is_evaluated_and_saved(accumulate, tmp_path):
    store = CheckpointStore(tmp_path)
    ours = trainer(
        epochs=5,
        accumulate=accumulate,
        eval_every_epochs=1,
        checkpoint_every_epochs=2,
        store=store,
    )
    ours.fit()
    per_epoch = -(-BATCHES // accumulate)
    evaluated = sorted(step for step, name in ours.recorder.values if name == "eval/loss")
    assert evaluated == [per_epoch * epoch for epoch in (1, 2, 3, 4, 5)]
    assert store.steps() == [per_epoch * epoch for epoch in (2, 4, 5)]


def test_minutes_are_counted_from_the_last_save(tmp_path):
    store = CheckpointStore(tmp_path)
    ours = trainer(steps=12, checkpoint_every_steps=5, checkpoint_every_minutes=1.0, store=store)
    with_clock(ours, 25).fit()
    # asked for at the first begin of a step a minute after a save, saved at the end of that step
    assert store.steps() == [4, 5, 9, 10, 12]


def test_the_best_step_is_saved_marked_and_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    ours = trainer(
        rich_net(), steps=9, eval_every=1, best="loss", store=store,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
    )  # fmt: skip
    summary = ours.fit()
    losses = {s: v for (s, name), v in ours.recorder.values.items() if name == "eval/loss"}
    best = min(losses, key=losses.get)
    assert 1 < best < 9, "the test needs a best step in the middle"
    assert store.best() == tmp_path / f"step_{best:08d}"
    assert summary["best"] == {
        "best_step": best,
        "best_value": losses[best],
        "best_criterion": "min loss",
    }
    assert store.steps() == [best, 9]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.quick_cases(1)
def test_a_resumed_run_remembers_the_best_value(mode, tmp_path):
    def make(folder, **options):
        return trainer(
            rich_net(), eval_every=1, best="loss", best_mode=mode,
            store=CheckpointStore(tmp_path / folder), checkpoint_every_steps=1, **options,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        )  # fmt: skip

    whole = make("whole")
    expected = whole.fit()["best"]
    for step in (1, 4, 8):
        first = make(str(step))
        first.total_steps = step
        first.fit()
        again = make(str(step))
        again.resume(again.store.newest())
        assert again.fit()["best"] == expected
        assert again.store.best().name == whole.store.best().name


def test_the_best_by_another_value_does_not_count_after_a_resume(tmp_path, caplog):
    def make(name, mode, steps):
        return trainer(
            rich_net(), eval_every=1, best=name, best_mode=mode, steps=steps,
            store=CheckpointStore(tmp_path), checkpoint_every_steps=1,
        )  # fmt: skip

    make("loss", "min", 2).fit()
    again = make("accuracy", "max", 4)
    again.resume(again.store.newest())
    assert re.search(r"step, 2, .* min loss: .* max accuracy", caplog.text)
    again.fit()
    values = {s: v for (s, name), v in again.recorder.values.items() if name == "eval/accuracy"}
    mark = again.store.best_mark()
    assert (mark.value, mark.criterion) == (max(values.values()), "max accuracy")
    assert mark.step in (3, 4)


@pytest.mark.parametrize("background", [False, True])
def test_after_a_best_step_that_could_not_be_saved_the_one_before_is_the_bar(background, tmp_path):
    store = CheckpointStore(tmp_path, background=background)
    ours = trainer(eval_every=1, best="loss", store=store, steps=5, checkpoint_every_steps=1)
    losses = iter([5.0, 1.0, 4.0, 3.0, 6.0])
    save = store.begin

    def full_at_step_2(step, *args):
        if step == 2:
            raise NoSpaceError("the disk is full")
        return save(step, *args)

    store.begin = full_at_step_2
    ours.evaluation = None
    improves = ours._best.improves

    def report(run, samples):
        improves(run.step, {"loss": next(losses)})

    ours.recorder.on_step = report
    best = ours.fit()["best"]
    # at the end of step 3 it is not known yet in the background that step 2 was not saved
    assert (best["best_step"], best["best_value"]) == (4, 3.0)
    assert store.best() == tmp_path / "step_00000004"
    assert store.best_mark().step == 4


# Stopping.
def interrupted(ours):
    with pytest.raises(Interrupted) as caught:
        ours.fit()
    assert caught.value.exit_code == 75
    return str(caught.value)


def kill(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.quick_cases(1)
def test_a_signal_saves_at_the_end_of_a_step_and_the_run_goes_on_bitwise(number, tmp_path):
    options = {"lr": cosine(3, 9), "accumulate": 2, "eval_every": 3, "log_every": 2}
    whole = trainer(rich_net(), **options)
    whole.fit()
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    store = CheckpointStore(tmp_path)
    first = trainer(rich_net(), store=store, **options, recorder=After({2}, kill(number)))
    message = interrupted(first)
    # set at the end of step 2, read at that of step 3, whose evaluation is made up for later
    path = tmp_path / "step_00000003"
    assert message.startswith(f"interrupted at step 3 of 9 by {number.name}: saved {path}; ")
    assert first.recorder.closed
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    again = trainer(rich_net(), store=store, **options)
    again.resume(store.newest())
    again.fit()
    assert_same_run(again, whole)
    both = {**first.recorder.reproducible(), **again.recorder.reproducible()}
    assert both == whole.recorder.reproducible()


def test_a_time_limit_saves_and_stops(tmp_path):
    store = CheckpointStore(tmp_path)
    ours = with_clock(trainer(steps=9, max_time="00:01:00", store=store), 25)
    message = interrupted(ours)
    assert message.startswith("interrupted at step 4 of 9 by max_time: saved ")
    assert store.steps() == [4]
    # the same object goes on, with the whole time again
    assert interrupted(ours).startswith("interrupted at step 8 of 9")
    assert ours.fit()["steps"] == 9


def test_a_run_without_checkpoints_says_that_nothing_was_saved():
    message = interrupted(with_clock(trainer(steps=9, max_time=1), 2))
    assert "by max_time: nothing was saved" in message


def test_a_step_that_is_saved_is_not_saved_again_to_stop(tmp_path):
    store = CheckpointStore(tmp_path)
    ours = with_clock(trainer(steps=9, max_time=1, store=store, checkpoint_every_steps=1), 2)
    saves = []
    save, store.save = store.save, lambda step, *args, **_: saves.append(step) or save(step, *args)
    interrupted(ours)
    assert saves == [1, 2]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.quick_cases(1)
def test_an_evaluation_is_left_early_and_made_up_for_after_the_resume(last, tmp_path):
    store = CheckpointStore(tmp_path)
    step = 6 if last else 3
    whole = trainer(rich_net(), steps=6, eval_every=3)
    whole.fit()
    ours = trainer(rich_net(), steps=6, eval_every=3, store=store)
    batches = []

    def forward(module, args):
        if not module.training and ours.step == step:
            batches.append(None)
            kill(signal.SIGTERM)()

    ours.model.net[0].register_forward_pre_hook(forward)
    message = interrupted(ours)
    assert message.startswith(f"interrupted at step {step} of 6 by SIGTERM: saved")
    assert len(batches) == 2, "the two micro-batches of the first batch"
    assert (step, "eval/loss") not in ours.recorder.values
    again = trainer(rich_net(), steps=6, eval_every=3, store=store)
    again.resume(store.newest())
    summary = again.fit()
    assert summary["eval"]["loss"] == whole.recorder.values[6, "eval/loss"]
    both = {**ours.recorder.reproducible(), **again.recorder.reproducible()}
    assert both == whole.recorder.reproducible()


@pytest.mark.parametrize("eval_every", [3, 4])
@pytest.mark.thorough
def test_a_time_limit_shorter_than_an_evaluation_makes_progress_and_resumes_bitwise(
    eval_every, tmp_path
):
    options = {"steps": 9, "eval_every": eval_every, "eval_first": True, "best": "loss"}
    whole_store = CheckpointStore(tmp_path / "whole")
    whole = trainer(rich_net(), store=whole_store, **options)
    whole.fit()
    store, values, starts = CheckpointStore(tmp_path / "limited"), {}, 0
    done = False
    while not done:
        starts += 1
        assert starts < 20, "each start evaluates step 3 anew"
        ours = with_clock(trainer(rich_net(), store=store, max_time=1, **options), 0.3)

        def evaluates(module, args, ours=ours):
            if not module.training:
                ours._interruptions._clock.now += 1

        ours.model.net[0].register_forward_pre_hook(evaluates)
        if store.steps():
            ours.resume(store.newest())
        if not ours.finished:
            with suppress(Interrupted):
                ours.fit()
        done = ours.finished
        values |= ours.recorder.reproducible()
    assert_same_run(ours, whole)
    assert values == whole.recorder.reproducible()
    assert store.best_mark() == whole_store.best_mark()
    assert starts > 3


def test_a_signal_stops_also_the_evaluation_that_a_run_begins_with(tmp_path):
    store = CheckpointStore(tmp_path)
    ours = trainer(steps=6, eval_first=True, store=store)
    batches = []

    def forward(module, args):
        if not module.training:
            batches.append(None)
            kill(signal.SIGTERM)()

    ours.model.net[0].register_forward_pre_hook(forward)
    assert interrupted(ours).startswith("interrupted at step 0 of 6 by SIGTERM: saved")
    assert len(batches) == 2, "the two micro-batches of the first batch"


def test_a_fit_in_another_thread_leaves_the_signals_alone():
    handler, seen = signal.getsignal(signal.SIGTERM), []
    ours = trainer(
        steps=2, recorder=After({1}, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    )
    thread = threading.Thread(target=ours.fit)
    thread.start()
    thread.join()
    assert seen == [handler]
    assert ours.step == 2


def test_the_flags_of_one_process_are_read_one_step_later():
    clock = Clock()
    interruptions = Interruptions(World.from_env(devices="cpu"), 10.0, None, clock)
    with interruptions.listening():
        interruptions.begin_step()
        clock.now = 11.0
        assert interruptions.end_step() == frozenset()
        assert interruptions.watch_for_stop()()
        interruptions.begin_step()
        assert interruptions.end_step() == {"stop"}
        assert interruptions.stop_reason == "max_time"


def test_a_request_of_the_last_fit_does_not_end_the_next_one():
    ours = trainer(steps=2, recorder=After({2}, kill(signal.SIGTERM)))
    ours.evaluation = None
    ours.fit()
    ours.total_steps = 4
    assert ours.fit()["steps"] == 4


def test_a_fit_after_an_exception_has_no_gradients_of_the_step_that_failed():
    def once(module, args):
        if len(calls) == 3:
            hook.remove()
            raise ArithmeticError("boom")
        calls.append(None)

    whole, ours, calls = trainer(steps=3, chunks=1, accumulate=2), None, []
    whole.fit()
    ours = trainer(steps=3, chunks=1, accumulate=2)
    hook = ours.model.net[0].register_forward_pre_hook(once)
    with pytest.raises(ArithmeticError, match="boom"):
        ours.fit()
    ours.fit()
    assert_same_run(ours, whole)


# The loss between two lines.
@pytest.mark.parametrize("step", range(2, 9))
@pytest.mark.quick_cases(1)
def test_the_lines_of_a_resumed_run_equal_the_uninterrupted_ones(step, tmp_path):
    # batches of 6, 6, 6 and 4 samples
    options = {"log_every": 4, "data": data(RAGGED), "batch_size": 6, "eval_every": 100}
    whole = trainer(rich_net(), **options)
    whole.fit()
    store = CheckpointStore(tmp_path)
    first = trainer(rich_net(), store=store, recorder=After({step - 1}, kill(15)), **options)
    interrupted(first)
    again = trainer(rich_net(), store=store, **options)
    again.resume(store.newest())
    again.fit()
    both = {**first.recorder.reproducible(), **again.recorder.reproducible()}
    assert both == whole.recorder.reproducible()
    assert again.summary()["train_loss"] == whole.summary()["train_loss"]
    json.dumps(again.summary(), allow_nan=False)


def test_a_stop_that_one_process_knows_of_ends_the_evaluation_of_all(monkeypatch):
    store = HashStore()
    both = [
        Interruptions(
            World(rank=rank, size=2, watchdog=SimpleNamespace(store=ProcessStore(store, rank, 2))),
            None,
            None,
        )
        for rank in (0, 1)
    ]
    with both[1].listening():
        # the keys count the evaluations, and these two are of one process
        first = both[0].watch_for_stop()
        monkeypatch.setattr(
            interruption,
            "_evaluation_numbers",
            itertools.count(next(interruption._evaluation_numbers) - 1),
        )
        second = both[1].watch_for_stop()
        assert not second()
        os.kill(os.getpid(), signal.SIGTERM)
        assert second()
        assert first()
        assert both[0]._flags.requested("stop") == "SIGTERM"


def test_signals_are_listened_to_until_an_interrupted_run_is_closed(tmp_path):
    seen = []

    class Closing(After):
        def on_end(self, run):
            seen.append((signal.getsignal(signal.SIGTERM), activity.work))

    before = signal.getsignal(signal.SIGTERM)
    closing = Closing({2}, lambda: os.kill(os.getpid(), signal.SIGTERM))
    ours = trainer(epochs=1, store=CheckpointStore(tmp_path), recorder=closing)
    with pytest.raises(Interrupted):
        ours.fit()
    assert seen[0][0] is not before
    assert seen[0][1] is None
    assert signal.getsignal(signal.SIGTERM) is before
