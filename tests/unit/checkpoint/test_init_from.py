"""Initial weights from elsewhere: every kind of source, and what does not fit."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from support.training import assert_same, plain_net, trainer
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint import CheckpointStore, init_from, parse_init_from
from hybridtrain.checkpoint.tensor_files import tensor_writers
from hybridtrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def fresh(net=None):
    """Returns a model with other values than those that are loaded."""
    net = net or plain_net()
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    return HybridModel(net, World.from_env(nb_part=1, devices="cpu"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with checkpoints of steps 1 to 3; 2 is the best."""
    folder = tmp_path_factory.mktemp("run")
    store = CheckpointStore(folder / "checkpoints")
    trainer(steps=3, checkpoint_every_steps=1, store=store).fit()
    store.mark_best(2, 0.5)
    return folder


@pytest.fixture(scope="module")
def weights(run):
    return load_file(run / "checkpoints" / "step_00000003" / "model.safetensors")


def sources(folder, weights, run):
    """Returns what a user has, by kind."""
    save_file(weights, folder / "weights.safetensors")
    torch.save(weights, folder / "weights.pt")
    torch.save(weights, folder / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": weights, "epoch": 3}, folder / "lightning.ckpt")
    torch.save({"model": weights, "optimizer": {}}, folder / "both.pth")
    (folder / "hub").mkdir()
    for name, write in tensor_writers("model", weights, shard_bytes=300).items():
        with open(folder / "hub" / name, "wb") as file:
            write(file)
    (folder / "hub" / "config.json").write_text("{}")
    (folder / "linked").mkdir()  # as in the Hub's cache
    (folder / "linked" / "model.safetensors").symlink_to(folder / "weights.safetensors")
    (folder / "single").mkdir()
    shutil.copy(folder / "weights.pt", folder / "single" / "pytorch_model.bin")
    return [
        *(folder / n for n in ("weights.safetensors", "weights.pt", "old.bin", "lightning.ckpt")),
        *(folder / n for n in ("both.pth", "hub", "linked", "single")),
        run,
        run / "checkpoints",
        run / "checkpoints" / "step_00000003",
    ]


def test_weights_come_from_every_kind_of_source(tmp_path, weights, run):
    for source in sources(tmp_path, weights, run):
        model = fresh()
        report = init_from(model, str(source))
        assert_same(model.state_dict(), weights, str(source))
        assert not report.problems()
        assert len(report.loaded) == len(weights)


def test_the_best_checkpoint_of_a_run_is_taken_if_asked_for(run):
    model = fresh()
    init_from(model, run, best=True)
    best = load_file(run / "checkpoints" / "step_00000002" / "model.safetensors")
    assert_same(model.state_dict(), best, "best")


def other_head():
    return nn.Sequential(*list(plain_net())[:4], nn.Linear(8, 7), nn.Linear(7, 2))


def test_a_strict_load_names_what_does_not_fit_and_changes_nothing(run, weights):
    model = fresh(other_head())
    with pytest.raises(CheckpointError) as caught:
        init_from(model, run)
    assert "it lacks 5.weight; it lacks 5.bias" in str(caught.value)
    assert "4.bias is [3] in the source and [7] in the model" in str(caught.value)
    assert "pass strict=False" in str(caught.value)
    assert all(p.eq(0.5).all() for p in model.parameters())


def test_a_lenient_load_takes_the_rest_and_reports(run, weights, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_file({**weights, "extra.bias": torch.ones(1)}, tmp_path / "more.safetensors")
    model = fresh(other_head())
    report = init_from(model, tmp_path / "more.safetensors", strict=False)
    assert sorted(report.loaded) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert report.missing == ("5.weight", "5.bias")
    assert report.unexpected == ("extra.bias",)
    assert sorted(report.reshaped) == [
        "4.bias is [3] in the source and [7] in the model",
        "4.weight is [3, 8] in the source and [7, 8] in the model",
    ]
    for name in report.loaded:
        assert torch.equal(model.state_dict()[name], weights[name])
    assert model.net[4].weight.eq(0.5).all()
    assert "4 tensors loaded" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}, "strict=False accepts it"
    assert "missing: 5.weight, 5.bias" in caplog.text


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_names_of_wrapped_models_are_matched_and_reported(prefix, weights, tmp_path):
    save_file({f"{prefix}{name}": v for name, v in weights.items()}, tmp_path / "w.safetensors")
    model = fresh()
    report = init_from(model, tmp_path / "w.safetensors")
    assert_same(model.state_dict(), weights, prefix)
    assert "module." in report.prefix or "_orig_mod." in report.prefix
    assert report.prefix in str(report)


def tied():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize("left_out", ["0.weight", "2.weight"])
def test_a_tied_tensor_needs_one_of_its_names(left_out, tmp_path):
    net = tied()
    save_model(net, tmp_path / "model.safetensors")
    state = {n: v.clone() for n, v in net.state_dict().items() if n != left_out}
    save_file(state, tmp_path / "one.safetensors")
    for name in ("model.safetensors", "one.safetensors"):
        model = fresh(tied())
        report = init_from(model, tmp_path / name)
        assert report.missing == ()
        assert_same(model.state_dict(), net.state_dict(), name)
        assert model.net[2].weight is model.net[0].weight


class Harmful:
    def __reduce__(self):
        return print, ("code ran",)


def test_a_wrong_source_is_one_clear_error(tmp_path, capfd, weights, run):
    (tmp_path / "text.safetensors").write_text("not tensors")
    (tmp_path / "text.pt").write_text("not tensors")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "empty").mkdir()
    torch.save(3, tmp_path / "number.pt")
    torch.save({"weights": Harmful()}, tmp_path / "harmful.pt")
    save_file({"nothing.alike": torch.ones(1)}, tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(
        (run / "checkpoints/step_00000003/model.safetensors").read_bytes()[:-4]
    )
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    for name, message in {
        "text.safetensors": "not a readable safetensors file",
        "cut.safetensors": "not a readable safetensors file",
        "text.pt": "init_from=.*text.pt is not a torch.save file",
        "empty.pt": "is not a torch.save file: EOFError",
        "notes.txt": r"notes.txt is not .*\.safetensors",
        "empty": "not a checkpoint, a run or a folder of the Hub",
        "number.pt": "number.pt has no tensors",
        "harmful.pt": r"harmful.pt .*state_dict\(\)",
        "other.safetensors": "other.safetensors has no tensor of the model.* nothing.alike",
        "hub": "gone.safetensors is missing",
        "nowhere": "no such file or directory",
    }.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            init_from(fresh(), tmp_path / name, strict=False)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="no checkpoint is marked as the best"):
        init_from(
            fresh(),
            shutil.copytree(run, tmp_path / "run", ignore=lambda *_: ["best.json"]),
            best=True,
        )
    assert "code ran" not in capfd.readouterr().out


