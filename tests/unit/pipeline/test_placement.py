"""Every operation of a step has its tensors on one device.

On a CPU nothing shows a parameter, a buffer, an alias or a value that was left behind. Here the
devices have fake tensors, and an operation on two of them is an error; see `support.fake_gpus`.
"""

import pytest
import torch
from support.cases import thinned
from support.fake_gpus import fake_gpus
from support.nets import CASES, WIDTH, TanhLinear, regression
from torch import nn
from torch.nn import functional as F

from hybridtrain import HybridModel

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

# 2.11 says "devices cpu:1, cpu", later releases "devices, cpu:1 and cpu!"
BETWEEN_DEVICES = r"two .*devices,? cpu:1(,| and) cpu"

SETTINGS = [
    {"schedule": "gpipe", "recompute": "always"},
    {"stages_per_device": 2, "recompute": {"every": 2}},
]
CELLS = [
    *((kind, nb_part, {}) for kind in CASES for nb_part in (2, 4)),
    *((kind, 2, one) for kind in ("conv", "stateful", "u_net", "tied_gpt") for one in SETTINGS),
]


def stage_devices(model):
    """The device of the first stage that uses a parameter, by its name."""
    return {
        name: stage.device for stage in reversed(model.stages) for name in names_of(model, stage)
    }


def names_of(model, stage):
    own = {id(parameter) for parameter in stage.module.parameters()}
    return [n for n, p in model.named_parameters() if id(p) in own]


@pytest.mark.parametrize(("kind", "nb_part", "options"), thinned(CELLS, 3), ids=str)
@pytest.mark.quick_cases("nested-4-{}", "scaling_inplace-2-{}")
def test_a_training_step_mixes_no_devices(kind, nb_part, options):
    case = CASES[kind]
    with fake_gpus("cpu", nb_part) as gpus:
        net = gpus.without_numbers(case.net())
        model = HybridModel(net, gpus.world, chunks=2, **options)
        model._proof = lambda *_: None  # it compares numbers
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for seed in range(2):  # what the first step finds out may lead the second another way
            loss = model.train_step(*case.batch(5, seed), case.loss).loss
            model.clip_grad_norm_(1.0)
            optimizer.step()
        found = {name: (p.device, p.grad.device) for name, p in model.named_parameters()}
        assert found == {name: (at, at) for name, at in stage_devices(model).items()}
        assert loss.device == model.pipeline.output_device == gpus.devices[-1]


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.quick_cases(1)
def test_an_evaluation_on_cuda_mixes_no_devices(kind):
    case = CASES[kind]
    with fake_gpus("cuda", 2) as gpus:
        model = HybridModel(gpus.without_numbers(case.net()), gpus.world, chunks=2).eval()
        losses = model.map_outputs(*case.batch(5, 0), case.loss)
        assert {loss.device for loss in losses} == {gpus.devices[-1]}
        assert {name: p.device for name, p in model.named_parameters()} == stage_devices(model)


class LeftBehind(TanhLinear):
    """Its factors are no buffer, so that they stay where they were made."""

    def __init__(self):
        super().__init__()
        self.factors = torch.ones(WIDTH)

    def forward(self, x):
        return super().forward(x) * self.factors


def test_a_tensor_that_was_left_behind_is_an_error():
    with fake_gpus("cpu", 2) as gpus:
        net = gpus.without_numbers(nn.Sequential(TanhLinear(), LeftBehind()))
        model = HybridModel(net, gpus.world, chunks=2)
        with pytest.raises(RuntimeError, match=BETWEEN_DEVICES + r"(!|\n)") as info:
            model.train_step(*regression(4), F.mse_loss)
    assert any("in layer '1'" in note for note in info.value.__notes__)
