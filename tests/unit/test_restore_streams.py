"""To load a checkpoint takes no second copy of the model, nor of the optimizer's moments."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint.state import restore, writers
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.errors import CheckpointError


class MemoryMade(TorchDispatchMode):
    """The bytes that operations have made and that are alive: the most at any time.

    A file that is mapped into memory is made by no operation.
    """

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or "set_" in str(func):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
                self.most = max(self.most, sum(self.alive.values()))
        return result


def trained(seed, step=True, kind=torch.optim.AdamW, groups=1):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    layers[-1].weight = layers[0].weight
    net = nn.Sequential(
        nn.Conv2d(3, 16, 2, padding="same"), nn.Flatten(), *layers, nn.Linear(64, 2)
    )
    net[0].to(memory_format=torch.channels_last)
    model = HybridModel(net, World.from_env(nb_part=1, devices="cpu"))
    parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[i::groups]} for i in range(groups)], lr=0.1)
    if step:
        model.train_step(torch.randn(8, 3, 2, 2), torch.arange(8) % 2, nn.functional.cross_entropy)
        optimizer.step()
    return model, optimizer


def size_of(tensors):
    return sum(t.nbytes for t in {t.data_ptr(): t for t in tensors}.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, optimizer = trained(0)
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
    return store.save(1, writers(model, optimizer, {"step": 1})), model, optimizer


def assert_equal(model, optimizer, saved):
    _, plain, moments = saved
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    expected = moments.state_dict()["state"]
    found = optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, entry in expected.items():
        assert found[number].keys() == entry.keys()
        for key, value in entry.items():
            other = found[number][key]
            torch.testing.assert_close(other, value, rtol=0, atol=0)
            assert other.stride() == value.stride(), "the memory format is that of the parameter"


def test_weights_are_copied_from_the_file_into_the_model_with_nothing_between(saved, monkeypatch):
    model, _ = trained(1, step=False)
    load = torch.load

    def mapped(*args, **kwargs):
        assert kwargs["mmap"]  # or the whole file is read, by no operation that is seen here
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", mapped)
    with MemoryMade() as made:
        restore(saved[0], model)
    assert made.most < size_of(model.parameters()) / 20


def test_moments_are_made_once(saved):
    model, optimizer = trained(1, step=False)
    with MemoryMade() as made:
        restore(saved[0], model, optimizer)
    moments = [v for entry in optimizer.state.values() for v in entry.values()]
    largest = max(p.nbytes for p in model.parameters())
    assert size_of(moments) <= made.most <= size_of(moments) + largest
    assert_equal(model, optimizer, saved)


def test_what_was_loaded_does_not_change_the_file_nor_live_in_it(saved):
    for _ in range(2):
        model, optimizer = trained(1, step=False)
        restore(saved[0], model, optimizer)
        assert_equal(model, optimizer, saved)
        with torch.no_grad():
            for tensor in (*model.parameters(), *tree_leaves(list(optimizer.state.values()))):
                tensor.zero_()


def test_tied_parameters_stay_tied(saved):
    model, _ = trained(1, step=False)
    restore(saved[0], model)
    assert model.net[2].weight is model.net[7].weight


def test_nothing_is_loaded_if_the_optimizer_does_not_fit(saved):
    model, optimizer = trained(1, groups=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="other groups of parameters"):
        restore(saved[0], model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
