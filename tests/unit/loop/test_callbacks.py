"""Callbacks: when they are called, what they change, and that a resumed run continues exactly."""

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.checkpoint_files import tensors_in
from support.training import assert_same, assert_same_run, cosine, data, plain_net, trainer
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.loop.callbacks import (
    EMA,
    SWA,
    BestWeights,
    Callback,
    ClipValue,
    EarlyStopping,
    Freeze,
    GradientNorms,
    LearningRates,
    Mfu,
    Plateau,
    Tracker,
)
from hybridtrain.loss import cross_entropy
from hybridtrain.model import TrainStepResult

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Diary(Callback):
    """Writes down each hook with the step."""

    def __init__(self):
        self.lines = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda trainer, *args: self.lines.append((name[3:], trainer.step))
        return super().__getattribute__(name)


def resumed(first, again, store):
    """Has `again` continue from the newest checkpoint of `first`."""
    first.fit()
    again.resume(store.newest())
    again.fit()
    return again


def test_each_hook_is_called_at_its_place(tmp_path):
    diary = Diary()
    ours = trainer(
        steps=2, log_every=2, eval_every=2, callbacks=[diary], store=CheckpointStore(tmp_path)
    )
    ours.fit()
    hooks = [line for line in diary.lines if line[0] != "evaluation_batch"]
    assert hooks == [
        ("init", 0), ("start", 0), ("gradients", 0), ("step", 1), ("gradients", 1), ("step", 2),
        ("log", 2), ("timeline", 2), ("save", 2), ("evaluate", 2), ("save", 2), ("end", 2),
    ]  # fmt: skip
    assert ("evaluation_batch", 2) in diary.lines


def test_a_callback_that_comes_during_a_run_is_called_from_then_on():
    class Invites(Callback):
        def on_step(self, trainer, samples):
            if trainer.step == 1:
                trainer.callbacks.append(diary)
            elif trainer.step == 3:
                trainer.callbacks.remove(diary)

    diary = Diary()
    trainer(steps=4, callbacks=[Invites()]).fit()
    of_steps = [line for line in diary.lines if line[0] in ("gradients", "step")]
    assert of_steps == [("gradients", 1), ("step", 2), ("gradients", 2), ("step", 3)]


def test_an_exception_is_told_and_every_callback_ends():
    class Failing(Diary):
        def __getattribute__(self, name):
            if name == "on_step":
                raise RuntimeError("boom")
            return super().__getattribute__(name)

    diaries = [Diary(), Failing(), Diary()]
    with pytest.raises(RuntimeError, match="boom"):
        trainer(callbacks=diaries).fit()
    for diary in diaries:
        assert [line[0] for line in diary.lines[-2:]] == ["exception", "end"]


def test_a_callback_that_fails_at_an_exception_does_not_take_its_place(caplog):
    class Failing(Callback):
        def on_step(self, trainer, samples):
            raise RuntimeError("boom")

        def on_exception(self, trainer, error):
            raise OSError("no space")

    diary = Diary()
    with pytest.raises(RuntimeError, match="boom"):
        trainer(callbacks=[Failing(), diary]).fit()
    assert [line[0] for line in diary.lines[-2:]] == ["exception", "end"]
    assert "on_exception of Failing" in caplog.text


def test_a_run_in_fp16_trains_on_after_a_callback_has_failed_on_its_gradients():
    class FailsOnce(Callback):
        failed = False

        def on_gradients(self, trainer):
            if not self.failed:
                self.failed = True
                raise RuntimeError("boom")

    ours = trainer(callbacks=[FailsOnce()], scaler=GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="boom"):
        ours.fit()
    assert ours.fit()["steps"] == 9


def test_a_start_that_fails_ends_the_callbacks_that_have_started():
    class Failing(Callback):
        def on_start(self, trainer):
            raise RuntimeError("boom")

    diary = Diary()
    with pytest.raises(RuntimeError, match="boom"):
        trainer(callbacks=[diary, Failing()]).fit()
    assert [line[0] for line in diary.lines] == ["init", "start", "exception", "end"]


def test_what_a_callback_adds_to_the_log_reaches_the_trackers():
    ours = trainer(steps=3, callbacks=[GradientNorms(), LearningRates()], lr=cosine(2, 3))
    ours.fit()
    values = ours.recorder.values
    for step in (1, 2, 3):
        assert values[step, "lr/0"] == values[step, "train/lr"]
        parts = [v for (s, tag), v in values.items() if s == step and tag.startswith("grad_norm/")]
        assert len(parts) == 3
        total = sum(part**2 for part in parts) ** 0.5
        assert total == pytest.approx(values[step, "train/grad_norm"], rel=1e-5)


