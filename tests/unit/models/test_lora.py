"""LoRA: an adapter trained in stages is the one that plain PEFT trains."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import installed
from support.compare import cpu_world
from support.small_hub import write_llama
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel
from hybridtrain._base.adapter import adapter_of
from hybridtrain.checkpoint import CheckpointStore, init_from, restore_checkpoint, save_checkpoint
from hybridtrain.data import TrainLoader
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.loop import Trainer, TrainerOptions
from hybridtrain.loop.callbacks import EMA
from hybridtrain.loss import cross_entropy
from hybridtrain.models import lora, transformers_model

peft = installed("peft")
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LAST = "model.layers.2.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a small Llama with 3 layers."""
    folder = tmp_path_factory.mktemp("hub") / "llama"
    write_llama(folder)
    return folder


def llama(base, dtype="float32", **settings):
    """The model with other weights than the base's, and an adapter that changes its output."""
    torch.manual_seed(7)
    net = transformers_model(source=str(base), task="causal_lm", attention="eager", dtype=dtype)
    net = lora(net, rank=4, **settings) if settings.pop("adapted", True) else net
    return net.train()


def with_values(net):
    """Gives the adapter, which begins as zero, an effect."""
    draws = torch.Generator().manual_seed(3)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=draws)
    return net


def batch(samples=4, tokens=12):
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(7, 21, (samples, tokens), generator=draws)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids.roll(-1, 1)


def staged(net, nb_part=2, **options):
    inputs, _ = batch()
    options = {"chunks": 2, "split": "uniform", **options}
    return HybridModel(net, cpu_world(nb_part), example_inputs=inputs, **options)


def plain_peft(base, state, **settings):
    """Returns plain PEFT around the base, with the values of an adapter."""
    from transformers import LlamaForCausalLM

    net = LlamaForCausalLM.from_pretrained(base, attn_implementation="eager")
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    net = peft.get_peft_model(net, config).train()
    own = net.state_dict()
    own.update(
        {f"base_model.model.{name}": v.clone() for name, v in state.items() if "lora" in name}
    )
    net.load_state_dict(own)
    return net


def trained(parameters):
    return {name: p.detach().clone() for name, p in parameters if p.requires_grad}


@pytest.mark.parametrize(
    ("nb_part", "settings", "options"),
    [
        pytest.param(2, {}, {}, id="1f1b"),
        pytest.param(3, {"targets": [LAST]}, {"schedule": "zb-h1"}, id="frozen-stages"),
        pytest.param(2, {"dora": True}, {}, id="dora"),
        pytest.param(2, {"targets": "all-linear"}, {"recompute": "always"}, id="all-linear"),
        pytest.param(2, {"modules_to_save": ["lm_head"]}, {"schedule": "zb-h1"}, id="whole-module"),
    ],
)
@pytest.mark.quick_cases("frozen-stages")
def test_steps_in_stages_train_the_adapter_of_plain_peft_and_nothing_else(
    base, nb_part, settings, options
):
    model = staged(llama(base, **settings), nb_part, **options)
    init_from(model, base)
    with_values(model.net)
    named = {"targets": "target_modules", "dora": "use_dora"}
    state = {**model.net.state_dict()}
    plain = plain_peft(base, state, **{named.get(k, k): v for k, v in settings.items()})
    frozen = {n: p.clone() for n, p in model.net.named_parameters() if not p.requires_grad}
    inputs, targets = batch()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for _ in range(3):
        loss = model.train_step(inputs, targets, cross_entropy).loss
        expected = cross_entropy(plain(**inputs), targets)
        expected.backward()
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours = trained(model.net.named_parameters())
    theirs = trained(plain.named_parameters())
    assert {f"base_model.model.{name}" for name in ours} == set(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[f"base_model.model.{name}"], rtol=1e-4, atol=1e-6)
    for name, value in frozen.items():
        assert torch.equal(value, dict(model.net.named_parameters())[name])
    assert {id(p) for p in optimizers[0].state} == {
        id(p) for p in model.net.parameters() if p.requires_grad
    }


WIDE = {"targets": ["0", "2"], "modules_to_save": ["4"]}


def plain_net(seed=7, **settings):
    """A chain with an adapter, and other weights than those of `wide`."""
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    net = nn.Sequential(*layers)
    return lora(net, rank=2, **settings) if settings else net


@pytest.fixture
def wide(tmp_path):
    """The file of a base."""
    save_file(plain_net(seed=0).state_dict(), tmp_path / "wide.safetensors")
    return str(tmp_path / "wide.safetensors")


