"""Resuming in one process: from every step, with other stages, schedules and batch sizes."""

import copy
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from support.cases import thinned
from support.checkpoint_files import optimizer_in
from support.training import (
    assert_same,
    assert_same_run,
    cosine,
    data,
    plain_net,
    rich_net,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from hybridtrain import Trainer
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import StreamLoader, TrainLoader
from hybridtrain.errors import CheckpointError
from hybridtrain.options import LoaderOptions

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


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
    """Trains up to `step`, then continues in a new trainer, as a new process would."""
    first = trainer(options.pop("make", rich_net)(), nb_part=nb_part, store=store, **options)
    first.total_steps = step
    first.fit()
    torch.manual_seed(1234 + step)  # nothing may depend on the default generator
    net = rich_net()
    for parameter in net.parameters():
        nn.init.uniform_(parameter)  # nor on the initial weights of the new process
    again = trainer(net, nb_part=then_nb_part, store=store, **options)
    again.resume(store.newest())
    assert again.step == step
    again.fit()
    return first, again


@pytest.mark.parametrize(
    ("step", "then_nb_part"), thinned(list(itertools.product(range(1, 10), [2, 3])), 5)
)
@pytest.mark.quick_cases(1)
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_one(step, then_nb_part, tmp_path):
    options = {
        "lr": LR["cosine"],
        "accumulate": 2,
        "clip_norm": 1.0,
        "eval_every": 2,
        "batch_size": 6,  # 5 batches, the last with 4 samples; 3 optimizer steps an epoch
    }
    whole = trainer(rich_net(), **options)
    whole.fit()
    first, again = interrupted_at(
        step, CheckpointStore(tmp_path), then_nb_part=then_nb_part, **options
    )
    assert_same_run(again, whole)
    assert again.recorder.started == (9, step)
    expected = whole.recorder.reproducible()
    assert {**first.recorder.reproducible(), **again.recorder.reproducible()}.keys() == {
        *expected.keys(),
        (step, "eval/loss"),  # the first half evaluates at its end
        (step, "eval/accuracy"),
    }
    for key, value in again.recorder.reproducible().items():
        # if the run ends at the step it was resumed at, nothing but the evaluation is left
        assert value == expected[key], key
    for key in expected.keys() & first.recorder.reproducible().keys():
        assert first.recorder.values[key] == expected[key], key


@pytest.mark.parametrize("name", LR)
@pytest.mark.quick_cases(1)
def test_every_learning_rate_schedule_continues_where_it_was(name, tmp_path):
    whole = trainer(rich_net(), lr=LR[name])
    whole.fit()
    for step in (1, 4):
        _, again = interrupted_at(step, CheckpointStore(tmp_path / str(step)), lr=LR[name])
        assert_same_run(again, whole)
        for key, value in again.recorder.reproducible().items():
            assert value == whole.recorder.values[key], (step, key)


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
@pytest.mark.quick_cases(1)
def test_every_optimizer_continues_where_it_was(optimizer, tmp_path):
    whole = trainer(rich_net(), optimizer=optimizer)
    whole.fit()
    _, again = interrupted_at(4, CheckpointStore(tmp_path), then_nb_part=4, optimizer=optimizer)
    assert_same_run(again, whole)


def chained(optimizer):
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return torch.optim.lr_scheduler.ChainedScheduler([multistep(optimizer), constant])


@pytest.mark.parametrize("schedule", [multistep, chained])
def test_a_trainer_that_goes_back_says_that_its_schedule_cannot(schedule, tmp_path):
    store = CheckpointStore(tmp_path)
    ours = trainer(rich_net(), store=store, lr=schedule, checkpoint_every_steps=2)
    ours.fit()
    before = copy.deepcopy(ours.model.state_dict())
    with pytest.raises(CheckpointError, match="is at step 9, past step 4 of the checkpoint"):
        ours.resume(store.root / "step_00000004")
    assert_same(ours.model.state_dict(), before, "weights and buffers")
    ours.resume(store.root)  # the newest: the rate stays
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.01)


