"""The files of a checkpoint: any state survives, opens elsewhere, and damage is one clear error."""

import io
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model
from support.training import assert_same, rich_net, trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.checkpoint import restore_checkpoint as restore
from hybridtrain.checkpoint.json_tree import pack, unpack
from hybridtrain.checkpoint.manifest import MANIFEST, render_manifest
from hybridtrain.checkpoint.state import checkpoint_files
from hybridtrain.checkpoint.tensor_files import read_tensors, tensor_writers
from hybridtrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def write(folder, stem, tensors, **options):
    for name, writer in tensor_writers(stem, tensors, **options).items():
        with open(folder / name, "wb") as file:
            writer(file)


def hybrid(net):
    model = HybridModel(net, World.from_env(nb_part=1, devices="cpu"))
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    return model, torch.optim.SGD(parameters, lr=0.1)


# --- tensors --------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def test_tensors_of_any_dtype_shape_and_stride_are_read_back_bitwise(tmp_path):
    tensors = {}
    for dtype in DTYPES:
        values = torch.arange(12).to(torch.float32).to(dtype).reshape(3, 4)
        tensors[f"{dtype}.matrix"] = values
        tensors[f"{dtype}.scalar"] = values[1, 1].clone()
        tensors[f"{dtype}.empty"] = values[:0]
        tensors[f"{dtype}.transposed"] = values.t()
        tensors[f"{dtype}.sliced"] = values[:, 1:3]
    tensors["expanded"] = torch.ones(1).expand(3, 2)
    tensors["conjugate"] = torch.tensor([1 + 2j, 3j]).conj()
    tensors["imaginary"] = torch.tensor([1 + 2j, 3j]).conj().imag
    write(tmp_path, "model", tensors)
    found = read_tensors(tmp_path, "model")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tolist() == value.tolist(), name
    known = load_file(tmp_path / "model.safetensors")
    assert torch.equal(known["torch.bfloat16.transposed"], tensors["torch.bfloat16.transposed"])
    assert (os.stat(tmp_path / "model.safetensors").st_mode & 0o777) == 0o644


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, device="meta"), "no values yet"),
        (torch.eye(2).to_sparse(), r"layout torch\.sparse_coo"),
        (nn.LazyLinear(3).weight, "no values yet"),
    ],
    ids=["meta", "sparse", "lazy"],
)
def test_a_tensor_that_cannot_be_stored_is_refused_by_its_name(tensor, message):
    with pytest.raises(CheckpointError, match=rf"cannot save layer\.weight: .*{message}"):
        tensor_writers("model", {"layer.weight": tensor})


def test_a_tied_tensor_is_stored_once_and_read_under_all_its_names(tmp_path):
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    net[2].weight = net[0].weight
    write(tmp_path, "model", net.state_dict())
    assert "2.weight" not in load_file(tmp_path / "model.safetensors")
    found = read_tensors(tmp_path, "model")
    assert_same(found, net.state_dict(), "tied")
    assert found["2.weight"] is found["0.weight"]
    other = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    other[2].weight = other[0].weight
    load_model(other, tmp_path / "model.safetensors")  # safetensors' own
    assert_same(other.state_dict(), net.state_dict(), "load_model")


def test_overlapping_views_are_stored_apart(tmp_path):
    base = torch.arange(6.0)
    tensors = {"whole": base, "half": base[:3], "same": base[:3], "shaped": base.view(2, 3)}
    write(tmp_path, "model", tensors)
    found = read_tensors(tmp_path, "model")
    for name, value in tensors.items():
        assert torch.equal(found[name], value), name
    assert load_file(tmp_path / "model.safetensors").keys() == {"whole", "half", "shaped"}


