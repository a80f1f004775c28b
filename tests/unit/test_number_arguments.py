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
from hybridtrain.options import TrainerOptions
from hybridtrain.schedule import make_schedule, simulate

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def net():
    return nn.Sequential(TanhLinear(), TanhLinear(), TanhLinear())


def fit(world=None, precision="fp32", callbacks=(), timeout_s=10, **options):
    world = world or cpu_world(2)
    model = HybridModel(net(), world, chunks=2, precision=precision)
    inputs = floats(8)
    loader = TrainLoader(TensorDataset(inputs, inputs), 4, world, timeout_s=timeout_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluation = EvalLoader(TensorDataset(inputs, inputs), 4, world)
    trainer = Trainer(
        model, optimizer, F.mse_loss, loader, evaluation=evaluation, callbacks=callbacks,
        **{"steps": 2, **options},
    )  # fmt: skip
    trainer.fit()


def world(**arguments):
    return World.from_env(nb_part=2, devices="cpu", **arguments)


def step(**settings):
    hybrid(net(), 2, **settings).train_step(floats(8), None, square_loss)


def weigh(number):
    hybrid(net(), 2).train_step(floats(8), None, square_loss, weight=number(1))


def clip(number):
    model = hybrid(net(), 2)
    model.train_step(floats(8), None, square_loss)
    model.clip_grad_norm_(number(1))


def session(number):
    torch.manual_seed(0)
    module = net()
    with Session(world=world(), accumulate=1, memory_weight=number(1)) as run:
        optimizer = torch.optim.SGD(module.parameters(), lr=number(1))
        data = DataLoader(TensorDataset(floats(8), floats(8)), batch_size=4)
        model, optimizer, loader = run.prepare(module, optimizer, data)
        for inputs, targets in loader:
            run.forward_backward(inputs, targets, F.mse_loss)
            run.clip_grad_norm_(number(1))
            optimizer.step()
            run.log({"loss": number(1)})
        assert model.hybrid.options.memory_weight == 1


def schedule_times(number):
    table = make_schedule("1f1b", 2, 2, 1, None)
    times = [number(1), number(2)]
    simulate(table, times, times, [number(1)])


ARGUMENTS = {
    "World timeout_s": lambda number: fit(world(timeout_s=number(60))),
    "World stall_s": lambda number: fit(world(stall_s=number(60))),
    "World replica_shares": lambda number: fit(world(replica_shares=[number(1)])),
    "memory_weight": lambda number: step(
        split="balanced", memory_weight=number(1), example_inputs=floats(8)
    ),
    "memory_limit_gib": lambda number: step(split="size", memory_limit_gib=number(1)),
    "memory_limit_gib list": lambda number: step(
        split="size", memory_limit_gib=[number(1), number(2)]
    ),
    "device_speeds": lambda number: step(split="size", device_speeds=[number(1), number(2)]),
    "weight": weigh,
    "clip_grad_norm_": clip,
    "Session": session,
    "loader timeout_s": lambda number: fit(timeout_s=number(10)),
    "max_time": lambda number: fit(max_time=number(1000)),
    "clip_norm": lambda number: fit(clip_norm=number(1)),
    "loss_scale": lambda number: fit(precision="fp16", loss_scale=number(1024)),
    "checkpoint_every_minutes": lambda number: TrainerOptions(
        steps=1, checkpoint_every_minutes=number(3)
    ),
    "label_smoothing": lambda number: cross_entropy(
        floats(4), torch.zeros(4, dtype=torch.long), label_smoothing=number(0)
    ),
    "ClipValue": lambda number: fit(callbacks=[ClipValue(number(1))]),
    "EarlyStopping": lambda number: fit(callbacks=[EarlyStopping("loss", min_delta=number(1))]),
    "Plateau": lambda number: fit(callbacks=[Plateau("loss", min_delta=number(1))]),
    "dropout": lambda number: gpt(10, 4, n_layer=1, n_head=1, d_model=4, dropout=number(0)),
    "schedule times": schedule_times,
}


@pytest.mark.parametrize("number", [int, np.float32, np.int64])
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.quick_cases(*(f"{name}-int" for name in ARGUMENTS), "loss_scale-float32")
def test_a_number_may_be_whole_or_of_numpy(name, number):
    ARGUMENTS[name](number)