def test_a_tracker_gets_what_every_callback_adds_and_cannot_end_the_run():
    class Hasty(Tracker):
        stops = True

        def on_log(self, run, values):
            tags.update(values)

    tags = set()
    tracker = Hasty()
    ours = trainer(steps=3, callbacks=[tracker, Mfu(flops_per_sample=3e6, peak_flops_per_s=1e12)])
    assert ours.fit()["steps"] == 3
    assert {"train/loss", "train/mfu", "eval/loss"} <= tags


def test_rates_of_groups_are_logged_without_a_callback_where_they_differ():
    ours = trainer(steps=2, lr=cosine(2, 2))
    first, *rest = ours.optimizer.param_groups[0]["params"]
    groups = [{"params": [first], "lr": 1.0, "name": "head"}, {"params": rest}]
    ours.optimizer = torch.optim.SGD(groups, lr=0.5)
    ours.lr_schedule = None
    ours.fit()
    values = ours.recorder.values
    assert [values[1, tag] for tag in ("train/lr", "lr/head", "lr/1")] == [1.0, 1.0, 0.5]


def test_the_mfu_is_the_share_of_the_peak_of_all_devices():
    ours = trainer(steps=2, callbacks=[Mfu(flops_per_sample=3e6, peak_flops_per_s=1e12)])
    ours.fit()
    values, devices = ours.recorder.values, ours.world.data_parallel_size * ours.world.nb_part
    for step in (1, 2):
        rate = values[step, "train/samples_per_second"] * 3e6 / 1e12
        assert values[step, "train/mfu"] == pytest.approx(rate / devices)
    with pytest.raises(ConfigError, match="peak_flops_per_s=0"):
        Mfu(1.0, 0)


def test_a_run_stops_early_and_a_longer_patience_trains_on(tmp_path):
    store = CheckpointStore(tmp_path)
    # nothing is better by that much
    options = {"steps": 9, "eval_every": 2, "store": store}
    stopping = [EarlyStopping(patience=2, min_delta=100.0)]
    ours = trainer(callbacks=stopping, **options)
    ours.fit()
    assert ours.step == 6  # the first counts as progress
    assert ours.finished
    assert store.steps() == [6]
    again = trainer(callbacks=[EarlyStopping(patience=2, min_delta=100.0)], **options)
    again.resume(store.newest())
    assert again.finished
    longer = trainer(callbacks=[EarlyStopping(patience=3, min_delta=100.0)], **options)
    longer.resume(store.newest())
    assert not longer.finished
    longer.fit()
    assert longer.step == 8
    whole = trainer(steps=9, eval_every=2)
    whole.fit()
    for step in (2, 4, 6):
        assert ours.recorder.values[step, "eval/loss"] == whole.recorder.values[step, "eval/loss"]


@pytest.mark.parametrize("nb_part", [1, 2])
@pytest.mark.quick_cases(1)
def test_the_average_is_the_formula_and_evaluations_use_it(nb_part):
    ema = EMA(decay=0.5, warmup=False)
    ours = trainer(nb_part=nb_part, steps=3, eval_every=3, callbacks=[ema])
    expected = {n: p.detach().clone() for n, p in plain_net().named_parameters()}
    plain = trainer(nb_part=nb_part, steps=3)
    step = plain.recorder.on_step

    def follow(run, samples):
        step(run, samples)
        for name, parameter in plain.model.named_parameters():
            expected[name].lerp_(parameter.detach(), 0.5)

    plain.recorder.on_step = follow
    plain.fit()
    ours.fit()
    assert_same(ema.average(), expected, "average")
    assert_same(ours.model.state_dict(), plain.model.state_dict(), "weights")
    plain.model.load_state_dict(expected)
    assert plain.evaluate() == ours.evaluate()
    assert ours.recorder.values[3, "eval/loss"] == plain.evaluate()["loss"]
    assert_same(ours.model.state_dict(), trainer_after(3, nb_part), "weights after evaluating")


