"""A Trainer that is given something of the wrong kind says which argument, and what to write."""

import pytest
import torch
from support.compare import cpu_world
from support.nets import floats
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import EvalLoader, HybridModel, Loader, Trainer
from hybridtrain.data import StreamLoader, TrainLoader
from hybridtrain.errors import ConfigError
from hybridtrain.loop import Callback, Tracker
from hybridtrain.loop.callbacks import EMA, BestWeights, EarlyStopping
from hybridtrain.loss import accuracy

DATA = TensorDataset(floats(8, 4), floats(8, 2, seed=1))


def trainer(**changed):
    world = cpu_world(1)
    net = nn.Sequential(nn.Linear(4, 2))
    model = HybridModel(net, world)
    arguments = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": F.mse_loss,
        "train": Loader(DATA, batch_size=4, world=world),
        "steps": 1,
    }
    return Trainer(**(arguments | changed))


def with_method(base, name):
    return type("Mine", (base,), {name: lambda self, *args: None})()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": nn.Sequential(nn.Linear(4, 2))},
            r"model= must be a HybridModel, not the module Sequential: .*model = "
            r"HybridModel\(net, World\.from_env\(\)\), .*model\.parameters\(\)",
        ),
        ({"optimizer": torch.optim.SGD}, r"optimizer= must be an optimizer, not the class SGD"),
        (
            {"evaluation": DataLoader(DATA)},
            r"evaluation= must be an EvalLoader, not DataLoader: .*EvalLoader\(dataset",
        ),
        (
            {"metrics": {"accuracy": accuracy}},
            r"metrics= has the function accuracy as 'accuracy', which is not a metric",
        ),
        ({"metrics": ["accuracy"]}, r"metrics= must be a dictionary, not list: .*metrics="),
        ({"callbacks": [EMA]}, r"callbacks= has the class EMA, .*callbacks=\[EarlyStopping\(\)\]"),
        ({"callbacks": EMA(decay=0.9)}, r"callbacks= must be a list: .*callbacks=\[EMA\(...\)"),
        (
            {"callbacks": [with_method(Callback, "on_train_batch_end")]},
            r"Mine\.on_train_batch_end is not a hook.*: did you mean 'on_step'",
        ),
        ({"callbacks": [with_method(Callback, "on_steps")]}, r"did you mean 'on_step'"),
        (
            {"callbacks": [with_method(Tracker, "on_xyz")]},
            r"on_xyz is not .*: the hooks are: on_",
        ),
        (
            {"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])},
            r"optimizer=LBFGS: .*closure",
        ),
        (
            {"lr_schedule": ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))},
            r"lr_schedule: ReduceLROnPlateau depends on a metric, but a run can be resumed at any",
        ),
    ],
)
def test_an_argument_of_another_kind_is_named_with_what_to_write(changed, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**changed)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("epoch", "epochs"),
        ("max_epochs", "epochs"),
        ("eval_loader", "evaluation"),
        ("val_dataloaders", "evaluation"),
        ("metric", "metrics"),
        ("scheduler", "lr_schedule"),
        ("gradient_clip_val", "clip_norm"),
        ("logger", "callbacks"),
    ],
)
def test_an_unknown_setting_is_named_with_the_one_that_was_meant(name, meant):
    with pytest.raises(TypeError, match=f"unknown setting {name}=: did you mean '{meant}'"):
        trainer(**{name: 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(monitor="loss"), "EarlyStopping: unknown setting monitor=: did you"
         " mean 'value'"),
        (lambda: EarlyStopping(patiense=3), "did you mean 'patience'"),
        (lambda: EMA(beta=0.9), "EMA: unknown setting beta=: the settings are: decay, eval"),
        (lambda: BestWeights("x", save_top_k=2), "BestWeights: .* did you mean 'k'"),
    ],
)  # fmt: skip
def test_an_unknown_setting_of_a_callback_is_named_with_the_one_that_was_meant(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("batch_size", [0, -4, 2.5, None])
@pytest.mark.parametrize("kind", [Loader, EvalLoader, TrainLoader, StreamLoader])
def test_a_batch_size_that_is_no_number_of_samples_is_refused(kind, batch_size):
    with pytest.raises(ConfigError, match=f"batch_size={batch_size} must be a whole"):
        kind(DATA, batch_size=batch_size, world=cpu_world(1))


@pytest.mark.parametrize("name", ["test", "predict"])
def test_samples_that_no_replica_would_share_are_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}\(data\) must be an EvalLoader, not DataLoader"):
        getattr(trainer(), name)(DataLoader(DATA))


def test_an_eval_loader_is_taken():
    made = trainer()
    assert made.predict(EvalLoader(DATA, batch_size=4, world=made.world)).shape == (8, 2)
