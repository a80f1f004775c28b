"""A model that accelerate has put on several devices.

On CPUs its hooks are attached by hand, because accelerate takes `cpu` for offloading.
"""

import pytest
import torch
from support.cases import installed
from support.hf import Texts, llama, on_devices, padded

from hybridtrain import pipelined, unpipelined
from hybridtrain.errors import ConfigError, WorldError

installed("accelerate")
installed("transformers")

pytestmark = pytest.mark.usefixtures("seeded")

MAP = {
    "model.embed_tokens": "cpu:0",
    "model.layers.0": "cpu:0",
    "model.layers.1": "cpu:1",
    "model.layers.2": "cpu:1",
    "model.layers.3": "cpu:1",
    "model.norm": "cpu:1",
    "model.rotary_emb": "cpu:1",
    "lm_head": "cpu:1",
}


def dispatched(device_map, model=None):
    return on_devices(model or llama(), device_map)


def gradients(model, steps=3):
    batch = padded([Texts()[i] for i in range(6)])
    for _ in range(steps):
        model.zero_grad()
        model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def stages_of(caplog):
    return next(r.args[1] for r in caplog.records if "pipelined(" in r.msg)


def test_the_map_is_the_split_and_the_hooks_are_gone(caplog):
    expected = gradients(dispatched(MAP))
    model = pipelined(dispatched(MAP), chunks=3)
    with caplog.at_level("INFO", "hybridtrain"):
        torch.testing.assert_close(gradients(model), expected)
    first, second = stages_of(caplog).stages
    assert "layers.1" in second.layers[0].name
    assert "layers.0" in first.layers[-1].name
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())


def test_another_split_is_possible(caplog):
    expected = gradients(llama())
    model = pipelined(dispatched(MAP), chunks=3, split=["model.layers.3"])
    with caplog.at_level("INFO", "hybridtrain"):
        torch.testing.assert_close(gradients(model), expected)
    assert "layers.3" in stages_of(caplog).stages[1].layers[0].name


def test_tied_weights_on_two_devices():
    expected = gradients(llama(tie_word_embeddings=True))
    model = pipelined(dispatched(MAP, llama(tie_word_embeddings=True)), chunks=3)
    torch.testing.assert_close(gradients(model), expected)


def test_an_adapter_around_a_model_with_a_map():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0)

    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    expected = gradients(adapted(llama()))
    model = pipelined(adapted(dispatched(MAP)), chunks=3)
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_refused(place):
    model = dispatched(MAP | {"lm_head": place})
    with pytest.raises(ConfigError, match=f"offloads lm_head to {place}"):
        pipelined(model)
    with pytest.raises(ConfigError, match="offloads the model to disk"):
        pipelined(dispatched({"": "disk"}))


def test_a_model_with_a_map_is_as_before_where_an_argument_is_refused():
    model = dispatched(MAP)
    with pytest.raises(WorldError):
        pipelined(model, nb_part=2, devices=["cpu:0", "cpu:1", "cpu:2"])
    assert model.hf_device_map == MAP
    assert hasattr(model.lm_head, "_hf_hook")


def test_a_map_of_one_device_is_no_split():
    model = dispatched(dict.fromkeys(MAP, "cpu:0"))
    cut = gradients(pipelined(model, nb_part=2, chunks=3))
    plain = gradients(unpipelined(model))
    for name, gradient in plain.items():
        torch.testing.assert_close(cut[name], gradient)