def test_the_average_of_a_short_run_follows_its_weights():
    model = HybridModel(nn.Linear(2, 1), World.from_env(devices="cpu"))
    weight = model.net.weight
    ours, ema = SimpleNamespace(model=model, step=1), EMA(0.3)
    ema.on_init(ours)
    expected = weight.detach().clone()
    for decay in (1 / 10, 2 / 11, 3 / 12, 0.3, 0.3):  # (1 + n) / (10 + n) up to the decay
        with torch.no_grad():
            weight.add_(1)
        ema.on_step(ours, 1)
        expected.lerp_(weight.detach(), 1 - decay)
    assert torch.equal(ema.average()["weight"], expected)


def trainer_after(steps, nb_part):
    ours = trainer(nb_part=nb_part, steps=steps)
    ours.fit()
    return ours.model.state_dict()


def test_the_average_of_weights_in_half_precision_is_kept_in_fp32():
    model = HybridModel(nn.Linear(2, 1).bfloat16(), World.from_env(devices="cpu"))
    weight = model.net.weight
    ours, ema = SimpleNamespace(model=model, step=1), EMA(0.999, warmup=False)
    ema.on_init(ours)
    expected = weight.detach().float()
    for _ in range(20):  # in bfloat16 a thousandth of a step would be rounded away
        with torch.no_grad():
            weight.add_(0.01)
        ema.on_step(ours, 1)
        expected.lerp_(weight.detach().float(), 1 - 0.999)
    assert torch.equal(ema.average()["weight"], expected)
    before = weight.detach().clone()
    with ema.evaluation_context(ours):
        assert torch.equal(weight, expected.bfloat16())
    assert torch.equal(weight, before)