def chain(nb_part=2, **settings):
    return HybridModel(plain_net(**{**WIDE, **settings}), cpu_world(nb_part), chunks=2)


def one_step(model, optimizer):
    torch.manual_seed(1)
    model.train_step(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]), cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


def trained_names(model):
    return {name for name, p in model.net.named_parameters() if p.requires_grad}


def assert_same_state(one, other):
    state = other.net.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in one.net.state_dict().items())


def test_a_checkpoint_has_the_adapter_alone_and_any_split_finds_its_base_again(wide, tmp_path):
    model = chain(dora=True)
    init_from(model, wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    store = CheckpointStore(tmp_path / "saved")
    path = save_checkpoint(store, 1, model, optimizer, {}, {})
    names = trained_names(model)
    assert set(load_file(path / "model.safetensors")) == names
    again = chain(nb_part=3, dora=True)
    optimizer_again = torch.optim.AdamW(again.parameters(), lr=0.1)
    restore_checkpoint(path, again, optimizer_again)
    assert_same_state(model, again)
    for each in ((model, optimizer), (again, optimizer_again)):
        one_step(*each)
    assert_same_state(model, again)
    # and what is saved from there has the same base
    saved = save_checkpoint(store, 2, again, None, {}, {})
    assert set(load_file(saved / "model.safetensors")) == names


def test_a_checkpoint_of_a_base_that_is_gone_or_has_changed_is_refused(wide, tmp_path):
    model = chain()
    init_from(model, wide)
    path = save_checkpoint(CheckpointStore(tmp_path / "saved"), 1, model, None, {}, {})
    save_file(plain_net(seed=1).state_dict(), wide)
    with pytest.raises(CheckpointError) as changed:
        restore_checkpoint(path, chain())
    Path(wide).unlink()
    with pytest.raises(CheckpointError) as gone:
        restore_checkpoint(path, chain())
    for error in (changed, gone):
        assert all(name in str(error.value) for name in (str(path), wide, "init_from="))


def test_a_base_that_was_moved_is_found_where_init_from_loaded_it(wide, tmp_path):
    model = chain()
    init_from(model, wide)
    one_step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    store = CheckpointStore(tmp_path / "saved")
    path = save_checkpoint(store, 1, model, None, {}, {})
    moved = str(tmp_path / "moved.safetensors")
    Path(wide).rename(moved)
    again = chain(nb_part=3)
    init_from(again, moved)
    restore_checkpoint(path, again)
    assert_same_state(model, again)
    # what is saved from there names the new place
    newer = save_checkpoint(store, 2, again, None, {}, {})
    restore_checkpoint(newer, last := chain())
    assert_same_state(model, last)

    other = str(tmp_path / "other.safetensors")
    save_file(plain_net(seed=1).state_dict(), other)
    init_from(again := chain(), other)
    with pytest.raises(CheckpointError) as refused:
        restore_checkpoint(path, again)
    assert all(name in str(refused.value) for name in (str(path), wide, other))


def test_an_adapter_without_a_source_of_its_base_is_saved_with_all_weights(tmp_path):
    model = chain()
    path = save_checkpoint(CheckpointStore(tmp_path), 1, model, None, {}, {})
    assert set(load_file(path / "model.safetensors")) == set(model.net.state_dict())


def test_weights_that_were_trained_at_any_time_are_saved(wide, tmp_path):
    model = chain()
    init_from(model, wide)
    freed = dict(model.net.named_parameters())["0.base_layer.weight"]
    freed.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    freed.requires_grad_(False)
    path = save_checkpoint(CheckpointStore(tmp_path), 1, model, optimizer, {}, {})
    again = chain()
    restore_checkpoint(path, again, None)
    assert_same_state(model, again)


def test_a_new_run_may_begin_with_the_adapter_of_another(wide, tmp_path):
    first = chain(dora=True)
    init_from(first, wide)
    one_step(first, torch.optim.AdamW(first.parameters(), lr=0.1))
    path = save_checkpoint(CheckpointStore(tmp_path / "saved"), 1, first, None, {}, {})
    second = chain(dora=True)
    init_from(second, path)
    assert_same_state(first, second)
    assert second.base.source == wide


def test_an_average_is_of_the_adapter_alone(wide):
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)
    average = EMA()
    trainer = Trainer(
        model,
        optimizer,
        cross_entropy,
        TrainLoader(data, 4, model.world),
        TrainerOptions(steps=2),
        callbacks=[average],
    )
    init_from(model, wide)
    trainer.fit()
    assert set(average.average()) == trained_names(model)