def test_the_setting_is_a_path_or_a_mapping():
    assert parse_init_from(None) is None
    assert parse_init_from("a.pt") == {"source": "a.pt"}
    given = {"path": "runs/one", "strict": False, "best": True}
    assert parse_init_from(given) == {"source": "runs/one", "strict": False, "best": True}
    for wrong in (3, "", {}, {"path": 3}, {"path": "a", "strit": True}, {"path": "a", "best": 1}):
        with pytest.raises(CheckpointError, match="must be a path, or a mapping such as"):
            parse_init_from(wrong)
    with pytest.raises(
        CheckpointError, match=r"init_from.path is not set: .* such as model.source="
    ):
        parse_init_from({"path": None, "strict": False})


@pytest.mark.parametrize("source", ["without a head", "of another head", "old names"])
@pytest.mark.quick_cases(1)
def test_the_body_of_a_transformer_is_loaded_under_the_names_of_any_of_its_models(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    torch.manual_seed(2)
    other = transformers.BertForMaskedLM(config)
    body = other.bert.state_dict()
    if source == "old names":  # as bert-base-uncased on the Hub has them
        renamed = {
            name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
            for name, value in other.state_dict().items()
        }
        (tmp_path / "bert").mkdir()
        save_file({n: v.clone() for n, v in renamed.items()}, tmp_path / "bert/model.safetensors")
    else:
        (other.bert if source == "without a head" else other).save_pretrained(tmp_path / "bert")
    model = HybridModel(
        transformers.BertForSequenceClassification(config),
        World.from_env(nb_part=1, devices="cpu"),
        example_inputs={"input_ids": torch.ones(2, 3, dtype=torch.int64)},
    )
    report = init_from(model, tmp_path / "bert", strict=False)
    heads = ("classifier.", "bert.pooler.")  # a masked language model has no pooler
    assert all(name.startswith(heads) for name in report.missing)
    assert report.reshaped == ()
    state = model.state_dict()
    for name, value in body.items():
        assert torch.equal(state[f"bert.{name}"], value), name


@pytest.mark.thorough
def test_a_model_without_a_head_takes_the_body_of_one_with_a_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    whole, body = transformers.GPT2LMHeadModel(config), transformers.GPT2Model(config)
    example = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    world = World.from_env(nb_part=1, devices="cpu")
    whole.save_pretrained(tmp_path / "whole")
    report = init_from(HybridModel(body, world, example_inputs=example), tmp_path / "whole")
    assert report.missing == ()
    assert_same(body.state_dict(), whole.transformer.state_dict(), "the body")


def test_the_weights_of_a_name_on_the_hub_are_fetched_without_files_that_run_code(
    tmp_path, weights, monkeypatch
):
    hub = pytest.importorskip("huggingface_hub")
    save_file(weights, tmp_path / "model.safetensors")
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "me/nothing":
            raise OSError("404\nwith details")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    model = fresh()
    init_from(model, "me/my-model")
    assert_same(model.state_dict(), weights, "of the Hub")
    assert asked == [("me/my-model", ["*.safetensors*"])]
    with pytest.raises(CheckpointError, match=r"init_from=me/nothing.*the Hub \(OSError: 404\)$"):
        init_from(model, "me/nothing")
    for place in ("./nowhere", "a/b/c", "weights.pt"):
        with pytest.raises(CheckpointError, match=r"no such file or directory$"):
            init_from(model, place)
    assert len(asked) == 2


def test_folders_of_other_libraries_are_read_as_they_are(tmp_path, weights):
    accelerate = tmp_path / "accelerate" / "checkpoints"
    for number in (2, 10):  # not in the order of their names
        (accelerate / f"checkpoint_{number}").mkdir(parents=True)
        torch.save(
            {name: value + number for name, value in weights.items()},
            accelerate / f"checkpoint_{number}" / "pytorch_model.bin",
        )
        torch.save({"lr": 1}, accelerate / f"checkpoint_{number}" / "optimizer.bin")
    names = list(weights)
    torchtune = tmp_path / "torchtune" / "epoch_0"
    torchtune.mkdir(parents=True)
    shards = {"model-00001-of-00002.bin": names[:2], "model-00002-of-00002.bin": names[2:]}
    for file, part in shards.items():
        torch.save({name: weights[name] for name in part}, torchtune / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = torchtune / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"recipe": 1}, torchtune / "recipe_state.pt")
    for folder, added in (("accelerate", 10), ("torchtune", 0)):
        model = fresh()
        init_from(model, tmp_path / folder)
        state = model.net.state_dict()
        assert all(torch.equal(state[name], value + added) for name, value in weights.items())
    weight_map[names[0]] = "../accelerate/other.bin"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"'../accelerate/other.bin'"):
        init_from(fresh(), torchtune)


def test_a_prefix_chooses_the_part_of_a_larger_module(tmp_path, weights):
    lightning = {f"net.{name}": value for name, value in weights.items()}
    torch.save(
        {"state_dict": {**lightning, "criterion.weight": torch.ones(2)}, "epoch": 1},
        tmp_path / "last.ckpt",
    )
    with pytest.raises(CheckpointError, match=r"last.ckpt .* prefix="):
        init_from(fresh(), tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"'model\.'.*criterion\., net\."):
        init_from(fresh(), tmp_path / "last.ckpt", prefix="model.")
    model = fresh()
    init_from(model, tmp_path / "last.ckpt", prefix="net.")
    state = model.net.state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    assert parse_init_from({"path": "a.ckpt", "prefix": "net."}) == {
        "source": "a.ckpt",
        "prefix": "net.",
    }