def test_the_average_resumes_exactly_and_begins_anew_without_a_state(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    whole = trainer(callbacks=[EMA(0.9)], eval_every=3)
    whole.fit()
    first = trainer(steps=4, callbacks=[EMA(0.9)], store=store)
    again = resumed(first, trainer(callbacks=[EMA(0.9)], eval_every=3), store)
    assert_same_run(again, whole)
    assert_same(again.callbacks[0].average(), whole.callbacks[0].average(), "average")
    assert again.recorder.values[9, "eval/loss"] == whole.recorder.values[9, "eval/loss"]

    bare = CheckpointStore(tmp_path / "bare")
    trainer(steps=4, store=bare).fit()
    late = trainer(callbacks=[EMA(0.9)])
    with caplog.at_level(logging.WARNING):
        late.resume(bare.newest())
    assert re.search(r"callback ema.* step 4", caplog.text)
    weights = {n: p.detach() for n, p in late.model.named_parameters()}
    assert_same(late.callbacks[0].average(), weights, "the weights of step 4")


def states_after_each_step(run):
    """Returns a list that gets the state of the model after each step of the run."""
    seen = []
    step = run.recorder.on_step

    def watch(trainer, samples):
        step(trainer, samples)
        seen.append({name: value.clone() for name, value in run.model.state_dict().items()})

    run.recorder.on_step = watch
    return seen


@pytest.mark.parametrize("cut", [2, 3, 5, 6])
@pytest.mark.quick_cases(1)
def test_a_run_that_freezes_and_frees_resumes_exactly(cut, tmp_path):
    def callbacks():
        return [Freeze("0.*", until=3), Freeze(["2.weight", "2.bias"], start=5)]

    store = CheckpointStore(tmp_path)
    whole = trainer(callbacks=callbacks(), lr=cosine(0, 9))
    seen = states_after_each_step(whole)
    whole.fit()
    first = trainer(callbacks=callbacks(), lr=cosine(0, 9), store=store, checkpoint_every_steps=1)
    first.total_steps = cut
    again = resumed(first, trainer(callbacks=callbacks(), lr=cosine(0, 9)), store)
    assert_same_run(again, whole)
    initial = dict(plain_net().named_parameters())
    assert torch.equal(seen[2]["0.weight"], initial["0.weight"])
    assert not torch.equal(seen[3]["0.weight"], initial["0.weight"])
    assert not torch.equal(seen[4]["2.weight"], seen[3]["2.weight"])
    assert torch.equal(seen[8]["2.weight"], seen[4]["2.weight"])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_parameter_is_frozen_while_one_of_several_freezes_it(reverse):
    class Watch(Callback):
        def __init__(self):
            self.frozen = []

        def on_gradients(self, trainer):
            parameters = dict(trainer.model.net.named_parameters())
            names = ("0.weight", "0.bias")
            self.frozen.append(tuple(not parameters[name].requires_grad for name in names))

    freezes = [Freeze("0.*", start=1, until=3), Freeze("0.weight", start=2, until=5)]
    watch = Watch()
    trainer(steps=6, callbacks=[*(freezes[::-1] if reverse else freezes), watch]).fit()
    both, first, none = (True, True), (True, False), (False, False)
    assert watch.frozen == [none, both, both, first, first, none]


def test_the_best_weights_are_kept_and_the_others_removed(tmp_path):
    best = BestWeights(tmp_path, k=2)
    ours = trainer(steps=6, eval_every=1, callbacks=[best])
    seen = states_after_each_step(ours)
    ours.fit()
    losses = {s: v for (s, tag), v in ours.recorder.values.items() if tag == "eval/loss"}
    order = sorted(losses, key=losses.get)[:2]
    assert sorted(tmp_path.glob("*")) == sorted(best.paths())
    assert [int(path.stem[5:]) for path in best.paths()] == order
    for path, number in zip(best.paths(), order, strict=True):
        assert_same(tensors_in(tmp_path, path.stem), seen[number - 1], path.name)


def test_a_step_of_the_users_own_that_returns_too_little_is_named():
    def step(trainer, batches, timeline):
        return Trainer.training_step(trainer, batches, timeline)[:1]

    with pytest.raises(ConfigError, match=r"training_step .*1 results for 2 batches"):
        trainer(training_step=step, accumulate=2).fit()


def test_the_results_that_a_step_of_the_users_own_returns_are_those_of_the_run():
    def step(trainer, batches, timeline):
        results = Trainer.training_step(trainer, batches, timeline)
        return [replace(result, loss=2 * result.loss) for result in results]

    ours, theirs = trainer(training_step=step), trainer()
    for each in (ours, theirs):
        each.fit()
    assert ours.results["train_loss"] == 2 * theirs.results["train_loss"]
    assert_same_run(ours, theirs)


def test_a_step_of_the_users_own_need_not_record_a_timeline(tmp_path):
    def step(trainer, batches, timeline):
        (batch,) = batches
        loss = trainer.loss_fn(trainer.model.net(batch.inputs), batch.targets)
        loss.backward()
        return [TrainStepResult(loss.detach(), batch.samples, None, batch.samples)]

    ours = trainer(training_step=step, nb_part=1, chunks=1, timeline_every=2)
    theirs = trainer(nb_part=1, chunks=1, timeline_every=2)
    for each in (ours, theirs):
        each.fit()
    assert_same_run(ours, theirs)


def test_a_loss_of_a_subclass_is_that_of_the_function():
    class Mine(Trainer):
        def compute_loss(self, output, targets):
            return nn.functional.mse_loss(output, nn.functional.one_hot(targets, 3).float())

    def make(kind, loss):
        ours = trainer()
        return kind(ours.model, ours.optimizer, loss, ours.train, steps=4)

    mine = make(Mine, None)
    theirs = make(
        Trainer, lambda o, t: nn.functional.mse_loss(o, nn.functional.one_hot(t, 3).float())
    )
    mine.fit()
    theirs.fit()
    assert_same_run(mine, theirs)
    with pytest.raises(ConfigError, match=r"loss_fn=, .*compute_loss.*loss_fn=None"):
        make(Mine, cross_entropy)
    with pytest.raises(ConfigError, match=r"loss_fn=, .*compute_loss.*loss_fn=None"):
        make(Trainer, None)


def test_a_step_of_the_users_own_keeps_what_is_the_trainers():
    calls = []

    def step(trainer, batches, timeline):
        calls.append(trainer.step)
        return Trainer.training_step(trainer, batches, timeline)

    ours = trainer(training_step=step, clip_norm=0.1)
    ours.fit()
    theirs = trainer(clip_norm=0.1)
    theirs.fit()
    assert calls == list(range(9))
    assert_same_run(ours, theirs)


def test_predictions_are_those_of_the_net_in_the_order_of_the_data():
    ours = trainer(nb_part=2)
    ours.fit()
    samples = data(11, seed=9)
    found = ours.predict(EvalLoader(samples, 4, ours.world))
    ours.model.eval()
    with torch.no_grad():
        expected = ours.model.net(samples.tensors[0])
    torch.testing.assert_close(found, expected)
    assert ours.test(EvalLoader(samples, 4, ours.world)) == ours.evaluate()


def test_mistakes_name_the_argument(tmp_path):
    with pytest.raises(ConfigError, match=r"match=head\.\* matches no parameter"):
        trainer(callbacks=[Freeze("head.*")])
    with pytest.raises(ConfigError, match=r"value=acuracy is not .* did you mean 'accuracy'"):
        trainer(callbacks=[EarlyStopping("acuracy")])
    with pytest.raises(ConfigError, match=r"2 .*callbacks=.*'ema'"):
        trainer(callbacks=[EMA(), EMA(0.9)])
    with pytest.raises(ConfigError, match="decay=1"):
        EMA(1)
    with pytest.raises(ConfigError, match="patience=0"):
        EarlyStopping(patience=0)
    with pytest.raises(ConfigError, match="factor=1"):
        Plateau(factor=1)
    with pytest.raises(ConfigError, match="value=0"):
        ClipValue(0)
    with pytest.raises(ConfigError, match="start=0"):
        SWA(0)
    for name in ("data", "callbacks"):
        with pytest.raises(ConfigError, match=f"states= .*'{name}'"):
            trainer(states={name: EMA()})
    ema = EMA()
    trainer(callbacks=[ema])
    average = {name: value + 1 for name, value in ema.average().items()}
    del average["2.weight"]
    with pytest.raises(CheckpointError, match=r"2\.weight, of shape .* is missing"):
        ema.load_state_dict({"average": average, "updates": 1})
    assert_same(ema.average(), dict(plain_net().named_parameters()), "nothing was loaded")


def test_a_checkpoint_without_callbacks_has_no_file_of_them(tmp_path):
    class OnMain(Callback):
        main_only = True

        def state_dict(self):
            return {"on": 1}

    store = CheckpointStore(tmp_path)
    trainer(steps=1, store=store, callbacks=[GradientNorms()]).fit()
    assert not list(tmp_path.rglob("callbacks*"))
    trainer(steps=2, store=store, callbacks=[EMA(), OnMain()]).fit()
    state = json.loads((store.newest() / "callbacks.json").read_text())
    assert "on_main" not in json.dumps(state)
    assert "ema" in json.dumps(state)


@pytest.mark.parametrize("cut", [2, 4, 5, 7])
@pytest.mark.parametrize(
    "lr", [None, cosine(2, 9), lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=10)]
)
@pytest.mark.quick_cases(1)
def test_rates_that_a_plateau_has_lowered_resume_exactly(lr, cut, tmp_path):
    def options():
        # nothing is better by that much: after the first evaluation every second one lowers
        callbacks = [Plateau(factor=0.3, patience=1, min_delta=100.0), LearningRates()]
        return {"callbacks": callbacks, "eval_every": 1, "lr": lr}

    whole = trainer(**options())
    whole.fit()
    plain = trainer(callbacks=[LearningRates()], lr=lr)
    plain.fit()
    lowered = [max(0, (step - 2) // 2) for step in range(1, 10)]  # after steps 3, 5, 7 and 9
    for step, times in zip(range(1, 10), lowered, strict=True):
        expected = plain.recorder.values[step, "train/lr"] * 0.3**times
        assert whole.recorder.values[step, "train/lr"] == pytest.approx(expected, rel=1e-6)
    store = CheckpointStore(tmp_path)
    first = trainer(**options(), store=store, checkpoint_every_steps=1)
    first.total_steps = cut
    again = resumed(first, trainer(**options()), store)
    assert_same_run(again, whole)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 9, eta_min=0.01),
        lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=10),
        lambda optimizer: SequentialLR(
            optimizer,
            [LinearLR(optimizer, 0.1), CosineAnnealingLR(optimizer, 7, eta_min=0.01)],
            [3],
        ),
    ],
    ids=["cosine", "one cycle", "sequence"],
)
@pytest.mark.quick_cases(1)
def test_a_lowered_rate_stays_the_same_share_of_what_the_schedule_gives(schedule, tmp_path):
    options = {"lr": schedule, "nb_part": 1, "store": CheckpointStore(tmp_path)}
    callbacks = [Plateau(factor=0.3, patience=1, min_delta=100.0), LearningRates()]
    ours = trainer(callbacks=callbacks, eval_every=1, **options)
    plain = trainer(callbacks=[LearningRates()], lr=schedule, nb_part=1)
    for each in (ours, plain):
        each.fit()
    for step in range(1, 10):
        share = 0.3 ** max(0, (step - 2) // 2)  # lowered after steps 3, 5, 7 and 9
        expected = plain.recorder.values[step, "train/lr"] * share
        assert ours.recorder.values[step, "train/lr"] == pytest.approx(expected, rel=1e-6)


def test_a_plateau_waits_as_that_of_pytorch_does():
    losses = [1.0, 0.9, 0.95, 0.91, 0.92, 0.8, 0.85, 0.83, 0.81, 0.9, 0.7]
    ours = trainer(callbacks=[Plateau(factor=0.5, patience=2)])
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.02)
    rule = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=0.5, patience=2, threshold=0)
    for loss in losses:
        ours.callbacks[0].on_evaluate(ours, {"loss": loss})
        rule.step(loss)
        assert ours.optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert theirs.param_groups[0]["lr"] == 0.02 * 0.5**2


