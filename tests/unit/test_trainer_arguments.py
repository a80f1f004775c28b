"""A Trainer that is given something of the wrong kind says which argument, and what to write."""

import pytest
import torch
from support.compare import cpu_world
from support.nets import floats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import EvalLoader, HybridModel, Loader, Trainer
from hybridtrain.callbacks import EMA
from hybridtrain.errors import ConfigError
from hybridtrain.losses import accuracy

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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": nn.Sequential(nn.Linear(4, 2))},
            r"model= must be a HybridModel, not the module Sequential: write model = "
            r"HybridModel\(net, World\.from_env\(\)\), and make the optimizer over",
        ),
        ({"optimizer": torch.optim.SGD}, r"optimizer= must be an optimizer, not the class SGD"),
        (
            {"evaluation": DataLoader(DATA)},
            r"evaluation= must be an EvalLoader, not DataLoader: write EvalLoader\(dataset",
        ),
        (
            {"metrics": {"accuracy": accuracy}},
            r"metrics= has the function accuracy as 'accuracy', which is not a metric",
        ),
        ({"metrics": ["accuracy"]}, r"metrics= must be a dictionary, not list: write metrics="),
        ({"callbacks": [EMA]}, r"callbacks= has the class EMA, .*: write the call"),
        ({"callbacks": EMA(decay=0.9)}, r"callbacks= must be a list: write callbacks=\[EMA\(...\)"),
    ],
)
def test_an_argument_of_another_kind_is_named_with_what_to_write(changed, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**changed)


def test_an_unknown_setting_is_named_with_the_nearest_known_one():
    with pytest.raises(TypeError, match="unknown setting epoch=: did you mean 'epochs'"):
        trainer(epoch=1)


@pytest.mark.parametrize("name", ["test", "predict"])
def test_samples_that_no_replica_would_share_are_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}\(data\) must be an EvalLoader, not DataLoader"):
        getattr(trainer(), name)(DataLoader(DATA))


def test_an_eval_loader_is_taken():
    made = trainer()
    assert made.predict(EvalLoader(DATA, batch_size=4, world=made.world)).shape == (8, 2)
