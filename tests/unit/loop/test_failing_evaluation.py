"""An evaluation, a callback or a tracker that fails loses nothing that was trained."""

import json
import logging
import re

import pytest
import torch
from support.training import Recorder, assert_same_run, cosine, data, rich_net, trainer
from torch.utils.data import Dataset

from hybridtrain.checkpoint import CheckpointStore, NoSpaceError
from hybridtrain.data import EvalLoader
from hybridtrain.loop.callbacks import BestWeights, Callback, EarlyStopping
from hybridtrain.loss import Accuracy, accuracy, cross_entropy
from hybridtrain.observe import MetricsFile

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Flaky(Accuracy):
    """A metric that fails in its `compute` of the step after `at`."""

    def __init__(self, at=None):
        super().__init__()
        self.at, self.trainer = at, None

    def compute(self):
        if self.trainer is not None and self.trainer.step == self.at:
            raise ArithmeticError("boom")
        return super().compute()


def made(folder, at=None, **options):
    """A trainer with everything that has a state, whose evaluation of step `at` fails."""
    ours = trainer(
        rich_net(),
        eval_every=3,
        checkpoint_every_steps=3,
        best="loss",
        lr=cosine(2, 9),
        store=CheckpointStore(folder / "checkpoints"),
        callbacks=[
            EarlyStopping(patience=9),
            BestWeights(folder / "weights", k=2),
            MetricsFile(folder / "metrics.jsonl"),
        ],
        **options,
    )
    ours.metrics["flaky"] = Flaky(at)
    ours.metrics["flaky"].trainer = ours
    return ours


def evaluations(folder):
    """The evaluations in the file of metrics, in its order."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", [3, 6, 9])
@pytest.mark.quick_cases(1)
def test_a_step_that_is_due_is_saved_even_if_its_evaluation_fails(at, background, tmp_path):
    whole = made(tmp_path / "whole")
    whole.fit()
    ours = made(tmp_path, at)
    ours.store.background = background
    with pytest.raises(ArithmeticError, match="boom") as caught:
        ours.fit()
    assert "in the metric 'flaky'" in caught.value.__notes__
    assert ours.store.steps()[-1] == at
    again = made(tmp_path)
    again.resume(ours.store.newest())
    assert not again.finished
    again.fit()
    assert_same_run(again, whole)
    assert evaluations(tmp_path) == evaluations(tmp_path / "whole")
    assert [step for step, _ in evaluations(tmp_path)] == [3, 6, 9]
    assert again.summary()["best"] == whole.summary()["best"]
    assert again.store.best().name == whole.store.best().name
    for mine, theirs in zip(again.callbacks, whole.callbacks, strict=True):
        assert mine.state_dict() == theirs.state_dict()


def test_the_last_checkpoint_has_the_state_after_the_last_evaluation(tmp_path):
    ours = made(tmp_path)
    ours.fit()
    again = made(tmp_path)
    again.resume(ours.store.newest())
    assert again.finished
    assert again.callbacks[0].state_dict() == ours.callbacks[0].state_dict()
    assert again.callbacks[1].paths() == ours.callbacks[1].paths()


def test_a_disk_that_is_full_after_the_last_evaluation_leaves_the_checkpoint_before_it(tmp_path):
    ours = made(tmp_path)
    save, saves = ours.store.begin, []

    def full(step, *args):
        saves.append(step)
        if saves.count(9) == 2:
            raise NoSpaceError("the disk is full")
        return save(step, *args)

    ours.store.begin = full
    ours.fit()
    assert saves == [3, 6, 9, 9]
    again = made(tmp_path)
    again.resume(ours.store.newest())
    assert not again.finished
    assert again.fit()["steps"] == 9


def test_a_metric_that_is_broken_is_named_before_the_first_step():
    ours = trainer(rich_net())

    class Broken(Accuracy):
        def update(self, outputs, targets):
            raise ValueError("three dimensions, please")

    ours.metrics["f1"] = Broken()
    with pytest.raises(ValueError, match="three dimensions") as caught:
        ours.fit()
    assert "in the metric 'f1'" in caught.value.__notes__
    assert ours.step == 0
    assert ours.recorder.steps == []


class Noisy(Dataset):
    """Samples with noise from the default generator."""

    def __init__(self, samples, seed):
        self._data = data(samples, seed)

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        inputs, targets = self._data[index]
        return inputs + 0.1 * torch.randn(6), targets


@pytest.mark.parametrize("nb_part", [1, 2])
def test_the_evaluation_before_the_first_step_changes_no_bit_of_the_training(nb_part):
    def run(evaluates):
        torch.manual_seed(5)
        ours = trainer(rich_net(), nb_part=nb_part, data=Noisy(28, 0))
        ours.evaluation = EvalLoader(Noisy(11, 9), 4, ours.world) if evaluates else None
        ours.total_steps = 5
        ours._evaluated = 5, {}  # without that at the end
        seen = []
        ours.metrics["accuracy"] = metric = accuracy()
        update = metric.update
        metric.update = lambda *args: (seen.append(ours.step), update(*args))
        ours.fit()
        assert seen == ([0, 0] if evaluates else [])  # the two micro-batches of the first batch
        assert metric.counts.tolist() == [0, 0]
        return ours

    assert_same_run(run(True), run(False))


def test_without_evaluation_data_nothing_runs_before_the_first_step():
    ours = trainer(steps=2)
    ours.evaluation = None
    ours.metrics["accuracy"].update = None
    assert ours.fit()["steps"] == 2


def test_eval_first_is_logged_at_step_0_and_not_again_after_a_resume(tmp_path):
    ours = made(tmp_path, eval_first=True)
    ours.total_steps = 3
    ours.fit()
    again = made(tmp_path, eval_first=True)
    again.resume(ours.store.newest())
    again.fit()
    assert [step for step, _ in evaluations(tmp_path)] == [0, 3, 6, 9]
    plain = made(tmp_path / "plain")
    plain.fit()
    assert_same_run(again, plain)


def test_eval_first_may_find_that_the_first_weights_are_the_best(tmp_path):
    ours = trainer(
        steps=2, eval_first=True, best="loss", store=CheckpointStore(tmp_path, keep=1),
        optimizer=lambda p: torch.optim.SGD(p, lr=5.0, maximize=True),
    )  # fmt: skip
    ours.fit()
    assert ours.store.best() == tmp_path / "step_00000000"
    assert ours.store.steps() == [0, 2]


# Trackers and callbacks.
class Failing(Recorder):
    """A tracker of the user's own, of which one hook fails."""

    def __init__(self, hook):
        super().__init__()
        self.calls = 0

        def fail(*args, **kwargs):
            self.calls += 1
            raise ConnectionError("the server is away")

        setattr(self, hook, fail)