@pytest.mark.parametrize("nb_part", [1, 2])
def test_each_element_of_the_gradients_is_clipped_in_every_stage(nb_part):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1.0)

    ours = trainer(nb_part=nb_part, steps=1, optimizer=sgd, callbacks=[ClipValue(0.01)])
    plain = trainer(nb_part=nb_part, steps=1, optimizer=sgd)
    for each in (ours, plain):
        each.fit()
    clipped = 0
    for (name, before), own, other in zip(
        plain_net().named_parameters(),
        ours.model.state_dict().values(),
        plain.model.state_dict().values(),
        strict=True,
    ):
        expected = before.detach() - (before.detach() - other).clamp(-0.01, 0.01)
        torch.testing.assert_close(own, expected, atol=1e-7, rtol=0, msg=name)
        clipped += int(((before - other).abs() > 0.011).sum())
    assert clipped > 10


def test_the_norm_in_the_log_is_of_the_elements_that_were_clipped():
    class Norms(Callback):
        def on_gradients(self, trainer):
            self.norm = trainer.model.grad_norm()

    before, after = type("Before", (Norms,), {})(), type("After", (Norms,), {})()
    ours = trainer(steps=1, clip_norm=1e-3, callbacks=[before, ClipValue(0.01), after])
    ours.fit()
    logged = ours.recorder.values[1, "train/grad_norm"]
    assert logged == pytest.approx(float(after.norm), rel=1e-6)
    assert float(before.norm) > logged > 1e-3


