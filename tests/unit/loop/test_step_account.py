"""The account of a trained step, and the advice that follows from it."""

import json
import re
from dataclasses import replace

import pytest
import torch
from support.slow import SlowData, SlowLinear
from torch import nn

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.loop import Throughput, Tracker, advice, run_stats
from hybridtrain.loop.run_stats import DeviceAccount, around_pipeline, own_times, slow_replica
from hybridtrain.loss import cross_entropy
from hybridtrain.observe import TensorBoard, TimelineFiles
from hybridtrain.schedule import Account, Span

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def trained(
    stages=(1e-4, 1e-4), loading=0.0, chunks=4, batch_size=16, recompute="never", **settings
):
    """A trainer that has trained four steps, of which it has recorded all."""
    world = World.from_env(len(stages), "cpu")
    net = nn.Sequential(*map(SlowLinear, stages))
    samples = SlowData(loading)
    split = "uniform" if recompute == "never" else "balanced"  # measures what layers keep
    model = HybridModel(
        net, world, chunks=chunks, split=split, recompute=recompute,
        example_inputs=samples.inputs[:batch_size],
    )  # fmt: skip
    data = TrainLoader(samples, batch_size, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    settings = {"steps": 4, "log_every": 1, **settings}
    trainer = Trainer(model, optimizer, cross_entropy, data, **settings)
    trainer.fit()
    return trainer


def mean_of(trainer):
    return Account(*(trainer.account["mean"][name] for name in Account._fields))


class Kept(Tracker):
    def __init__(self):
        self.reports = []
        self.values = []

    def on_log(self, run, values):
        self.values.append((run.step, dict(values)))

    def on_timeline(self, run, predicted, measured):
        self.reports.append((run.step, run.account, run.advice))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_parts_of_each_device_are_not_negative_and_add_up_to_one_step(accumulate):
    kept = Kept()
    trainer = trained(callbacks=[kept], accumulate=accumulate)
    account = json.loads(json.dumps(trainer.summary()["account"]))
    assert [device["device"] for device in account["devices"]] == [0, 1]
    for device in account["devices"]:
        parts = [device[name] for name in Account._fields]
        assert all(part >= 0 for part in parts)
        # the clock is read for one device after the other
        assert sum(parts) == pytest.approx(account["step_ms"], rel=1e-2)
    logged = [
        sum(v for t, v in values.items() if t.startswith("account/")) for _, values in kept.values
    ]
    assert account["step_ms"] == pytest.approx(sum(logged) / 4)
    ((step, reported, _),) = kept.reports
    assert (step, reported) == (4, trainer.account)


def test_a_step_that_is_not_recorded_is_in_no_account():
    kept = Kept()
    trained(callbacks=[kept], log_every=100, steps=3)
    assert [step for step, _ in kept.values] == [3]
    assert [step for step, *_ in kept.reports] == [3]


def of_replicas(*accounts):
    return [DeviceAccount(replica, 0, account) for replica, account in enumerate(accounts)]


def test_a_replica_that_the_others_wait_for_is_named_with_the_part_that_differs():
    quick = Account(forward=1.0, backward=2.0, reduction=0.5, stragglers=1.5)
    slow = Account(forward=1.0, backward=3.5, reduction=0.5)
    assert list(own_times(of_replicas(quick, slow, quick)).values()) == [3.5, 5.0, 3.5]
    said = slow_replica(of_replicas(quick, slow, quick))
    assert re.match(r"replica 1 .* 30% .* 3500 ms instead of 5000; .* backward$", said)


def test_replicas_that_wait_for_one_another_by_turns_are_not_called_slow():
    even = Account(forward=1.0, backward=2.0, stragglers=0.5)
    assert slow_replica(of_replicas(even, even)) is None
    assert slow_replica(of_replicas(even)) is None


def test_slow_loading_is_data():
    account = mean_of(trained(loading=2e-2))
    assert account.data > account.forward + account.backward + account.bubble


def test_a_slow_stage_is_imbalance_on_the_other_one():
    trainer = trained(stages=(1e-4, 5e-3))
    first, second = trainer.account["devices"]
    parts = ("forward", "backward", "bubble", "imbalance")  # not host: tests share the machine
    assert max(parts, key=first.__getitem__) == "imbalance"
    assert max(parts, key=second.__getitem__) == "backward"


def test_a_bubble_of_one_micro_batch_is_larger_than_one_of_many():
    few = mean_of(trained(stages=(1e-3, 1e-3), chunks=1))
    many = mean_of(trained(stages=(1e-3, 1e-3), chunks=16))
    assert few.bubble / few.total > 2 * many.bubble / many.total


def test_a_forward_that_is_run_again_is_recomputation():
    world = World.from_env(2, "cpu")
    net = nn.Sequential(SlowLinear(1e-3), SlowLinear(1e-3))
    model = HybridModel(net, world, chunks=4, split="uniform", recompute="always")
    data = TrainLoader(SlowData(0.0), 16, world)
    trainer = Trainer(
        model, torch.optim.SGD(net.parameters(), 0.1), cross_entropy, data, steps=2, log_every=2
    )
    trainer.fit()
    account = mean_of(trainer)
    assert account.recompute == pytest.approx(account.forward)


@pytest.mark.parametrize(
    ("pipeline_end", "expected"),
    [
        # the process's own part of the pipeline ends with the others'
        (7.0, Account(data=2.0, forward=4.0, bubble=1.0, optimizer=2.0, host=1.0)),
        # or before them: the wait in the optimizer's phase is the window's
        (6.0, Account(data=2.0, forward=4.0, bubble=1.0, optimizer=2.0, host=1.0)),
    ],
)
def test_what_is_around_the_pipeline_is_told_once(pipeline_end, expected):
    ends = {"data": 2.0, "pipeline": pipeline_end, "optimizer": 9.0, "host": 10.0}
    parts = [Account(forward=4.0, bubble=1.0)]
    assert around_pipeline(ends, [(2.0, 7.0)], parts) == pytest.approx(expected)


def test_a_batch_that_comes_while_another_process_has_begun_is_data_and_no_message():
    ends = {"data": 3.0, "pipeline": 8.0, "optimizer": 9.0, "host": 9.0}
    account = around_pipeline(ends, [(2.0, 8.0)], [Account(forward=4.0, messages=2.0)])
    assert account == pytest.approx(Account(data=3.0, forward=4.0, messages=1.0, optimizer=1.0))
    assert account.total == pytest.approx(9.0)


# Advice; a busy machine may be given more than the test is about.
def lines_with(text, trainer):
    return [line for line in trainer.advice if text in line]


def test_slow_loading_is_answered_with_workers():
    (line,) = lines_with("workers=", trained(loading=2e-2))
    assert " ms instead of " in line


def test_a_bubble_is_answered_with_more_micro_batches_and_what_they_would_bring():
    (line,) = lines_with("chunks=4", trained(stages=(1e-2, 1e-2), chunks=2))
    assert " ms instead of " in line


@pytest.mark.parametrize("batches", [1, 4])
def test_a_price_does_not_count_the_all_reduce_as_won(batches):
    step = trained(stages=(2e-3, 2e-3), chunks=2)._stats._recorded.typical
    won = step.account.total - advice._smaller_microbatches(step).seconds
    wait, last = 0.5, step.schedule.chunks - 1
    spans = [
        [Span(a, s, e + wait * (a.kind == "B" and a.microbatch == last)) for a, s, e in lane]
        for lane in step.spans
    ]
    account = step.account.scaled(batches)._replace(reduction=wait * batches)
    step = replace(step, account=account, spans=spans, batches=batches)
    price = advice._smaller_microbatches(step).seconds
    # of each batch as much as before
    assert account.total - price == pytest.approx(batches * won, rel=0.3)


def test_an_error_in_the_advice_costs_a_sentence_and_no_run(monkeypatch):
    monkeypatch.setattr(run_stats, "advise", lambda step: 1 / 0)
    assert trained().summary()["advice"] == []


def test_micro_batches_of_one_sample_are_not_divided():
    assert not lines_with("chunks=", trained(chunks=4, batch_size=4))


def test_uneven_stages_are_answered_with_a_split_by_time():
    (line,) = lines_with("stage 1 takes", trained(stages=(2e-4, 1e-2), chunks=8))
    assert "split=time" in line


def test_recomputation_is_answered_with_keeping_the_activations_and_what_they_take():
    trainer = trained(stages=(5e-3, 5e-3), chunks=8, recompute="always")
    (line,) = lines_with("recomputation takes", trainer)
    assert "recompute=never would take" in line
    assert re.search(r"up to \S+ KiB more", line)


CASES = {
    "data": {"loading": 2e-2},
    "bubble": {"stages": (1e-2, 1e-2), "chunks": 2},
    "imbalance": {"stages": (2e-4, 1e-2), "chunks": 8},
    "recompute": {"stages": (5e-3, 5e-3), "chunks": 8, "recompute": "always"},
}


@pytest.mark.parametrize("part", advice._PROPOSALS)
@pytest.mark.quick_cases(1)
def test_every_kind_of_advice_says_what_a_step_takes_with_it_and_without(part):
    step = trained(**CASES[part])._stats._recorded.typical
    (proposal,) = [each for each in advice.advise(step) if each.part == part]
    now, then = step.account.total * 1e3, proposal.seconds * 1e3
    assert f"{then:.4g} ms instead of {now:.4g}" in proposal.text
    assert then < now


def test_a_run_in_which_all_is_well_is_told_nothing():
    assert trained(stages=(6e-3,), chunks=1).advice == []


def test_advice_is_of_no_step_that_was_interrupted_and_of_none_with_a_short_batch():
    step = trained(stages=(2e-3,), chunks=1)._stats._recorded.typical
    late = replace(step, account=step.account._replace(data=step.account.data + 0.5))
    assert any("waiting for data" in proposal.text for proposal in advice.advise(late))
    recorded = run_stats._Recorded()
    for each in (replace(step, samples=3), step, late, replace(step, samples=3)):
        recorded.keep(each)
    assert list(recorded.latest) == [step, late]
    assert recorded.typical is step


def test_trackers_take_a_directory_as_text_and_make_it(tmp_path, caplog):
    directory = tmp_path / "runs" / "a"
    trackers = [TensorBoard(str(directory)), TimelineFiles(str(directory / "timelines"))]
    trained(callbacks=trackers, timeline_every=2)
    assert not caplog.messages
    assert (directory / "timelines" / "timeline.png").exists()


class Pictures(Tracker):
    """A tracker that takes 100 seconds to draw a timeline."""

    seconds = 0.0

    def on_timeline(self, run, predicted, measured):
        Pictures.seconds += 100


def test_the_advice_of_a_recorded_step_is_found_once_for_all_trackers(monkeypatch):
    found = []

    def advise(step):
        found.append(step)
        return []

    monkeypatch.setattr(run_stats, "advise", advise)
    trained(callbacks=[Kept(), Kept()], timeline_every=2)
    assert len(found) == 2


def test_a_step_does_not_last_longer_because_its_timeline_is_drawn(monkeypatch):
    monkeypatch.setattr(Pictures, "seconds", 0.0)
    monkeypatch.setattr(
        "hybridtrain.loop.trainer.Throughput", lambda: Throughput(clock=lambda: Pictures.seconds)
    )
    ours = trained(callbacks=[Pictures()], timeline_every=2)
    assert Pictures.seconds > 0
    assert ours.summary()["step_ms"]["p95"] == 0
