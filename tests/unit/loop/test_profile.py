"""The trace of PyTorch's profiler over some steps of a run."""

import json

import pytest
import torch
from support.slow import SlowData
from torch import nn

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.errors import ConfigError
from hybridtrain.loop.callbacks import Profile
from hybridtrain.loss import cross_entropy

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def events(directory, steps_of_run=4, **settings):
    world = World.from_env(2, "cpu")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = HybridModel(net, world, chunks=2, split="uniform")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = TrainLoader(SlowData(0.0), 8, world)
    callback = Profile(directory, **settings)
    Trainer(model, optimizer, cross_entropy, data, steps=steps_of_run, callbacks=[callback]).fit()
    (path,) = directory.iterdir()
    trace = json.loads(path.read_text())["traceEvents"]
    return path.name, [event for event in trace if event.get("ph") == "X"]


def test_a_trace_has_actions_and_layers_by_name_and_the_operations_of_all_threads(tmp_path):
    name, found = events(tmp_path / "profile", first=2, steps=2)
    assert name == "rank_0_steps_2_to_3.pt.trace.json"
    names = [event["name"] for event in found]
    for action in ("F0@0", "F1@0", "F0@1", "F1@1", "B0@0", "B1@1"):
        assert names.count(action) == 2
    assert names.count("0") == names.count("1") == 4  # layers, two micro-batches of two steps
    forwards = {event["tid"] for event in found if event["name"][0] == "F"}
    products = [event for event in found if event["name"] == "aten::addmm"]
    assert len(products) == 8
    assert {event["tid"] for event in products} == forwards
    assert len(forwards) > 1


def test_a_run_that_ends_early_has_the_trace_of_what_there_was(tmp_path):
    name, found = events(tmp_path / "profile", first=4, steps=3)
    assert name == "rank_0_steps_4_to_4.pt.trace.json"
    assert found


def test_the_steps_may_be_the_first_and_the_last(tmp_path):
    name, found = events(tmp_path / "profile", steps=[2, 3])
    assert name == "rank_0_steps_2_to_3.pt.trace.json"
    assert [event["name"] for event in found].count("F0@0") == 2


@pytest.mark.parametrize("steps", [[3, 2], [1, 2, 3], [1.5, 2], []])
def test_steps_that_are_no_range_are_refused(tmp_path, steps):
    with pytest.raises(ConfigError, match=r"steps=\[.* must be .*\[20, 25\]"):
        Profile(tmp_path, steps=steps)


@pytest.mark.parametrize("settings", [{"first": 0}, {"steps": 0}, {"steps": 1.5}])
def test_steps_that_are_no_count_are_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))}=.* whole number"):
        Profile(tmp_path, **settings)