@pytest.mark.parametrize(
    "hook",
    [
        *("on_init", "on_start", "on_step", "on_log", "on_evaluation_batch", "on_evaluate"),
        *("on_timeline", "on_save", "on_end"),
    ],
)
@pytest.mark.quick_cases(3)
def test_a_tracker_that_fails_is_one_warning_and_the_run_goes_on(hook, tmp_path, caplog):
    failing = Failing(hook)
    store = CheckpointStore(tmp_path)
    ours = trainer(steps=4, timeline_every=2, store=store, callbacks=[failing])
    assert ours.fit()["steps"] == 4
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (warning,) = warnings
    assert re.fullmatch(r"Failing .*: ConnectionError: the server is away", warning)
    assert failing.calls == 1
    assert [step for step, _ in ours.recorder.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("hook", ["on_log", "on_evaluate", "on_timeline", "on_evaluation_batch"])
@pytest.mark.quick_cases(1)
def test_a_callback_that_fails_ends_the_run_after_a_save_of_the_last_step(hook, tmp_path):
    def failing(trainer, *args):
        if trainer.step == 4:
            raise ArithmeticError("boom")

    def make(name, fails):
        callback = Callback()
        if fails:
            setattr(callback, hook, failing)
        options = {"eval_every": 4, "timeline_every": 4, "callbacks": [callback]}
        return trainer(rich_net(), store=CheckpointStore(tmp_path / name), **options)

    ours = make("ours", fails=True)
    with pytest.raises(ArithmeticError, match="boom"):
        ours.fit()
    assert ours.store.steps() == [4]
    again, whole = make("ours", fails=False), make("whole", fails=False)
    again.resume(ours.store.newest())
    again.fit()
    whole.fit()
    assert_same_run(again, whole)


@pytest.mark.parametrize("hook", ["on_gradients", "on_step"])
def test_a_step_in_whose_middle_a_callback_fails_is_not_saved(hook, tmp_path):
    def failing(trainer, *args):
        if trainer.step == 4:
            raise ArithmeticError("boom")

    callback = Callback()
    setattr(callback, hook, failing)
    ours = trainer(store=CheckpointStore(tmp_path), checkpoint_every_steps=3, callbacks=[callback])
    with pytest.raises(ArithmeticError, match="boom"):
        ours.fit()
    assert ours.store.steps() == [3]


def test_an_error_of_the_loss_of_an_evaluation_names_no_metric():
    ours = trainer()

    def failing(outputs, targets):
        if not ours.model.training:
            raise ArithmeticError("boom")
        return cross_entropy(outputs, targets)

    ours.loss_fn = failing
    with pytest.raises(ArithmeticError, match="boom") as caught:
        ours.fit()
    assert not [note for note in caught.value.__notes__ if "metric" in note]


def test_a_metric_that_needs_more_than_a_batch_is_a_warning_before_the_first_step(caplog):
    class Many(Accuracy):
        """Cannot be computed from one batch of 4."""

        def compute(self):
            if self.counts[1] <= 4:
                raise ValueError("needs more samples")
            return super().compute()

    ours = trainer(rich_net(), steps=2)
    ours.metrics["many"] = Many()
    assert 0 <= ours.fit()["eval"]["many"] <= 1
    assert re.search("metric 'many' .*: needs more samples", caplog.text)
