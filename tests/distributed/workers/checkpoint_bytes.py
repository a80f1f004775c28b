"""The bytes of checkpoints made from fixed values: they change with no version of this project.

`WRITE_CHECKPOINT_BYTES=1 pytest tests/distributed/test_checkpoint_bytes.py` writes down new ones.
"""

import gc
import hashlib
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from support.launch import Cells
from support.nets import CLASSES, classification
from torch import nn
from torch.nn import functional as F

import hybridtrain.smp as smp
from hybridtrain import HybridModel, ShardedOptimizer, World
from hybridtrain.checkpoint import CheckpointStore, state
from hybridtrain.checkpoint import finishing_saves as finishing
from hybridtrain.checkpoint import save_checkpoint as save
from hybridtrain.smp import runtime

torch.set_num_threads(1)
cells = Cells()
EXPECTED = Path(__file__).parent.with_name("checkpoint_bytes.json")


class Extra(nn.Linear):
    """A layer with a state that is not a tensor, but holds one."""

    def get_extra_state(self):
        return {"count": 3, "table": torch.arange(4.0)}

    def set_extra_state(self, state):
        pass


class Given:
    """A state as it is given."""

    def __init__(self, **content):
        self.content = content

    def state_dict(self):
        return self.content


def make():
    """A weight in two stages under two names, buffers, other state, tensors of several dtypes."""
    net = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), Extra(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
    )
    net[3].weight = net[0].weight
    net[4].register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
    net.register_buffer("of_no_stage", torch.zeros(2, dtype=torch.bfloat16))
    return net


def groups_of(model):
    """Two groups in another order than the model's."""
    named = list(model.named_parameters())[::-1]
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")]},
    ]


@torch.no_grad()
def fill(model, optimizer, own_buffers=True):
    """Takes a step, so that the optimizer has a state, and then sets all values by their names."""
    batch = classification(8, 1)
    model.train_step(*batch, F.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        tensors[name] = buffer
        if own_buffers:
            tensors[f"{name}{model.world.data_parallel_rank}"] = (
                buffer  # which replicas may have of their own
            )
    for parameter, entry in optimizer.state.items():
        tensors |= {f"{names[id(parameter)]}.{key}": value for key, value in entry.items()}
    for name, value in tensors.items():
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2])
        value.copy_((torch.arange(value.numel()) + start).reshape(value.shape) / 64)


def across(**options):
    world = World.from_env(2, "cpu", timeout_s=60, engine="distributed")
    return HybridModel(make(), world, split=[3, 2], chunks=2, **options)


def local(world=None, **options):
    return HybridModel(make(), world or World.from_env(1, "cpu", timeout_s=60), chunks=2, **options)


def trained(model):
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1)
    fill(model, optimizer)
    return model, optimizer


@contextmanager
def shared_folder(world):
    with tempfile.TemporaryDirectory() as folder:
        yield Path(world.broadcast(folder))
        world.gather(None)  # nobody reads any more


@contextmanager
def fixed_version():
    """The one value in a checkpoint that is of the machine."""
    before, torch.__version__ = torch.__version__, "2.0"
    yield
    torch.__version__ = before


def check(world, form, path):
    """Compares the hash of each file with the one that is written down."""
    if not world.is_main:
        return
    found = {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in sorted(path.iterdir())
    }
    form = f"{form}, {world.size} processes"
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    if os.environ.get("WRITE_CHECKPOINT_BYTES"):
        EXPECTED.write_text(json.dumps({**known, form: found}, indent=1, sort_keys=True) + "\n")
    else:
        assert found == known[form], form


def saved(world, form, model, optimizer, **options):
    ema = [torch.arange(3.0), torch.arange(5)]
    states = {"ema": Given(first=ema[0], again=ema[0], other=ema[1], rate=0.5), "plain": Given(n=1)}
    progress = {"one": Given(step=7, epoch=2), "two": Given(loss=0.25)}
    with shared_folder(world) as folder, fixed_version():
        store = CheckpointStore(folder, **options)
        with finishing(store, world):
            path = save(store, 7, model, optimizer, progress, states)
        check(world, form, path)


@cells.add("rank 0 alone")
def _alone(world):
    model, optimizer = trained(local())
    for background in (False, True):
        saved(world, "alone", model, optimizer, background=background)
    # in shards, by the function for one process
    model, optimizer = trained(local(World()))
    with shared_folder(world) as folder, fixed_version():
        if world.is_main:
            files = state.checkpoint_files(
                model, optimizer, {}, {"ema": {"a": [1.5]}}, shard_bytes=400
            )
            check(world, "shards", CheckpointStore(folder).save(1, files))


@cells.add("rank 0, gathered from the others")
def _gathered(world):
    saved(world, "gathered", *trained(across()), writers="rank0")


@cells.add("each process its share")
def _joint(world):
    model, optimizer = trained(across())
    for background in (False, True):
        saved(world, "joint", model, optimizer, background=background)
    model, optimizer = trained(local())
    for background in (False, True):
        saved(world, "joint replicas", model, optimizer, background=background, writers="all")


@cells.add("a sharded optimizer")
def _sharded(world):
    model = local(shard="optimizer")
    optimizer = ShardedOptimizer(
        model, lambda groups: torch.optim.AdamW(groups, lr=0.1), groups_of(model)
    )
    fill(model, optimizer)
    saved(world, "sharded, joint", model, optimizer)
    saved(world, "sharded, gathered", model, optimizer, writers="rank0")


@smp.step
def train_step(model, x, y):
    model.backward(F.cross_entropy(model(x), y))


@cells.add("a script of smp")
def _smp(world):
    for sharded in (False, True):
        for degree in (1, 2):
            runtime._runtime = None
            gc.collect()
            config = {"pipeline_parallel_degree": degree, "microbatches": 2}
            smp.init({**config, "shard_optimizer_state": sharded, "fp16": degree == 2})
            model = smp.DistributedModel(make())
            optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model), lr=0.1))
            train_step(model, *classification(8, 1))
            optimizer.step()
            hybrid = model.partitioned_hybrid()
            hybrid.train_step = lambda *_: None
            fill(hybrid, optimizer)
            del hybrid.train_step
            with shared_folder(world) as folder, fixed_version():
                form = f"smp, {degree} stages{', sharded' * sharded}"
                content = {"seen": 5, "table": torch.arange(3)}
                smp.save_checkpoint(folder / "a", "a", True, model, optimizer, content)
                check(world, form, folder / "a/step_00000001")
                smp.save_checkpoint(folder / "b", "b", True, model)
                check(world, f"{form}, no optimizer", folder / "b/step_00000001")
                states = {
                    "whole": optimizer.state_dict(),
                    "local": optimizer.local_state_dict(),
                    "model": model.state_dict(),
                    "local_model": model.local_state_dict(),
                }
                if world.is_main:
                    (folder / "states").mkdir()
                    for name, value in states.items():
                        (folder / "states" / name).write_text(described(value))
                check(world, f"{form}, states", folder / "states")


def described(value):
    """A text with the order of keys and all values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {described(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(described, value)) + "]"
    return repr(value)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