def test_a_resumed_run_does_not_save_again_what_it_was_resumed_from(tmp_path):
    store = CheckpointStore(tmp_path)
    _, again = interrupted_at(9, store)
    assert store.steps() == [9]
    summary = again.summary()
    assert summary["resumed_from"] == summary["checkpoint"] == str(tmp_path / "step_00000009")
    assert summary["samples"] == again.samples


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8, 12, 13])
@pytest.mark.quick_cases(1)
def test_another_batch_size_continues_at_the_same_sample(batch_size, drop_last, tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(batch_size=2, steps=12, store=store).fit()  # up to sample 24 of 28
    again = trainer(batch_size=batch_size, steps=14)
    options = LoaderOptions(drop_last=drop_last)
    again.train = TrainLoader(data(), batch_size, again.world, seed=1, options=options)
    again.resume(store.newest())
    again.fit()
    assert [step for step, _ in again.recorder.steps] == [13, 14]
    assert all(0 < samples <= batch_size for _, samples in again.recorder.steps)
    assert 0 <= again.batch < again.train.batches_per_epoch


class Lengths(TensorDataset):
    """A data set whose samples can be grouped by length."""

    def __init__(self, samples=28):
        super().__init__(torch.randn(samples, 6), torch.arange(samples) % 3)

    def lengths(self):
        return list(range(len(self)))


class Halves(IterableDataset):
    """A stream that divides itself over worker processes."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(worker, 28, workers):
            yield torch.full((6,), float(number)), number % 3


def table(samples=28, batch_size=4, **options):
    return lambda world: TrainLoader(Lengths(samples), batch_size, world, **options)


def halves(workers):
    return lambda world: StreamLoader(Halves(), 4, world, divided=True, workers=workers)


def own(batch_size, samples=28):
    return lambda _: DataLoader(Lengths(samples), batch_size)


OTHER_ORDERS = {
    "samples": (table(), table(32), "28 samples, but this run has 32 samples"),
    "grouped": (table(), table(group_by_length=True), "group_by_length=False, but this run has gr"),
    "batch size": (
        table(group_by_length=True), table(batch_size=2, group_by_length=True),
        "batch_size=4, but this run has batch_size=2",
    ),
    "shuffle": (table(), table(shuffle=False), "shuffle=True, but this run has shuffle=False"),
    "seed": (table(), table(seed=5), "seed=0, but this run has seed=5"),
    "workers": (halves(0), halves(1), "workers=0, but this run has workers=1"),
    "own batch size": (own(4), own(2), "batch_size=4, but this run has batch_size=2"),
    "own samples": (own(4), own(4, 32), "28 samples, but this run has 32 samples"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "message"), OTHER_ORDERS.values(), ids=OTHER_ORDERS)
@pytest.mark.quick_cases("samples", "batch size", "own batch size")
def test_a_run_does_not_resume_an_epoch_in_another_order_but_begins_the_next_one(
    before, after, message, tmp_path
):
    def run(train, **options):
        ours = trainer(steps=7, **options)
        return Trainer(
            ours.model, ours.optimizer, ours.loss_fn, train(ours.world), steps=14, log_every=9,
            **options,
        )  # fmt: skip

    store = CheckpointStore(tmp_path)
    first = run(before, store=store)
    for steps in (3, 7):
        first.total_steps = steps
        first.fit()
    again, middle = run(after), tmp_path / "step_00000003"
    weights = copy.deepcopy(again.model.state_dict())
    with pytest.raises(CheckpointError, match=f"middle of an epoch in an order .* {message}"):
        again.resume(middle)
    assert_same(again.model.state_dict(), weights, "untouched")
    again.resume(middle, allow_changes=True)
    assert (again.step, again.epoch) == (3, 0)
    again = run(after)
    again.resume(tmp_path / "step_00000007")
    assert (again.step, again.epoch, again.batch) == (7, 1, 0)
    again.fit()


@pytest.mark.parametrize("change", [{"first_batches": 5}, {"workers": 1}, {"drop_last": True}])
def test_settings_that_leave_the_samples_alone_may_change_in_the_middle_of_an_epoch(
    change, tmp_path
):
    store = CheckpointStore(tmp_path)
    trainer(store=store, steps=3).fit()
    again = trainer(steps=4)
    again.train = TrainLoader(data(), 4, again.world, seed=1, **change)
    again.resume(store.newest())
    assert (again.epoch, again.train.sample) == (0, 12)
    again.fit()
    assert (again.step, again.samples) == (4, 16)


def test_a_checkpoint_without_a_record_of_the_order_is_resumed(tmp_path):
    store = CheckpointStore(tmp_path)
    first = trainer(store=store, steps=3)
    first.train.order = {}  # as before version 0.3
    first.fit()
    assert "order" not in json.loads((store.newest() / "state.json").read_text())
    again = trainer(steps=4)
    again.train = TrainLoader(data(), 4, again.world, seed=2)
    again.resume(store.newest())
    assert again.batch == 3


def test_the_state_file_keeps_its_format(tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(plain_net(), store=store, steps=8).fit()
    saved = json.loads((tmp_path / "step_00000008" / "state.json").read_text())
    assert saved == {
        "step": 8, "samples": 32, "epoch": 1, "row": 4, "rows_per_step": 4, "scaler": None,
        "order": {"samples": 28, "shuffle": True, "seed": 1, "group_by_length": False},
        "draws_step": 8, "torch": torch.__version__,
        "evaluated_step": 8, "loss_sum": 0.0, "loss_samples": 0.0, "skipped_steps": 0,
        "overflow_steps": 0, "empty_steps": 0, "skipping": None,
        "best_step": None, "best_value": None, "best_criterion": None,
    }  # fmt: skip


def test_the_model_file_loads_into_the_plain_module(tmp_path):
    ours = trainer(rich_net(), nb_part=3, store=CheckpointStore(tmp_path))
    ours.fit()
    net = rich_net()
    saved = load_file(tmp_path / "step_00000009" / "model.safetensors")
    net.load_state_dict(saved)
    assert_same(net.state_dict(), ours.model.state_dict(), "model.safetensors")
    assert saved.keys() == rich_net().state_dict().keys()


def test_the_optimizer_file_has_parameters_by_name(tmp_path):
    ours = trainer(plain_net(), store=CheckpointStore(tmp_path), steps=1)
    ours.fit()
    saved = optimizer_in(tmp_path / "step_00000001")
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
            r"the model has no 4\.bias; the model has no 4\.weight",
        ),
        (
            lambda: nn.Sequential(*list(plain_net())[:4], nn.Linear(8, 7)),
            r"4\.weight is \[3, 8\] in the checkpoint and \[7, 8\] in the model",
        ),
        (lambda: nn.Sequential(nn.Linear(6, 6), *rich_net()), r"and \d+ more"),
    ],
)
@pytest.mark.quick_cases(2)
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
    with pytest.raises(CheckpointError, match=r"parameter groups .*optimizer="):
        other.resume(tmp_path / "step_00000001")


def test_a_run_made_longer_follows_the_schedule_of_its_new_length(tmp_path):
    store = CheckpointStore(tmp_path)
    trainer(steps=6, lr=cosine(2, 6), store=store).fit()
    longer = trainer(steps=12, lr=cosine(2, 12))
    longer.resume(store.newest())
    longer.fit()
    whole = trainer(steps=12, lr=cosine(2, 12))
    whole.fit()
    for step in range(7, 13):
        rates = [each.recorder.values[step, "train/lr"] for each in (longer, whole)]
        assert rates[0] == rates[1], step