def test_a_gradient_that_is_not_finite_is_not_made_finite_by_clipping():
    ours = trainer(steps=2, callbacks=[ClipValue(0.01)], max_skipped=5)
    ours.model.net[4].bias.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    before = {name: value.clone() for name, value in ours.model.state_dict().items()}
    ours.fit()
    assert_same(ours.model.state_dict(), before, "weights")


@pytest.mark.parametrize("cut", [2, 5, 6])
@pytest.mark.quick_cases(1)
def test_the_average_of_swa_is_the_mean_of_the_steps_that_count(cut, tmp_path):
    whole = trainer(callbacks=[SWA(start=4, every=2)], eval_every=9)
    seen = states_after_each_step(whole)
    whole.fit()
    for name, average in whole.callbacks[0].average().items():
        expected = torch.stack([seen[step - 1][name] for step in (4, 6, 8)]).mean(0)
        torch.testing.assert_close(average, expected, atol=1e-6, rtol=1e-6)
    store = CheckpointStore(tmp_path)
    first = trainer(callbacks=[SWA(start=4, every=2)], store=store, checkpoint_every_steps=1)
    first.total_steps = cut
    again = resumed(first, trainer(callbacks=[SWA(start=4, every=2)], eval_every=9), store)
    assert_same_run(again, whole)
    assert_same(again.callbacks[0].average(), whole.callbacks[0].average(), "average")
    assert again.recorder.values[9, "eval/loss"] == whole.recorder.values[9, "eval/loss"]


@pytest.mark.parametrize("kept", [[], [EMA(0.9)]], ids=["nothing", "another average"])
def test_an_swa_that_a_resumed_run_adds_is_the_mean_of_the_steps_it_saw(kept, tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(steps=6, callbacks=kept, store=store).fit()
    late = trainer(steps=9, callbacks=[SWA(start=2)])
    late.resume(store.newest())
    seen = states_after_each_step(late)
    late.fit()
    assert len(seen) == 3
    for name, average in late.callbacks[0].average().items():
        expected = torch.stack([weights[name] for weights in seen]).mean(0)
        torch.testing.assert_close(average, expected, atol=1e-6, rtol=1e-6)


def test_an_swa_beside_another_average_is_refused():
    with pytest.raises(ConfigError, match="callbacks= has SWA"):
        trainer(callbacks=[EMA(), SWA(2)])
