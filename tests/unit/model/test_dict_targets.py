"""Targets of a detector: a dict of boxes and classes, of another number for each image."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import CLOSE, assert_same_gradients, cpu_world
from torch import nn
from torch.utils.data import Dataset

from hybridtrain import HybridModel, Trainer
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.loss import SumLoss
from hybridtrain.options import LoaderOptions

OBJECTS = [2, 0, 1, 3, 1, 0, 2, 4]
NOTHING = -100


class Pictures(Dataset):
    def __len__(self):
        return len(OBJECTS)

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        count = OBJECTS[index]
        target = {"boxes": torch.rand(count, 4, generator=g), "labels": torch.arange(count) % 3}
        return torch.rand(3, 8, 8, generator=g), target


def padded(items):
    """Pads boxes and labels to four an image."""
    images, targets = zip(*items, strict=True)
    boxes = [F.pad(each["boxes"], (0, 0, 0, 4 - len(each["boxes"]))) for each in targets]
    labels = [
        F.pad(each["labels"], (0, 4 - len(each["labels"])), value=NOTHING) for each in targets
    ]
    return torch.stack(images), {"boxes": torch.stack(boxes), "labels": torch.stack(labels)}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 16))
        self.boxes, self.classes = nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, images):
        features = torch.tanh(self.body(images))
        boxes = self.boxes(features).unflatten(1, (4, 4))
        return {"boxes": boxes, "logits": self.classes(features).unflatten(1, (4, 3))}


def sum_over_objects(output, targets):
    there = targets["labels"] != NOTHING
    apart = (output["boxes"] - targets["boxes"]).abs().sum(-1)[there].sum()
    return apart + F.cross_entropy(output["logits"].mT, targets["labels"], reduction="sum")


def count(inputs, targets):
    return (targets["labels"] != NOTHING).sum()


DETECTION = SumLoss(sum_over_objects, count)


class Objects:
    """A metric over dict targets: the share of objects whose class is right."""

    def __init__(self):
        self.right = self.all = 0

    def to(self, device):
        return self

    def modules(self):
        return iter(())

    def reset(self):
        self.right = self.all = 0

    def update(self, output, targets):
        self.right += int((output["logits"].argmax(-1) == targets["labels"]).sum())
        self.all += int(count(None, targets))

    def compute(self):
        return torch.tensor(self.right / self.all)


def test_a_step_over_dict_targets_is_that_of_the_unsplit_model_whatever_the_images_hold():
    torch.manual_seed(0)
    net = Detector()
    images, targets = padded([Pictures()[i] for i in range(len(OBJECTS))])
    plain = copy.deepcopy(net)
    loss = sum_over_objects(plain(images), targets) / sum(OBJECTS)
    loss.backward()
    model = HybridModel(net, cpu_world(2), chunks=4)
    out = model.train_step(images, targets, DETECTION)
    assert out.count == sum(OBJECTS)
    torch.testing.assert_close(out.loss, loss.detach())
    assert_same_gradients(model, plain, **CLOSE)


@pytest.mark.thorough
def test_a_detector_trains_and_is_evaluated_over_its_objects():
    torch.manual_seed(0)
    world, fetch = cpu_world(2), LoaderOptions(collate=padded)
    model = HybridModel(Detector(), world, chunks=2)
    trainer = Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        DETECTION,
        TrainLoader(Pictures(), 4, world, options=fetch),
        epochs=60,
        evaluation=EvalLoader(Pictures(), 3, world, options=fetch),
        metrics={"classes": Objects()},
    )
    found = trainer.fit()["eval"]
    images, targets = padded([Pictures()[i] for i in range(len(OBJECTS))])
    with torch.no_grad():
        output = model.net.eval()(images)
    assert found["classes"] == 1.0
    expected = sum_over_objects(output, targets) / sum(OBJECTS)
    torch.testing.assert_close(torch.tensor(found["loss"]), expected)