def without(path, *layers):
    """Rewrites the file of a base without these layers."""
    weights = load_file(path)
    save_file({n: v for n, v in weights.items() if n.partition(".")[0] not in layers}, path)


@pytest.mark.parametrize("saved", [["4"], ["2", "4"]], ids=["head", "two-modules"])
def test_a_module_that_a_base_lacks_starts_fresh_where_it_is_trained(wide, tmp_path, saved):
    without(wide, *saved)
    model = chain(targets=["0"], modules_to_save=saved)
    report = init_from(model, wide, strict=False)
    assert set(report.missing) == {
        f"{layer}.modules_to_save.default.{kind}" for layer in saved for kind in ("weight", "bias")
    }
    one_step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    path = save_checkpoint(CheckpointStore(tmp_path / "saved"), 1, model, None, {}, {})
    again = chain(nb_part=3, targets=["0"], modules_to_save=saved)
    restore_checkpoint(path, again)
    state = again.net.state_dict()
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_what_a_base_lacks_must_be_trained(wide):
    without(wide, "2", "4")
    with pytest.raises(CheckpointError) as refused:
        init_from(chain(modules_to_save=["4"], targets=["0"]), wide, strict=False)
    assert all(name in str(refused.value) for name in (wide, "layer 2:", "modules_to_save=[2,4]"))
    assert "original_module" not in str(refused.value)


@pytest.mark.parametrize("dora", [False, True])
def test_the_first_magnitudes_and_whole_modules_are_those_of_the_base(wide, dora):
    model = chain(dora=dora)
    init_from(model, wide)
    net = plain_net()
    net.load_state_dict(load_file(wide))
    named = {"target_modules": WIDE["targets"], "modules_to_save": WIDE["modules_to_save"]}
    config = peft.LoraConfig(r=2, lora_alpha=4, use_dora=dora, **named)
    theirs = peft.get_peft_model(net, config).state_dict()
    for name, value in model.net.state_dict().items():
        if "lora_A" not in name:  # drawn
            assert torch.equal(value, theirs[f"base_model.model.{name}"]), name


@pytest.mark.thorough
def test_an_adapter_in_float32_trains_on_a_base_in_bfloat16(base):
    model = staged(llama(base, dtype="bfloat16"))
    init_from(model, base)
    dtypes = {(p.dtype, p.requires_grad) for p in model.net.parameters()}
    assert dtypes == {(torch.bfloat16, False), (torch.float32, True)}
    inputs, targets = batch()
    loss = model.train_step(inputs, targets, cross_entropy).loss
    assert torch.isfinite(loss)


def test_merged_weights_are_those_of_plain_peft(wide):
    model = chain()
    init_from(model, wide)
    one_step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    net = plain_net()
    net.load_state_dict(load_file(wide))
    named = {"target_modules": WIDE["targets"], "modules_to_save": WIDE["modules_to_save"]}
    plain = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=4, **named))
    state = {f"base_model.model.{name}": v for name, v in model.net.state_dict().items()}
    plain.load_state_dict(state)
    expected = plain.merge_and_unload().state_dict()
    merged = adapter_of(model.net).merged(copy.deepcopy(model.net)).state_dict()
    assert list(merged) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0 must be a number of at least 1"),
        ({"rank": 2.5}, "rank=2.5 must be a whole number"),
        ({"dropout": 1.0}, "dropout=1.0 must be below 1"),
        ({"alpha": 0}, "alpha=0 must be a number above 0"),
        ({"init": "pissa"}, "init=pissa is unknown: the choices are: default, gaussian"),
        ({"targets": ["q_prj"]}, "targets=q_prj: a LlamaForCausalLM has no such module; did you"),
        ({"targets": []}, "targets=\\[\\] names no layer"),
        ({"modules_to_save": ["score"]}, "modules_to_save=score: a LlamaForCausalLM has no such"),
        ({"targets": ["norm"]}, "targets=: Target module LlamaRMSNorm.* is not supported"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_clear_error(base, settings, message):
    net = transformers_model(source=str(base), task="causal_lm")
    with pytest.raises(ConfigError, match=message):
        lora(net, **settings)


def test_a_model_without_a_default_names_its_layers():
    net = nn.Sequential()
    net.add_module("embedding", nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"no default for a Sequential: .* such as embedding, or"):
        lora(net)
    with pytest.raises(ConfigError, match="has no linear layer"):
        lora(nn.Sequential(nn.ReLU()), targets="all-linear")
