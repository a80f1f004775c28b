"""The loop in one process: what a step is, resuming, counting, evaluating, checkpoints."""

import copy
import itertools
import json
import math
import threading

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.app.optim import build_lr_schedule
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.data.loader import EvalLoader, TrainLoader
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.evaluation import evaluate
from hybridtrain.losses import accuracy, cross_entropy
from hybridtrain.pipeline.layer_rng import LayerRNG

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

# In batches of 4 or 6 rows no micro-batch of these has one row, which BatchNorm refuses.
ROWS = 28
RAGGED = 22


def plain_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def rich_net():
    """With everything that a resume can forget: running statistics and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    )


def data(rows=ROWS, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 6, generator=g), torch.randint(3, (rows,), generator=g))


class Recorder:
    """A monitor that keeps what it is told; times are left out of comparisons."""

    def __init__(self):
        self.values = {}
        self.steps = []
        self.started = None

    def start(self, *, total_steps, first_step, texts):
        self.started = total_steps, first_step

    def step(self, step, samples):
        self.steps.append((step, samples))

    def scalars(self, step, values):
        for name, value in values.items():
            self.values[step, name] = value

    def timeline(self, step, predicted, measured):
        pass

    def close(self):
        pass

    def timeless(self):
        names = ("train/loss", "train/lr", "train/grad_norm", "train/epoch", "eval/")
        return {key: value for key, value in self.values.items() if key[1].startswith(names)}


def trainer(net=None, *, nb_part=2, chunks=2, batch_size=4, optimizer=None, lr=None, **options):
    """A trainer with a recorder; `lr` makes the schedule from the optimizer."""
    world = World.from_env(nb_part=nb_part, devices="cpu")
    model = HybridModel(net or plain_net(), world, chunks=chunks, seed=3)
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.02))
    made = make(model.parameters())
    options = {"log_every": 1, "monitor": Recorder(), **options}
    if "epochs" not in options:
        options.setdefault("steps", 9)
    return Trainer(
        model,
        made,
        cross_entropy,
        TrainLoader(options.pop("data", data()), batch_size, world, seed=1),
        lr_schedule=lr(made) if lr else None,
        evaluation=EvalLoader(data(11, seed=9), 4, world),
        metrics={"accuracy": accuracy},
        **options,
    )


def assert_same(ours, theirs, what):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), f"{what}: {name}"


def moments(trainer):
    """The optimizer's state by the parameters' names."""
    names = [name for name, _ in trainer.model.named_parameters()]
    state = trainer.optimizer.state_dict()["state"]
    return {(names[i], key): value for i, entry in state.items() for key, value in entry.items()}


def assert_same_run(ours, theirs):
    assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights and buffers")
    assert_same(moments(ours), moments(theirs), "optimizer")
    assert (ours.step, ours.samples, ours.epoch, ours.batch) == (
        theirs.step,
        theirs.samples,
        theirs.epoch,
        theirs.batch,
    )
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


# What one optimizer step is.
@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulating_k_batches_equals_one_k_times_larger(accumulate):
    # the last batch of an epoch has 2 rows
    options = {"data": data(RAGGED), "epochs": 2, "clip_norm": 0.5}
    small = trainer(batch_size=4, accumulate=accumulate, **options)
    large = trainer(batch_size=4 * accumulate, **options)
    for each in (small, large):
        each.fit()
    assert small.step == large.step == 2 * -(-RAGGED // (4 * accumulate))
    assert small.samples == large.samples == 2 * RAGGED
    for name, value in large.model.state_dict().items():
        # the same sums over the same rows in another order, after several AdamW steps
        torch.testing.assert_close(
            small.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name
        )
    for (step, name), value in large.monitor.timeless().items():
        if name == "train/epoch":  # counted in batches
            continue
        assert small.monitor.values[step, name] == pytest.approx(value, rel=1e-3), (step, name)


@pytest.mark.parametrize("nb_part", [1, 2, 4])
def test_the_norm_is_clipped_over_all_stages(nb_part):
    # SGD, so that a wrong scale shows; Adam would hide it
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    ours = trainer(nb_part=nb_part, chunks=1, clip_norm=0.05, steps=4, optimizer=sgd)
    net = plain_net()
    plain = sgd(net.parameters())
    stream = ours.train.stream()
    for step in range(1, 5):
        batch = next(stream)
        cross_entropy(net(batch.inputs), batch.targets).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        assert norm > 0.05, "nothing is clipped"
        plain.step()
        plain.zero_grad()
        ours.total_steps = step
        ours.fit()
        assert ours.monitor.values[step, "train/grad_norm"] == float(norm)
        assert_same(ours.model.state_dict(), net.state_dict(), f"step {step}")
    stream.close()


def test_the_gradient_norm_is_logged_without_clipping_too():
    ours = trainer(steps=1)
    ours.fit()
    net = plain_net()
    batch = next(ours.train.stream())
    cross_entropy(net(batch.inputs), batch.targets).backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert ours.monitor.values[1, "train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_the_logged_loss_is_the_mean_over_the_rows_since_the_last_line():
    # a learning rate of 0, so that every batch sees the same net; 6 batches, the last of 2 rows
    ours = trainer(
        data=data(RAGGED), epochs=1, log_every=6, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    )
    summary = ours.fit()
    inputs, targets = data(RAGGED).tensors
    expected = float(cross_entropy(plain_net()(inputs), targets).detach())
    assert ours.monitor.values[6, "train/loss"] == pytest.approx(expected, rel=1e-5)
    assert summary["train_loss"] == ours.monitor.values[6, "train/loss"]
    assert summary["eval"]["loss"] == ours.monitor.values[6, "eval/loss"]


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
def test_steps_and_epochs_are_counted(options, steps):
    ours = trainer(**options)
    summary = ours.fit()
    assert summary["steps"] == ours.step == ours.total_steps == steps
    assert ours.monitor.started == (steps, 0)
    assert [step for step, _ in ours.monitor.steps] == list(range(1, steps + 1))
    assert sum(samples for _, samples in ours.monitor.steps) == summary["samples"]
    if "epochs" in options:
        assert summary["samples"] == ROWS * options["epochs"]
        assert (ours.epoch, ours.batch) == (options["epochs"], 0)


@pytest.mark.parametrize("options", [{"steps": None}, {"steps": 3, "epochs": 2}])
def test_one_of_steps_and_epochs_must_be_given(options):
    with pytest.raises(ConfigError, match=r"one of trainer\.steps and trainer\.epochs"):
        trainer(**{"epochs": None, **options})


@pytest.mark.parametrize("log_every", [1, 3, 4, 100])
def test_every_nth_step_and_the_last_are_logged(log_every):
    ours = trainer(steps=9, log_every=log_every)
    ours.fit()
    logged = sorted(step for step, name in ours.monitor.values if name == "train/loss")
    assert logged == sorted({*range(log_every, 10, log_every), 9})


@pytest.mark.parametrize(
    ("eval_every", "expected"), [(None, [9]), (4, [4, 8, 9]), (3, [3, 6, 9]), (100, [9])]
)
def test_every_nth_step_and_the_last_are_evaluated_and_saved(eval_every, expected, tmp_path):
    store = CheckpointStore(tmp_path)
    ours = trainer(steps=9, eval_every=eval_every, checkpoint_every=eval_every, store=store)
    summary = ours.fit()
    assert sorted(s for s, name in ours.monitor.values if name == "eval/loss") == expected
    assert store.steps() == expected
    assert summary["checkpoint"] == str(tmp_path / "step_00000009")
    assert summary["resumed_from"] is None
    json.dumps(summary)


# The learning rate.
def cosine(warmup_steps, total):
    config = {
        "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "T_max": None,
        "warmup_steps": warmup_steps,
    }
    return lambda optimizer: build_lr_schedule(config, optimizer, total)


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
        found = ours.monitor.values[step + 1, "train/lr"]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12), step


# Resuming.
def multistep(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], gamma=0.1)


def sequential(optimizer):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, multistep(optimizer)], [2])


LR = {
    "none": None,
    "cosine": cosine(3, 9),
    "multistep": multistep,
    "sequential": sequential,
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


def interrupted_at(step, store, nb_part=2, then_nb_part=2, **options):
    """Runs up to `step`, then goes on in a new trainer, as a new process would."""
    first = trainer(options.pop("make", rich_net)(), nb_part=nb_part, store=store, **options)
    first.total_steps = step
    first.fit()
    torch.manual_seed(1234 + step)  # nothing may hang on the default generator
    net = rich_net()
    for parameter in net.parameters():
        nn.init.uniform_(parameter)  # nor on how the new process's net begins
    again = trainer(net, nb_part=then_nb_part, store=store, **options)
    again.resume(store.newest())
    assert again.step == step
    again.fit()
    return first, again


@pytest.mark.parametrize("step", range(1, 10))
@pytest.mark.parametrize("then_nb_part", [2, 3])
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_one(step, then_nb_part, tmp_path):
    options = {
        "lr": LR["cosine"],
        "accumulate": 2,
        "clip_norm": 1.0,
        "eval_every": 2,
        "batch_size": 6,  # 5 batches, the last with 4 rows; 3 optimizer steps an epoch
    }
    whole = trainer(rich_net(), **options)
    whole.fit()
    first, again = interrupted_at(
        step, CheckpointStore(tmp_path), then_nb_part=then_nb_part, **options
    )
    assert_same_run(again, whole)
    assert again.monitor.started == (9, step)
    expected = whole.monitor.timeless()
    assert {**first.monitor.timeless(), **again.monitor.timeless()}.keys() == {
        *expected.keys(),
        (step, "eval/loss"),  # the first half evaluates at its end
        (step, "eval/accuracy"),
    }
    for key, value in again.monitor.timeless().items():
        # if the run ends at the step it was resumed at, nothing but the evaluation is left
        assert value == expected[key], key
    for key in expected.keys() & first.monitor.timeless().keys():
        assert first.monitor.values[key] == expected[key], key


@pytest.mark.parametrize("name", LR)
def test_every_learning_rate_schedule_goes_on_where_it_was(name, tmp_path):
    whole = trainer(rich_net(), lr=LR[name])
    whole.fit()
    for step in (1, 4):
        _, again = interrupted_at(step, CheckpointStore(tmp_path / str(step)), lr=LR[name])
        assert_same_run(again, whole)
        for key, value in again.monitor.timeless().items():
            assert value == whole.monitor.values[key], (step, key)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, 0.01),
        lambda p: torch.optim.AdamW(
            [{"params": ps, "lr": 0.01 * i} for i, ps in enumerate(([x] for x in p), 1)]
        ),
    ],
    ids=["momentum", "amsgrad", "adagrad", "groups"],
)
def test_every_optimizer_goes_on_where_it_was(optimizer, tmp_path):
    whole = trainer(rich_net(), optimizer=optimizer)
    whole.fit()
    _, again = interrupted_at(4, CheckpointStore(tmp_path), then_nb_part=4, optimizer=optimizer)
    assert_same_run(again, whole)


def test_a_resumed_run_does_not_save_again_what_it_was_resumed_from(tmp_path):
    store = CheckpointStore(tmp_path)
    _, again = interrupted_at(9, store)
    assert store.steps() == [9]
    summary = again.summary()
    assert summary["resumed_from"] == summary["checkpoint"] == str(tmp_path / "step_00000009")
    assert summary["samples"] == again.samples


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8, 12, 13])
def test_with_another_batch_size_a_run_goes_on_at_the_same_row(batch_size, drop_last, tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(batch_size=2, steps=12, store=store).fit()  # up to row 24 of 28
    again = trainer(batch_size=batch_size, steps=14)
    again.train = TrainLoader(data(), batch_size, again.world, seed=1, drop_last=drop_last)
    again.resume(store.newest())
    again.fit()
    assert [step for step, _ in again.monitor.steps] == [13, 14]
    assert all(0 < samples <= batch_size for _, samples in again.monitor.steps)
    assert 0 <= again.batch < again.train.batches_per_epoch


def test_the_model_file_loads_into_the_plain_module(tmp_path):
    ours = trainer(rich_net(), nb_part=3, store=CheckpointStore(tmp_path))
    ours.fit()
    net = rich_net()
    saved = torch.load(tmp_path / "step_00000009" / "model.pt", weights_only=True)
    net.load_state_dict(saved)
    assert_same(net.state_dict(), ours.model.state_dict(), "model.pt")
    assert list(saved) == list(rich_net().state_dict())


def test_the_optimizer_file_speaks_of_parameters_by_name(tmp_path):
    ours = trainer(plain_net(), store=CheckpointStore(tmp_path), steps=1)
    ours.fit()
    saved = torch.load(tmp_path / "step_00000001" / "optimizer.pt", weights_only=True)
    names = [name for name, _ in plain_net().named_parameters()]
    assert list(saved["state"]) == saved["param_groups"][0]["params"] == names


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), r"it lacks 1\.weight"),
        (
            lambda: nn.Sequential(*plain_net(), nn.Linear(3, 3)),
            r"lacks 5\.weight; it lacks 5\.bias",
        ),
        (
            lambda: nn.Sequential(*list(plain_net())[:4]),
            r"the model has no 4\.weight; the model has no 4\.bias",
        ),
        (
            lambda: nn.Sequential(*list(plain_net())[:4], nn.Linear(8, 7)),
            r"4\.weight is \[3, 8\] there and \[7, 8\] in the model",
        ),
        (lambda: nn.Sequential(nn.Linear(6, 6), *rich_net()), r"and \d+ more"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(net, message, tmp_path):
    trainer(store=CheckpointStore(tmp_path), steps=1).fit()
    other = trainer(net())
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(CheckpointError, match=message):
        other.resume(tmp_path / "step_00000001")
    assert_same(other.model.state_dict(), before, "untouched")


def test_a_checkpoint_of_other_parameter_groups_is_refused(tmp_path):
    trainer(store=CheckpointStore(tmp_path), steps=1).fit()
    other = trainer(optimizer=lambda p: torch.optim.AdamW([{"params": [x]} for x in p]))
    with pytest.raises(CheckpointError, match="other groups of parameters"):
        other.resume(tmp_path / "step_00000001")


# Evaluation.
@pytest.mark.parametrize("rows", [1, 4, 11])
@pytest.mark.parametrize("chunks", [1, 3])
def test_evaluation_counts_every_sample_once(rows, chunks):
    world = World.from_env(nb_part=2, devices="cpu")
    net = rich_net()
    reference = copy.deepcopy(net).eval()
    model = HybridModel(net, world, chunks=chunks)
    loader = EvalLoader(data(rows, seed=9), 4, world)
    metrics = {
        "accuracy": accuracy,
        "torchmetrics": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
    }
    inputs, targets = data(rows, seed=9).tensors
    with torch.no_grad():
        outputs = reference(inputs)
    expected = float((outputs.argmax(1) == targets).double().mean())
    for _ in range(2):  # a second time the same: nothing is left of the first
        result = evaluate(model, loader, cross_entropy, metrics)
        assert result["samples"] == rows
        assert result["accuracy"] == pytest.approx(expected, abs=1e-12)
        assert result["torchmetrics"] == pytest.approx(expected, abs=1e-6)  # a float32
        # means of batches of 4 and less, in float32, weighted in double precision
        loss = float(F.cross_entropy(outputs, targets))
        assert result["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_leaves_the_mode_the_draws_and_the_state_as_they_were(mode):
    ours = trainer(rich_net())
    ours.model.train(mode)
    ours.model.rng.step = 5
    before = copy.deepcopy(ours.model.state_dict())
    evaluate(ours.model, ours.evaluation, cross_entropy, {})
    assert ours.model.training is mode
    assert all(module.training is mode for module in ours.model.net.modules())
    assert ours.model.rng.step == 5
    assert_same(ours.model.state_dict(), before, "state")
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_evaluating_more_often_changes_no_weight():
    runs = [trainer(rich_net(), eval_every=every) for every in (None, 1)]
    for run in runs:
        run.fit()
    assert_same_run(*runs)


def test_the_split_and_the_trainer_change_no_weight():
    # dropout included: the masks do not depend on the split
    runs = [trainer(rich_net(), nb_part=nb_part) for nb_part in (1, 2, 4)]
    for run in runs:
        run.fit()
    for run in runs[1:]:
        assert_same_run(run, runs[0])


def test_an_exception_in_a_step_closes_the_monitor_and_leaves_no_thread():
    class Closing(Recorder):
        closed = False

        def close(self):
            self.closed = True

    ours = trainer(monitor=Closing())
    boom = RuntimeError("boom")

    def fail(module, args):
        raise boom

    ours.model.net[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        ours.fit()
    assert ours.monitor.closed
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_draws_of_neighbouring_steps_layers_and_micro_batches_are_unrelated():
    draws = LayerRNG(0, 0)
    drawn = set()
    for step, layer, i in itertools.product(range(10), repeat=3):
        draws.step = step
        with draws.guard(layer, i):
            drawn |= {torch.randint(2**60, ()).item(), torch.randint(2**60, ()).item()}
    assert len(drawn) == 2000


def test_a_run_made_longer_goes_on_with_the_schedule_of_its_new_length(tmp_path):
    def cosine(steps):
        config = {
            "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
            "T_max": None,
            "warmup_steps": 2,
        }
        return lambda optimizer: build_lr_schedule(config, optimizer, steps)

    store = CheckpointStore(tmp_path)
    trainer(steps=6, lr=cosine(6), store=store).fit()
    longer = trainer(steps=12, lr=cosine(12))
    longer.resume(store.newest())
    longer.fit()
    whole = trainer(steps=12, lr=cosine(12))
    whole.fit()
    for step in range(7, 13):
        rates = [each.monitor.values[step, "train/lr"] for each in (longer, whole)]
        assert rates[0] == rates[1], step
