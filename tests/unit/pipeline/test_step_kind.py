"""Kinds of steps: which facts make a step another kind, and when the checks of first steps run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.errors import NotExactError


class Net(nn.Module):
    """Two layers, the first of which may drop, and a flag."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        self.second = nn.Linear(4, 4)

    def forward(self, x, doubles=False):
        return self.second(self.first(x)) * (2 if doubles else 1)


@pytest.fixture
def model():
    model = HybridModel(Net(), World.from_env(2, "cpu"), chunks=2)
    model.train_step(torch.randn(4, 4), torch.randn(4, 4), F.mse_loss)
    return model


def kind(model, shape=(4, 4), dtype=torch.float32, trains=True, sizes=(2, 2), **settings):
    x = torch.zeros(shape, dtype=dtype).requires_grad_(settings.pop("requires_grad", False))
    return model.pipeline.kinds.of({"x": x, **settings}, sizes, trains)


def freeze(model):
    model.net.second.requires_grad_(False)
    model.pipeline.follow_requires_grad(model.pipeline.frozen_or_freed())


CHANGES = {
    "a dtype": lambda model: kind(model, dtype=torch.float64),
    "a number of dimensions": lambda model: kind(model, (4, 3, 4)),
    "one sample in a micro-batch": lambda model: kind(model, (3, 4), sizes=(2, 1)),
    "a number of micro-batches": lambda model: kind(model, sizes=(4,)),
    "an input that requires a gradient": lambda model: kind(model, requires_grad=True),
    "an evaluation": lambda model: kind(model, trains=False),
    "one more argument": lambda model: kind(model, doubles=False),
    "evaluation mode": lambda model: model.eval() and kind(model),
    "the mode of one layer": lambda model: model.net.first[1].eval() and kind(model),
    "a hook": lambda model: model.net.second.register_forward_hook(lambda *_: None) and kind(model),
    "a hook before a layer": lambda model: (
        model.net.second.register_forward_pre_hook(lambda *_: None) and kind(model)
    ),
    "a frozen layer": lambda model: freeze(model) or kind(model),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_is_of_another_kind_after_a_change_of(change, model):
    before = kind(model)
    assert kind(model) is before
    assert CHANGES[change](model) is not before


def test_a_flag_among_the_inputs_is_part_of_the_kind(model):
    assert kind(model, doubles=True) is not kind(model, doubles=False)


def test_autocast_of_the_caller_is_part_of_the_kind(model):
    before = kind(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert kind(model) is not before


def test_lengths_and_sizes_of_batches_are_no_part_of_the_kind(model):
    assert kind(model, (4, 7, 4)) is kind(model, (9, 5, 4), sizes=(5, 4))


def test_a_batch_and_its_micro_batches_are_of_one_kind(model):
    inputs = torch.randn(4, 4)
    of_batch = model.pipeline.kinds.of(inputs, (2, 2), True)
    assert model.pipeline.kinds.of_parts(inputs.split(2), True) is of_batch


@pytest.mark.parametrize("of_length", [lambda step: 3, lambda step: 2 + step])
def test_steps_are_compared_with_plain_pytorch_at_powers_of_two_of_their_kind(of_length, tmp_path):
    log = tmp_path / "runs"  # a comparison restores the objects that the code changes

    class Counts(Net):
        def forward(self, x):
            with log.open("a") as file:
                file.write(f"{step}\n")
            return super().forward(x)

    model, step = HybridModel(Counts(), World.from_env(2, "cpu"), chunks=2), 0
    model.split_for(torch.randn(4, 3, 4))
    for step in range(1, 20):
        x = torch.randn(4, of_length(step), 4)
        model.train_step(x, x, F.mse_loss)
    runs = [int(line) for line in log.read_text().split()]
    # twice for the two micro-batches; a comparison runs copies, too
    assert [step for step in range(1, 20) if runs.count(step) > 2] == [1, 4, 8, 16]


def test_a_refused_step_is_refused_again():
    class Leaves(nn.Module):
        def forward(self, x):
            self.left = x.detach().mean()
            return x * 2

    class Takes(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.others = [other]
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) + self.others[0].left

    leaves = Leaves()
    net = nn.Sequential(nn.Linear(4, 4), leaves, Takes(leaves))
    model = HybridModel(net, World.from_env(2, "cpu"), chunks=4, split=[2, 1])
    for _ in range(2):
        with pytest.raises(NotExactError, match="does not compute the same"):
            model.train_step(torch.randn(8, 4), torch.randn(8, 4), F.mse_loss)
