"""Loading a checkpoint makes no second copy of the model or of the optimizer's state."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.checkpoint import restore_checkpoint as restore
from hybridtrain.checkpoint.state import checkpoint_files
from hybridtrain.errors import CheckpointError


class MemoryMade(TorchDispatchMode):
    """Records the peak of the bytes that operations have allocated and that are still referenced.

    Memory-mapped files are not counted.
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
    return store.save(1, checkpoint_files(model, optimizer, {})), model, optimizer


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


def test_weights_are_copied_from_the_file_into_the_model_without_a_buffer(saved):
    model, _ = trained(1, step=False)
    with MemoryMade() as made:
        restore(saved[0], model)
    assert made.most < size_of(model.parameters()) / 20


def test_optimizer_state_is_allocated_once(saved):
    model, optimizer = trained(1, step=False)
    with MemoryMade() as made:
        restore(saved[0], model, optimizer)
    moments = [v for entry in optimizer.state.values() for v in entry.values()]
    largest = max(p.nbytes for p in model.parameters())
    assert size_of(moments) <= made.most <= size_of(moments) + largest
    assert_equal(model, optimizer, saved)


def test_loaded_tensors_do_not_share_memory_with_the_file(saved):
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
    with pytest.raises(CheckpointError, match=r"parameter groups .*optimizer="):
        restore(saved[0], model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Counter:
    """A state with one key."""

    def __init__(self, key="count", value=0):
        self.key, self.value = key, value

    def state_dict(self):
        return {self.key: self.value}

    def load_state_dict(self, saved):
        self.value = saved[self.key]


def test_a_new_state_is_saved_and_restored_with_one_entry(tmp_path):
    model, optimizer = trained(0)
    path = CheckpointStore(tmp_path).save(
        1, checkpoint_files(model, optimizer, {"counter": Counter(value=7)})
    )
    counter, (other, _) = Counter(), trained(1, step=False)
    restore(path, other, progress={"counter": counter})
    assert (counter.value, other.rng.step) == (7, model.rng.step) == (7, 1)


def test_two_states_with_the_same_key_are_refused():
    with pytest.raises(ValueError, match=r"counter .*draws_step"):
        checkpoint_files(*trained(0), {"counter": Counter("draws_step")})
