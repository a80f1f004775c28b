"""Layers with quantized weights, which stay as they are, under trained adapters.

They are those of bitsandbytes, or classes built as its own: parameters whose scales are attributes.
"""

import copy

import pytest
import torch
from support.cases import installed
from support.compare import cpu_world
from support.hf import Texts, llama, padded
from torch import nn
from torch.nn import functional as F

from hybridtrain import HybridModel, pipelined
from hybridtrain.checkpoint import CheckpointStore, save_checkpoint
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.loss import model_output

peft = installed("peft")
installed("transformers")

pytestmark = pytest.mark.usefixtures("seeded")


class Quantized(nn.Parameter):
    """Integers, and a scale for each row."""

    def __new__(cls, data, scales=None, requires_grad=False):
        parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
        parameter.scales = scales
        return parameter

    def __deepcopy__(self, memo):
        return Quantized(self.data.clone(), copy.deepcopy(self.scales, memo))

    def to(self, *args, **kwargs):
        return Quantized(super().to(*args, **kwargs), self.scales.to(*args, **kwargs))


class OnGPU(Quantized):
    """A parameter that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))


class QuantizedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        integers = (linear.weight.detach() / scales).round().to(torch.int8)
        self.weight = Quantized(integers, scales)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.device).data * self.weight.scales)


def quantized():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = QuantizedLinear(layer.mlp.up_proj)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def gradients(model):
    for _ in range(2):
        model.zero_grad()
        model(**padded([Texts()[i] for i in range(6)])).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_an_adapter_on_quantized_weights_gets_the_gradients_of_the_plain_model():
    expected = gradients(quantized())
    model = pipelined(quantized(), nb_part=2, chunks=3)
    torch.testing.assert_close(gradients(model), expected)
    weight = model.get_submodule("base_model.model.model.layers.3.mlp.up_proj").weight
    assert type(weight) is Quantized


def test_quantized_weights_on_a_gpu_are_not_moved():
    model = quantized()
    layer = model.get_submodule("base_model.model.model.layers.3.mlp.up_proj")
    layer.weight = OnGPU(layer.weight.data, layer.weight.scales)
    with pytest.raises(
        ConfigError, match=r"layers\.3\.mlp\.up_proj\.weight is quantized .*balanced"
    ):
        pipelined(model, nb_part=2)
    pipelined(model, nb_part=1)


class PackedLinear(nn.Module):
    """A layer as GPTQ's: integers in a buffer, and a kernel that has pointers to them."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax() / 127
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().int())
        self.register_buffer("scales", scales)
        self.handle = id(self)

    def forward(self, x):
        assert self.handle == id(self), "a copy has the pointers of the original"
        return F.linear(x, self.qweight * self.scales)


def packed():
    model = quantized()
    for layer in model.base_model.model.model.layers:
        layer.mlp.up_proj = PackedLinear(nn.Linear(32, 48))
    return model


def test_an_adapter_on_packed_weights_gets_the_gradients_of_the_plain_model():
    expected = gradients(packed())
    model = pipelined(packed(), nb_part=2, chunks=3)
    torch.testing.assert_close(gradients(model), expected)


class BufferOnGPU(torch.Tensor):
    """A buffer that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))


def test_packed_weights_on_a_gpu_are_not_moved():
    model = packed()
    layer = model.get_submodule("base_model.model.model.layers.3.mlp.up_proj")
    layer.qweight = layer.qweight.as_subclass(BufferOnGPU)
    with pytest.raises(
        ConfigError, match=r"layers\.3\.mlp\.up_proj\.qweight is quantized \(PackedLinear\)"
    ):
        pipelined(model, nb_part=2)
    pipelined(model, nb_part=1)


def in_4_bits():
    """A model as `from_pretrained` makes it with `load_in_4bit=True`, with an adapter."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = llama()
    for name, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear and name != "lm_head":
            weight = bitsandbytes.nn.Params4bit(layer.weight.data, quant_type="nf4").to("cpu")
            made = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False)
            made.weight = weight
            model.set_submodule(name, made)
    torch.manual_seed(1)
    settings = {"target_modules": "all-linear", "lora_dropout": 0.0, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **settings))


def test_layers_of_bitsandbytes_train_on_after_an_evaluation():
    expected = gradients(in_4_bits())
    model = pipelined(in_4_bits(), nb_part=2, chunks=3)
    model.eval()
    with torch.no_grad():
        model(**padded([Texts()[i] for i in range(6)]), use_cache=False)
    torch.testing.assert_close(gradients(model.train()), expected)


@pytest.mark.parametrize("way", ["pipelined", "HybridModel"])
@pytest.mark.quick_cases("HybridModel")
def test_a_model_that_was_loaded_in_4_bits_trains_an_adapter_in_stages(way, tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")  # transformers needs it
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    llama().save_pretrained(tmp_path)
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )

    def loaded():
        net = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=in_4_bits, dtype=torch.float32
        )
        torch.manual_seed(1)
        settings = {"target_modules": "all-linear", "init_lora_weights": False}
        return peft.get_peft_model(net, peft.LoraConfig(r=4, **settings)).train()

    expected = gradients(loaded())
    if way == "pipelined":
        ours = gradients(pipelined(loaded(), nb_part=2, chunks=3))
    else:
        inputs = padded([Texts()[i] for i in range(6)])
        model = HybridModel(loaded(), cpu_world(2), chunks=3, example_inputs=inputs)
        model.train_step(inputs, None, model_output)
        ours = {name: p.grad for name, p in model.net.named_parameters() if p.grad is not None}
    torch.testing.assert_close(ours, expected)


def test_layers_of_bitsandbytes_that_were_repacked_before_are_refused():
    model = in_4_bits()
    layer = model.get_submodule("base_model.model.model.layers.3.mlp.up_proj.base_layer")
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ConfigError, match=r"layers\.3\.mlp\.up_proj.*load the model again"):
        HybridModel(model, cpu_world(2))


def test_a_checkpoint_that_bitsandbytes_could_not_load_is_not_saved(tmp_path):
    inputs = padded([Texts()[i] for i in range(6)])
    model = HybridModel(in_4_bits(), cpu_world(2), chunks=3, example_inputs=inputs)
    with pytest.raises(CheckpointError, match=r"q_proj\.base_layer\.weight.*models\.quantize"):
        save_checkpoint(CheckpointStore(tmp_path), 1, model, None, {}, {})