def test_shards_have_the_names_and_the_index_of_the_hub(tmp_path):
    tensors = {f"layer.{i}.weight": torch.full((100,), float(i)) for i in range(5)}
    tensors["tied"] = tensors["layer.4.weight"]
    write(tmp_path, "model", tensors, shard_bytes=900)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == names
    assert index["metadata"]["total_size"] == 2000
    assert index["weight_map"]["layer.2.weight"] == names[1]
    assert_same(read_tensors(tmp_path, "model"), tensors, "shards")
    index["weight_map"]["layer.0.weight"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere\.safetensors'"):
        read_tensors(tmp_path, "model")


def test_a_checkpoint_in_shards_is_restored(tmp_path):
    ours = trainer(rich_net(), steps=2)
    ours.fit()
    files = checkpoint_files(ours.model, ours.optimizer, {"trainer": ours}, shard_bytes=500)
    path = CheckpointStore(tmp_path).save(2, files)
    assert len(list(path.glob("optimizer-*.safetensors"))) > 2
    other = trainer(plain_net_like(rich_net()), steps=2)
    other.resume(path)
    assert_same(other.model.state_dict(), ours.model.state_dict(), "weights")


def plain_net_like(net):
    for parameter in net.parameters():
        nn.init.uniform_(parameter)
    return net


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_transformers_opens_the_files_and_the_other_way_round(shard_bytes, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    net = transformers.GPT2LMHeadModel(config)
    (tmp_path / "ours").mkdir()
    write(tmp_path / "ours", "model", net.state_dict(), shard_bytes=shard_bytes)
    config.save_pretrained(tmp_path / "ours")
    theirs, found = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(found.values())
    assert_same(theirs.state_dict(), net.state_dict(), "from_pretrained")
    net.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    read = read_tensors(tmp_path / "theirs", "model")
    for name, value in read.items():
        assert torch.equal(value, net.state_dict()[name]), name


# --- other values ---------------------------------------------------------------------------------


def test_nested_values_come_back_with_their_types():
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    tree = {
        "numbers": [1, -(2**70), 0.1, math.inf, True, None, 1 + 2j],
        "tuple": (1, ("two", [3.0])),
        7: {"int key": b"\x00bytes", (1, 2): {3, 4}},
        "dtype": torch.bfloat16,
        "path": Path("a/b"),
        "array": array,
        "number": np.float32(0.1),
        "tensor": torch.tensor(3, dtype=torch.int16),
        "again": {"$tensor": "not one"},
        "empty": [{}, (), set()],
    }
    packed, tensors = pack("it", tree)
    found = unpack(json.loads(json.dumps(packed, allow_nan=False)), tensors)
    assert type(found["number"]) is np.float32
    assert found.pop("array").tolist() == array.tolist()
    expected = {key: value for key, value in tree.items() if key != "array"}
    assert found == expected
    assert type(found["numbers"][4]) is bool
    assert math.isnan(unpack(pack("it", [math.nan])[0], {})[0])


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, io.BytesIO(), np.array(["text", None], dtype=object)]
)
def test_a_value_that_would_need_a_pickle_is_refused_by_its_place(value):
    with pytest.raises(CheckpointError, match=r"cannot save ema: .* at a\.1"):
        pack("ema", {"a": [0, value]})


class Counting(nn.Module):
    """A layer with state that is not a tensor."""

    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    "extra",
    [
        {"calls": 3, "history": [torch.tensor([1.0, 2.0]), (1, "two")]},
        torch.arange(3),
        None,
        17,
        b"bytes",
    ],
    ids=["dict", "tensor", "none", "number", "bytes"],
)
def test_extra_state_of_any_value_is_saved_and_restored(extra, tmp_path):
    model, optimizer = hybrid(nn.Sequential(Counting(extra), nn.Linear(2, 2)))
    path = CheckpointStore(tmp_path).save(1, checkpoint_files(model, optimizer, {}))
    start = torch.zeros(1) if isinstance(extra, torch.Tensor) else "other"
    other, optimizer = hybrid(nn.Sequential(Counting(start), nn.Linear(2, 2)))
    restore(path, other, optimizer)
    found = other.net[0].extra
    if isinstance(extra, dict):
        assert torch.equal(found["history"].pop(0), torch.tensor([1.0, 2.0]))
        assert found == {"calls": 3, "history": [(1, "two")]}
    else:
        assert torch.equal(found, extra) if isinstance(extra, torch.Tensor) else found == extra


def test_a_model_without_the_extra_state_of_the_checkpoint_is_refused_by_its_name(tmp_path):
    path = CheckpointStore(tmp_path).save(
        1, checkpoint_files(*hybrid(nn.Sequential(Counting(3))), {})
    )
    with pytest.raises(CheckpointError, match=r"the model has no 0\._extra_state"):
        restore(path, hybrid(nn.Sequential(nn.Linear(2, 2, bias=False)))[0])


