"""Steps run in one thread where that is faster than a thread for each lane."""

import threading

import pytest
import torch
from support.compare import grads, hybrid, mean_loss
from support.thread_choice import InTurn, OneThread, threads_of
from torch import nn

from hybridtrain.pipeline.engines.threads import ThreadTrial
from hybridtrain.schedule import make_schedule

SCHEDULE = make_schedule("1f1b", 4, 8)
ACTIONS_OF_A_LANE = 16


def run(trial, steps, each, in_one):
    """Takes steps whose actions last `each` seconds by threads, and `in_one` in one thread.

    Returns which steps were in one thread.
    """
    ran = []
    for _ in range(steps):
        ran.append(trial.one_thread)
        action = in_one * len(SCHEDULE.lanes) if trial.one_thread else each
        trial.took(ACTIONS_OF_A_LANE * action, SCHEDULE)
    return ran


def test_one_thread_is_chosen_where_its_steps_take_less_time():
    trial = ThreadTrial(tells=True)
    ran = run(trial, 40, each=200e-6, in_one=30e-6)
    assert not any(ran[:5])
    assert all(ran[5:])


def test_threads_stay_where_a_trial_shows_that_they_are_faster():
    ran = run(ThreadTrial(tells=True), 2000, each=400e-6, in_one=300e-6)
    assert 0 < sum(ran) < 20  # trials
    assert not any(ran[-100:])


def test_long_actions_are_never_run_in_one_thread():
    assert not any(run(ThreadTrial(tells=True), 500, each=2e-3, in_one=1e-4))


def test_actions_that_become_long_have_a_thread_for_each_lane_again_at_once():
    trial = ThreadTrial(tells=True)
    assert run(trial, 30, each=200e-6, in_one=30e-6)[-1]
    assert run(trial, 30, each=5e-3, in_one=5e-3) == [True] + [False] * 29


def test_threads_are_tried_again_and_taken_once_they_are_faster():
    trial = ThreadTrial(tells=True)
    run(trial, 30, each=200e-6, in_one=30e-6)
    ran = run(trial, 600, each=200e-6, in_one=200e-6)
    assert ran[0]
    assert not any(ran[550:])


class NotesThreads(nn.Module):
    def __init__(self, threads):
        super().__init__()
        self.linear, self.threads = nn.Linear(4, 4), threads

    def forward(self, x):
        self.threads.add(threading.current_thread().name)
        return self.linear(x)


class FasterInOne(ThreadTrial):
    """Takes steps in one thread for ten times as fast as others."""

    def took(self, seconds, schedule):
        super().took(1e-3 if self.one_thread else 1e-2, schedule)


def test_an_engine_takes_the_threads_that_its_trial_chooses_and_the_log_says_so(caplog):
    caplog.set_level("INFO", "hybridtrain")
    threads = set()
    with threads_of(FasterInOne):
        model = hybrid(nn.Sequential(*[NotesThreads(threads) for _ in range(4)]), 4, chunks=16)
    used = []
    for _ in range(20):
        threads.clear()
        model.train_step(torch.randn(16, 4), None, mean_loss)
        used.append(len(threads))
    assert used[:5] == [4] * 5
    assert used[5:] == [1] * 15
    assert "one thread for all is faster than one for each: a step takes 10% of" in caplog.text
    model.eval()
    threads.clear()
    model(torch.randn(16, 4))
    assert len(threads) == 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_steps_in_one_thread_have_the_same_gradients_to_the_bit(schedule, checkpoint):
    found = []
    for trial in (None, OneThread, InTurn):
        torch.manual_seed(0)
        layers = [
            layer
            for _ in range(4)
            for layer in (nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.GELU())
        ]
        with threads_of(trial):
            model = hybrid(
                nn.Sequential(*layers), 4, 2 if schedule == "zb-v" else 1,
                chunks=6, schedule=schedule, checkpoint=checkpoint,
            )  # fmt: skip
        for step in range(3):
            x = torch.randn(13, 8, generator=torch.Generator().manual_seed(step))
            model.train_step(x, None, mean_loss)
        found.append(grads(model.net))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(other[name], gradient), name
