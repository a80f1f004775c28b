"""Every argument that is a number takes whole numbers and NumPy's numbers."""

import numpy as np
import pytest
import torch
from support.compare import cpu_world, hybrid, square_loss
from support.nets import TanhLinear, floats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridModel, Session, Trainer, World
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.loop.callbacks import ClipValue, EarlyStopping, Plateau
from hybridtrain.loss import cross_entropy
from hybridtrain.models import gpt
from hybridtrain.options import TrainerOptions, seconds
from hybridtrain.schedule import make_schedule, simulate

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def net():
    return nn.Sequential(TanhLinear(), TanhLinear(), TanhLinear())


def fit(world=None, precision="fp32", callbacks=(), timeout_s=10, **options):
    world = world or cpu_world(2)
    torch.manual_seed(0)
    model = HybridModel(net(), world, chunks=2, precision=precision, seed=0)
    inputs = floats(8)
    loader = TrainLoader(TensorDataset(inputs, inputs), 4, world, timeout_s=timeout_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluation = EvalLoader(TensorDataset(inputs, inputs), 4, world)
    trainer = Trainer(
        model, optimizer, F.mse_loss, loader, evaluation=evaluation, callbacks=callbacks,
        **{"steps": 2, **options},
    )  # fmt: skip
    trainer.fit()
    return trainer


def fitted(**options):
    """What a run has learned, and after how many steps."""
    trainer = fit(**options)
    return trainer.step, dict(trainer.model.state_dict())


def world(**arguments):
    return World.from_env(nb_part=2, devices="cpu", **arguments)


def world_with(name, value):
    made = world(**{name: value})
    return getattr(made, name), fitted(world=made)


def step(**settings):
    torch.manual_seed(0)
    model = hybrid(net(), 2, **settings)
    return model.train_step(floats(8), None, square_loss).loss, [
        len(stage.layers) for stage in model.plan.stages
    ]


def gradients(number=None, weight=None):
    torch.manual_seed(0)
    model = hybrid(net(), 2)
    model.train_step(floats(8), None, square_loss, **({} if weight is None else {"weight": weight}))
    norm = None if number is None else model.clip_grad_norm_(number)
    return norm, [parameter.grad for parameter in model.parameters()]


def session(number):
    torch.manual_seed(0)
    module, losses = net(), []
    with Session(world=world(), accumulate=1, memory_weight=number(1)) as run:
        optimizer = torch.optim.SGD(module.parameters(), lr=number(1))
        data = DataLoader(TensorDataset(floats(8), floats(8)), batch_size=4)
        model, optimizer, loader = run.prepare(module, optimizer, data)
        for inputs, targets in loader:
            losses.append(run.forward_backward(inputs, targets, F.mse_loss))
            run.clip_grad_norm_(number(1))
            optimizer.step()
            run.log({"loss": number(1)})
        return model.hybrid.options.memory_weight, losses


def schedule_times(number):
    table = make_schedule("1f1b", 2, 2, 1, None)
    times = [number(1), number(2)]
    return simulate(table, times, times, [number(1)])


def first_logits(number):
    torch.manual_seed(0)
    return gpt(10, 4, n_layer=1, n_head=1, d_model=4, dropout=number(0))(torch.zeros(1, 4).long())


EVALUATED = {"steps": 3, "eval_every": 1}

# What an argument decides, with it made by `number`.
ARGUMENTS = {
    "World timeout_s": lambda number: world_with("timeout_s", number(60)),
    "World stall_s": lambda number: world_with("stall_s", number(60)),
    "World replica_shares": lambda number: world_with("replica_shares", [number(1)]),
    "memory_weight": lambda number: step(
        split="balanced", memory_weight=number(1), example_inputs=floats(8)
    ),
    "memory_limit_gib": lambda number: step(split="size", memory_limit_gib=number(1)),
    "memory_limit_gib list": lambda number: step(
        split="size", memory_limit_gib=[number(1), number(2)]
    ),
    "device_speeds": lambda number: step(split="size", device_speeds=[number(1), number(5)]),
    "weight": lambda number: gradients(weight=number(3)),
    "clip_grad_norm_": lambda number: gradients(number(1)),
    "Session": session,
    "loader timeout_s": lambda number: fitted(timeout_s=number(10)),
    "max_time": lambda number: (fitted(max_time=number(1000)), seconds(number(1000))),
    "clip_norm": lambda number: fitted(clip_norm=number(1)),
    "loss_scale": lambda number: fit(precision="fp16", loss_scale=number(1024)).scaler.get_scale(),
    "checkpoint_every_minutes": lambda number: (
        TrainerOptions(steps=1, checkpoint_every_minutes=number(3)).checkpoint_every_minutes
    ),
    "label_smoothing": lambda number: cross_entropy(
        floats(4), torch.zeros(4, dtype=torch.long), label_smoothing=number(1)
    ),
    "ClipValue": lambda number: fitted(callbacks=[ClipValue(number(1))]),
    "EarlyStopping": lambda number: fitted(
        callbacks=[EarlyStopping("loss", patience=1, min_delta=number(1))], **EVALUATED
    ),
    "Plateau": lambda number: fitted(
        callbacks=[Plateau("loss", patience=0, min_delta=number(1))], **EVALUATED
    ),
    "dropout": first_logits,
    "schedule times": schedule_times,
}


@pytest.mark.parametrize("number", [int, np.float32, np.int64])
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.quick_cases(*(f"{name}-int" for name in ARGUMENTS), "loss_scale-float32")
def test_a_number_may_be_whole_or_of_numpy(name, number):
    """It does what the same `float` does."""
    assert_equal(ARGUMENTS[name](number), ARGUMENTS[name](float))


def assert_equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert_equal(tuple(one.items()), tuple(other.items()))
    elif isinstance(one, (list, tuple)):
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other