# --- states of a trainer --------------------------------------------------------------------------


class Stream:
    """The state of an iterable loader: plain values, a numpy generator and a buffer of samples."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)
        self.buffer = [torch.tensor([seed])]
        self.seen = {0: seed}

    def draw(self):
        self.buffer = [*self.buffer[-2:], torch.from_numpy(self.generator.normal(size=2))]
        self.seen[len(self.seen)] = self.generator.integers(9)

    def state_dict(self):
        return {
            "rng": self.generator.bit_generator.state,
            "buffer": self.buffer,
            "seen": self.seen,
        }

    def load_state_dict(self, saved):
        self.generator.bit_generator.state = saved["rng"]
        self.buffer, self.seen = list(saved["buffer"]), saved["seen"]


def with_states(net, **options):
    """Returns a trainer with a moving average and a stream, which follow every step."""
    ours = trainer(net, **options)
    ema = AveragedModel(ours.model.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ours.states = {"ema": ema, "stream": Stream(options.get("batch_size", 4))}
    record = ours.recorder.on_step

    def after_step(run, samples):
        record(run, samples)
        ema.update_parameters(ours.model.net)
        ours.states["stream"].draw()

    ours.recorder.on_step = after_step
    return ours


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.quick_cases(1)
def test_a_moving_average_and_a_stream_resume_bitwise(background, tmp_path):
    whole = with_states(rich_net())
    whole.fit()
    store = CheckpointStore(tmp_path, background=background)
    first = with_states(rich_net(), store=store, checkpoint_every_steps=2)
    first.total_steps = 5
    first.fit()
    again = with_states(plain_net_like(rich_net()), store=store)
    again.resume(store.newest())
    again.fit()
    ours, theirs = (t.states["ema"].state_dict() for t in (again, whole))
    assert_same(ours, theirs, "ema")
    assert not torch.equal(theirs["module.0.weight"], whole.model.state_dict()["0.weight"])
    assert_same(again.model.state_dict(), whole.model.state_dict(), "weights")
    streams = [t.states["stream"].state_dict() for t in (again, whole)]
    assert streams[0]["seen"] == streams[1]["seen"]
    assert streams[0]["rng"] == streams[1]["rng"]
    for one, other in zip(streams[0]["buffer"], streams[1]["buffer"], strict=True):
        assert torch.equal(one, other)
    assert load_file(tmp_path / "step_00000009" / "ema.safetensors").keys() == theirs.keys()


def test_a_state_that_the_checkpoint_lacks_is_named(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    trainer(steps=1, store=store).fit()
    with pytest.raises(CheckpointError, match="no state 'ema'"):
        trainer(steps=1, states={"ema": Stream(0)}).resume(store.newest())
    other = trainer(steps=2, states={"stream": Stream(0)}, store=store)
    other.fit()
    trainer(steps=2).resume(store.newest())
    assert "stream.json of the checkpoint" in caplog.text


@pytest.mark.parametrize("name", ["model", "state", "../up", ".hidden", "a b"])
def test_a_state_cannot_have_the_name_of_another_file(name, tmp_path):
    ours = trainer(steps=1, states={name: Stream(0)}, store=CheckpointStore(tmp_path))
    with pytest.raises(ValueError, match=r"states= has the name"):
        ours.fit()


# --- what a checkpoint may not be ----------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    store = CheckpointStore(tmp_path_factory.mktemp("saved"))
    ours = trainer(steps=3, lr=lambda o: torch.optim.lr_scheduler.StepLR(o, 2), store=store)
    ours.fit()
    return store.newest()


def test_a_run_shorter_than_its_checkpoint_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"step 3, .*steps=2"):
        trainer(steps=2).resume(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_link_inside_a_checkpoint_is_refused(name, saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "linked")
    shutil.move(path / name, tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is a symbolic link"):
        trainer(steps=5).resume(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(name, saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "forged")
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["crc32"]
    manifest["files"][name] = {"size": 1, "crc32": "0"}
    (path / MANIFEST).write_bytes(render_manifest(manifest))
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        trainer(steps=5).resume(path)
