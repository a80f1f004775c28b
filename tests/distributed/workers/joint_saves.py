"""Checkpoints that all processes write: the same content as those that rank 0 writes."""

import errno
import json
import sys
import tempfile
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_files import tensors_in
from support.launch import Cells
from support.nets import CLASSES, classification
from torch import nn
from torch.nn import functional as F

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore, NoSpaceError, init_from, read, shared_files
from hybridtrain.checkpoint import finishing_saves as finishing
from hybridtrain.checkpoint import restore_checkpoint as restore
from hybridtrain.checkpoint import save_checkpoint as save
from hybridtrain.checkpoint import store as store_module
from hybridtrain.errors import CheckpointError
from hybridtrain.models import quantize

torch.set_num_threads(1)
cells = Cells()


class Runs(nn.Linear):
    """A layer with a state that is not a tensor."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"runs": self.runs}

    def set_extra_state(self, state):
        self.runs = state["runs"]


def make(seed=0):
    """A weight in two stages under two names, buffers, other state, tensors of several sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), Runs(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        )
        net[3].weight = net[0].weight
    return net


def across(seed=0):
    """A model over two processes a replica, and its optimizer."""
    world = World.from_env(2, "cpu", timeout_s=60, engine="distributed")
    model = HybridModel(make(seed), world, split=[3, 2], chunks=2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def local(seed=0, world=None):
    """A model with all its stages in each process."""
    world = world or World.from_env(1, "cpu", timeout_s=60)
    model = HybridModel(make(seed), world, chunks=2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1, seed=0):
    """Steps on batches that differ between the replicas."""
    for step in range(steps):
        batch = classification(4, 10 * seed + step + 100 * model.world.data_parallel_rank)
        model.train_step(*batch, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def shared_folder(world):
    with tempfile.TemporaryDirectory() as folder:
        yield Path(world.broadcast(folder))
        world.gather(None)  # nobody reads any more


def content(path):
    """The tensors and documents of a checkpoint, read without the manifest."""
    tensors = {stem: tensors_in(path, stem) for stem in ("model", "optimizer")}
    documents = {
        file.name: json.loads(file.read_bytes())
        for file in sorted(path.glob("*.json"))
        if file.name != "manifest.json" and ".safetensors" not in file.name
    }
    return tensors, documents


def assert_same_content(one, two):
    (tensors, documents), (others, other_documents) = content(one), content(two)
    assert documents == other_documents
    assert "model_extra.json" in documents
    for stem, values in tensors.items():
        assert values.keys() == others[stem].keys()
        assert values
        for name, value in values.items():
            assert torch.equal(value, others[stem][name]), name


def whole_state(model, optimizer):
    """All that a checkpoint restores, of this process, as plain copies."""
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    numbers = {id(p): n for n, p in model.named_parameters()}
    moments = {
        f"{numbers[id(p)]}.{key}": value.clone()
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    return weights | buffers | moments


def assert_restores(path, made, expected):
    """Restores into a model with other values, in both ways; `expected` may have more entries."""
    for reads_itself in (True, False):
        model, optimizer = made
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(torch.full_like(tensor, 7))
        optimizer.state.clear()
        with forced(same_files=reads_itself):
            restore(path, model, optimizer)
        found = whole_state(model, optimizer)
        assert found.keys() <= expected.keys()
        assert any(name.endswith("exp_avg") for name in found)
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


@contextmanager
def forced(same_files):
    """Lets processes find that they see the same files, or not."""
    real = read.same_files
    read.same_files = lambda world, paths: real(world, paths) and same_files
    yield
    read.same_files = real


@contextmanager
def writing(world, ranks, replacement):
    """Replaces what writes a file, on some ranks; `replacement` gets it as its first argument."""
    real = store_module.write_file
    if world.rank in ranks:
        store_module.write_file = lambda path, write: replacement(real, path, write)
    try:
        yield
    finally:
        store_module.write_file = real


def full_disk(real, path, write):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def leftovers(folder):
    return [path.name for path in folder.glob(".tmp-*")]


@cells.add("all processes write what rank 0 would write, and any split loads it")
def _same(world):
    model, optimizer = across()
    train(model, optimizer, 3)
    with shared_folder(world) as folder:
        by_rank_0, by_all, auto = (
            save(CheckpointStore(folder / writers, writers=writers), 3, model, optimizer, {})
            for writers in ("rank0", "all", "auto")
        )
        assert [path.name for path in sorted(by_rank_0.glob("*.safetensors"))] == [
            "model.safetensors",
            "optimizer.safetensors",
        ]
        assert_same_content(by_rank_0, by_all)
        assert_same_content(by_rank_0, auto)

        # the files as a reader of the Hub sees them
        index = json.loads((by_all / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in by_all.glob("model-*.safetensors"))
        assert files == [
            f"model-{i + 1:05d}-of-{world.size:05d}.safetensors" for i in range(world.size)
        ]
        found = {}
        for file in files:
            own = load_file(by_all / file)
            assert own
            assert not own.keys() & found.keys()
            assert all(index["weight_map"][name] == file for name in own)
            found |= own
        plain = make(1)
        assert found.keys() == index["weight_map"].keys()
        assert plain.load_state_dict(found, strict=False).missing_keys == [
            "2._extra_state",
            "3.weight",
        ]
        # the work is spread over the replicas of a stage
        optimizer_files = [path.stat().st_size for path in by_all.glob("optimizer-*.safetensors")]
        assert len(optimizer_files) == world.size

        states = world.gather(whole_state(model, optimizer))
        expected = {name: value for state in reversed(states) for name, value in state.items()}
        assert_restores(by_all, across(1), expected)
        assert_restores(by_all, local(1), expected)
        assert_restores(by_all, local(2, World()), expected)
        alone, _ = local(3, World())
        restore(by_all, alone)
        assert alone.net[2].runs == 6


@cells.add("initial weights load stage by stage, read by each process or sent")
def _init_from(world):
    model, optimizer = across()
    train(model, optimizer)
    with shared_folder(world) as folder:
        path = save(CheckpointStore(folder), 1, model, optimizer, {})
        expected = {n: p.detach().clone() for n, p in model.named_parameters()}
        for reads_itself in (True, False):
            other, _ = across(5)
            with forced(same_files=reads_itself):
                report = init_from(other, path)
            assert not report.missing
            for name, parameter in other.named_parameters():
                assert torch.equal(parameter, expected[name]), name


@cells.add("each process quantizes the weights of its own stages, read by itself or sent")
def _quantized(world):
    if find_spec("bitsandbytes") is None:
        return

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, CLASSES))

    expected = quantize(build(9), "int8").state_dict()
    with shared_folder(world) as folder:
        path = folder / "base.safetensors"
        world.on_main(lambda: save_file(build(9).state_dict(), path))
        for reads_itself in (True, False):
            across = World.from_env(2, "cpu", timeout_s=60, engine="distributed")
            model = HybridModel.construct(lambda: quantize(build(5), "int8"), across, split=[2, 2])
            with forced(same_files=reads_itself):
                init_from(model, path)
            values = {n: v for n, v in model.net.state_dict().items() if not v.is_meta}
            mine = {name.partition(".")[0] for name in values}
            assert mine == ({"0", "1"} if across.pipeline_rank == 0 else {"2", "3"})
            for name, value in values.items():
                assert torch.equal(value, expected[name]), name


@cells.add("a save in the background has the state of its step, of every process")
def _background(world):
    model, optimizer = across()
    train(model, optimizer)
    gate, begun = threading.Event(), threading.Event()

    def slow(real, path, write):
        begun.set()
        assert gate.wait(60)
        return real(path, write)

    with shared_folder(world) as folder:
        foreground = save(CheckpointStore(folder / "one"), 1, model, optimizer, {})
        store = CheckpointStore(folder / "two", background=True)
        with finishing(store, world), writing(world, range(world.size), slow):
            path = save(store, 1, model, optimizer, {})
            assert begun.wait(60)
            train(model, optimizer, 2, seed=4)
            assert not store.steps()
            assert store.host_copies.nbytes < 0.8 * sum(
                tensor.nbytes
                for group in content(foreground)[0].values()
                for tensor in group.values()
            )
            gate.set()
            store.wait()
        assert_same_content(foreground, path)
        # the next one, whose copies take the same memory
        with finishing(store, world):
            path = save(store, 3, model, optimizer, {})
        assert_same_content(
            save(CheckpointStore(folder / "one", writers="rank0"), 3, model, optimizer, {}), path
        )


@cells.add("with private disks all cannot write, and rank 0 gathers")
def _private(world):
    model, optimizer = across()
    train(model, optimizer)
    with shared_folder(world) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_files, "_APPEARS_S", 0.1)
        own = folder / f"of_rank_{world.rank}"
        store = CheckpointStore(own, writers="all")
        missing = pytest.raises(CheckpointError, match=r"rank 1 on .*writers=rank0")
        with missing:
            save(store, 1, model, optimizer, {})
        with missing:  # before anything is trained
            Trainer(model, optimizer, F.cross_entropy, [], steps=1, store=store).fit()
        seen = save(CheckpointStore(folder / "seen", writers="all"), 1, model, optimizer, {})
        for background in (False, True):
            path = save(CheckpointStore(own, background=background), 1, model, optimizer, {})
            assert path == folder / "of_rank_0/step_00000001"
            assert_same_content(path, seen)
        world.gather(None)
        assert sorted(path.name for path in folder.iterdir()) == ["of_rank_0", "seen"]
        assert leftovers(folder / "of_rank_0") == []


@cells.add("a full disk of one process is known to all, and nothing is lost")
def _full(world):
    model, optimizer = across()
    with shared_folder(world) as folder:
        for background in (False, True):
            root = folder / str(background)
            store = CheckpointStore(root, background=background, keep=1)
            train(model, optimizer)
            first = save(store, 1, model, optimizer, {})
            if background:
                store.wait()
            before = content(first)[1]
            with writing(world, [1], full_disk):
                if background:
                    assert save(store, 2, model, optimizer, {}) is not None
                    with pytest.raises(NoSpaceError, match="step 2"):
                        store.wait()
                else:
                    assert save(store, 2, model, optimizer, {}, required=False) is None
                    with pytest.raises(NoSpaceError, match="step 2"):
                        save(store, 2, model, optimizer, {})
            assert store.steps() == [1]
            assert store.newest() == first
            assert content(first)[1] == before
            assert not leftovers(root)
            train(model, optimizer)
            with finishing(store, world):
                save(store, 3, model, optimizer, {})
            assert store.steps() == [3]
            world.gather(None)


@cells.add("an error of one process is one of all")
def _error(world):
    def broken(real, path, write):
        raise ZeroDivisionError("mine")

    model, optimizer = across()
    with shared_folder(world) as folder:
        for rank in range(2):
            store = CheckpointStore(folder)
            expected = ZeroDivisionError if world.rank == rank else RuntimeError
            with writing(world, [rank], broken), pytest.raises(expected, match="mine"):
                save(store, 1, model, optimizer, {})
            assert store.steps() == []
            assert leftovers(folder) == []
            world.gather(None)
        # not even the directory can be made
        (folder / "file").write_text("")
        store = CheckpointStore(folder / "file/root", writers="all")
        store.is_seen_by_all = lambda world: True
        with pytest.raises(CheckpointError, match="cannot save the checkpoint of step 1"):
            save(store, 1, model, optimizer, {})
        # a value that is not saved, of one process
        if world.rank == 1:
            optimizer.state[next(iter(model.parameters()))]["odd"] = object()
        for writers in ("rank0", "all"):
            with pytest.raises(CheckpointError, match=r"builtins\.object"):
                save(CheckpointStore(folder, writers=writers), 1, model, optimizer, {})


@cells.add("replicas that have the same each write a part of it")
def _replicas(world):
    model, optimizer = local()
    train(model, optimizer)
    with shared_folder(world) as folder:
        by_rank_0 = save(CheckpointStore(folder / "one"), 1, model, optimizer, {})
        assert (by_rank_0 / "model.safetensors").exists()
        store = CheckpointStore(folder / "all", background=True, writers="all")
        with finishing(store, world):
            by_all = save(store, 1, model, optimizer, {})
        assert_same_content(by_rank_0, by_all)
        held = world.gather(store.host_copies.nbytes)
        assert max(held) - min(held) <= 6 * 6 * 4  # of the largest tensor
        # each replica has other buffers by now
        assert_restores(by_all, local(1), world.broadcast(whole_state(model, optimizer)))


@cells.add("optimizer state that one replica has is written by that one")
def _owned_entries(world):
    model, optimizer = across()
    train(model, optimizer)
    with shared_folder(world) as folder:
        expected = save(CheckpointStore(folder / "whole"), 1, model, optimizer, {})
        for number, parameter in enumerate(model.parameters()):
            if number % model.world.data_parallel_size != model.world.data_parallel_rank:
                del optimizer.state[parameter]
        for writers in ("rank0", "all"):
            store = CheckpointStore(folder / writers, writers=writers)
            assert_same_content(expected, save(store, 1, model, optimizer, {}))


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
