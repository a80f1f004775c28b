"""Quantized bases: the bits of bitsandbytes, in any split, and only the adapter is saved."""

import copy
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import installed
from support.compare import assert_same, assert_same_gradients, cpu_world
from support.hf import Texts, bert, causal_lm, gpt2, padded
from support.hf import llama as small_llama
from torch import nn

from hybridtrain import HybridModel
from hybridtrain._base.adapter import adapter_of
from hybridtrain._base.construction import construct_part, construct_without
from hybridtrain._base.tensors import packed_weight
from hybridtrain.checkpoint import CheckpointStore, init_from, restore_checkpoint, save_checkpoint
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.loss import cross_entropy
from hybridtrain.models import lora, quantize
from hybridtrain.models.quantized import KINDS, QuantizedLinear, quantized_weights
from hybridtrain.partitioning import layer_sizes

bitsandbytes = installed("bitsandbytes")
peft = installed("peft")

pytestmark = pytest.mark.usefixtures("seeded")


def linear_4bit(layer):
    """The module of bitsandbytes with the same values."""
    with torch.device("meta"):
        made = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            compress_statistics=False,
            quant_type="nf4",
        )
    made.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data.clone(), compress_statistics=False, quant_type="nf4"
    ).to("cpu")
    made.bias = layer.bias
    made.support_avx512bf16_for_cpu = False
    return made


def with_values(net, **settings):
    """An adapter in all linear layers, which has an effect."""
    draws = torch.Generator().manual_seed(3)
    net = lora(net, **{"rank": 2, "targets": "all-linear", **settings})
    for name, parameter in net.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=draws)
    return net


def chain(seed=7):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16, False)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 3))


def batch(seed=1):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=draws), torch.randint(3, (8,), generator=draws)


def staged(net, nb_part=2, **options):
    options = {"chunks": 2, **options}
    return HybridModel(net, cpu_world(nb_part), example_inputs=batch()[0], **options)


def plain_gradients(net, forward):
    net.zero_grad()
    for _ in range(2):
        forward(net).backward()
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_in_nf4_has_the_bits_of_bitsandbytes(dtype, bias):
    layer = nn.Linear(34, 50, bias).to(dtype)
    theirs, ours = linear_4bit(layer), QuantizedLinear(layer)
    x = torch.randn(2, 5, 34, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 5, 50, dtype=dtype)
    outputs = [made(x) for made in (theirs, ours)]
    assert torch.equal(*outputs)
    assert torch.equal(*(torch.autograd.grad(output, x, grad)[0] for output in outputs))


@pytest.mark.parametrize(("kind", "share"), [("nf4", 0.29), ("int8", 0.54)])
def test_quantized_layers_take_a_fraction_of_the_bytes_and_their_error_is_small(kind, share):
    layer = nn.Linear(256, 384, bias=False).to(torch.bfloat16)
    torch.nn.init.normal_(layer.weight, std=0.02)
    quantized = QuantizedLinear(layer, kind)
    stored = sum(p.nbytes for n, p in quantized.named_parameters() if n != "code")
    assert stored <= share * layer.weight.nbytes
    error = (quantized.weight.double() - layer.weight.double()).norm() / layer.weight.norm()
    assert error < {"nf4": 0.1, "int8": 0.01}[kind]


@pytest.mark.parametrize(
    ("kind", "dora", "nb_part", "options"),
    [
        ("nf4", False, 2, {}),
        ("nf4", True, 4, {}),
        ("nf4", False, 2, {"schedule": "zb-h1"}),
        ("int8", False, 4, {"recompute": "always"}),
        ("int8", True, 1, {}),
    ],
)
def test_an_adapter_gets_the_same_gradients_in_any_split_also_after_an_evaluation(
    kind, dora, nb_part, options
):
    net = with_values(quantize(chain(), kind), dora=dora)
    inputs, targets = batch()
    model = staged(copy.deepcopy(net), nb_part, **options)
    for step in range(2):
        net.zero_grad()
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            (cross_entropy(net(x), y) / 2).backward()
        if step:
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(inputs), net(inputs))
            model.train()
        model.zero_grad()
        model.train_step(inputs, targets, cross_entropy)
        assert_same_gradients(model.net, net)
        assert any(p.grad is not None for p in net.parameters())


def test_a_llama_gets_the_gradients_of_peft_with_bitsandbytes():
    pytest.importorskip("transformers")
    rows = [padded([Texts()[i] for i in part]) for part in (range(3), range(3, 6))]

    def forward(net):
        return sum(net(**row).loss for row in rows)

    theirs = small_llama()
    for name, layer in [*theirs.named_modules()]:
        if type(layer) is nn.Linear and name != "lm_head":
            theirs.set_submodule(name, linear_4bit(layer))
    theirs = plain_gradients(with_values(theirs), forward)
    net = quantize(small_llama())
    assert type(net.lm_head) is nn.Linear
    assert len(quantized_weights(net)) == 28
    ours = plain_gradients(with_values(net), forward)
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert_same({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_conv1d_layers_of_gpt2_are_quantized_merged_and_loaded_as_linear_ones(kind):
    pytest.importorskip("transformers")
    inputs = padded([Texts()[i] for i in range(4)])
    plain, net = gpt2(), quantize(gpt2(), kind)
    layers = quantized_weights(net)
    assert len(layers) == 8
    for name, layer in layers.items():
        by_hand = nn.Linear(layer.in_features, layer.out_features)
        by_hand.weight.data = plain.get_parameter(name).data.t().contiguous()
        expected = QuantizedLinear(by_hand, kind)
        assert_same({n: getattr(layer, n) for n in layer.stored},
                    {n: getattr(expected, n) for n in layer.stored})  # fmt: skip
    again = quantize(gpt2(), kind)
    again.load_state_dict({n: p + 1 for n, p in plain.state_dict().items()})
    again.load_state_dict(plain.state_dict())
    assert_same(again.state_dict(), net.state_dict())
    net = with_values(net, dora=True)
    expected = net(**inputs).logits
    plain.load_state_dict(adapter_of(net).merged(net).state_dict())
    # W x + B A x is summed in another order
    torch.testing.assert_close(plain(**inputs).logits, expected)


def test_the_share_of_the_weights_that_is_not_quantized_is_one_line(caplog):
    pytest.importorskip("transformers")
    caplog.set_level(logging.INFO)
    experts = {"num_local_experts": 4, "num_hidden_layers": 2}
    net = with_values(quantize(causal_lm("Mixtral", **experts)))
    inputs = padded([Texts()[i] for i in range(4)])
    model = HybridModel(net, cpu_world(2), chunks=2, example_inputs=inputs)
    weights = sum(size.weights for size in layer_sizes(model.planned.layers))
    assert weights == sum(tensor.nbytes for tensor in [*net.parameters(), *net.buffers()])
    # of each layer 4 x 3 x 32 x 48 in experts, 3,072 in linear layers; 2 x 50 x 32 in all
    (line,) = [text for text in caplog.messages if text.startswith("quantize=")]
    assert "quantize=nf4: 8 layers; 87% of the bytes of the frozen weights" in line
    assert "MixtralExperts 79%, Embedding 3%, Linear 3%" in line


def test_the_head_is_what_a_model_of_transformers_has_outside_of_its_base():
    pytest.importorskip("transformers")
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    roberta = RobertaForSequenceClassification(RobertaConfig(**sizes, num_attention_heads=4))
    for net, head in (
        (roberta, {"classifier.dense", "classifier.out_proj"}),
        (bert(), {"classifier"}),
    ):
        quantize(net)
        assert {n for n, m in net.named_modules() if type(m) is nn.Linear} == head
    net = lora(roberta, rank=2)  # trains the head as a whole
    assert net.get_parameter("classifier.modules_to_save.default.dense.weight").requires_grad


def test_a_run_in_fp16_with_a_scaler_gets_the_gradients_of_the_plain_model():
    net = with_values(quantize(chain()))
    model = staged(copy.deepcopy(net), precision="fp16")
    inputs, targets = batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(net(x), y) / 2
        scaler.scale(loss).backward()
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**12).scale
    model.train_step(inputs, targets, cross_entropy, scale_loss=scale)
    assert_same_gradients(model.net, net)


@pytest.mark.thorough
def test_a_compiled_model_has_quantized_layers():
    gradients = []
    for compiled in (False, True):
        model = staged(with_values(quantize(chain())), compile=compiled)
        model.train_step(*batch(), cross_entropy)
        gradients.append({n: p.grad for n, p in model.net.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*gradients)  # a compiler may sum in another order


def test_a_cast_of_the_model_keeps_the_scales_exact():
    layer = QuantizedLinear(nn.Linear(64, 64))
    scales = layer.absmax.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.absmax, scales)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.bias.dtype == torch.bfloat16


def test_autocast_applies_to_quantized_layers():
    layer = QuantizedLinear(nn.Linear(64, 64))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize("targets", ["all-linear", ["2"]])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_the_dequantized_base_and_the_adapter(kind, targets):
    net = with_values(quantize(chain(), kind), targets=targets)
    inputs, _ = batch()
    expected = net(inputs)
    plain = chain()
    plain.load_state_dict(adapter_of(net).merged(net).state_dict())
    torch.testing.assert_close(plain(inputs), expected)  # W x + B A x is summed in another order


@pytest.fixture
def base(tmp_path):
    """The file of a base."""
    save_file(chain(seed=0).state_dict(), tmp_path / "base.safetensors")
    return str(tmp_path / "base.safetensors")


def quantized_chain(nb_part=2, kind="nf4", **settings):
    net = quantize(chain(), kind) if kind else chain()
    return staged(lora(net, rank=2, targets="all-linear", **settings), nb_part)


def one_step(model, optimizer, seed=1):
    model.train_step(*batch(seed), cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_quantized_when_they_are_read(base, kind):
    model = quantized_chain(kind=kind, dora=True)
    report = init_from(model, base)
    assert "0.base_layer.weight" in report.loaded
    expected = quantize(chain(seed=0), kind)
    for name in ("0", "2", "4"):
        layer, plain = model.net.get_submodule(f"{name}.base_layer"), expected.get_submodule(name)
        assert_same(layer.state_dict(), plain.state_dict())
        magnitude = model.net.get_submodule(f"{name}.lora_magnitude_vector.default").weight
        torch.testing.assert_close(magnitude.data, plain.weight.norm(dim=1))


def test_a_checkpoint_has_the_adapter_alone_and_any_split_goes_on_with_the_same_bits(
    base, tmp_path
):
    model = quantized_chain()
    init_from(model, base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    path = save_checkpoint(CheckpointStore(tmp_path / "saved"), 1, model, optimizer, {}, {})
    saved = load_file(path / "model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
    again = quantized_chain(nb_part=3)
    optimizer_again = torch.optim.AdamW(again.parameters(), lr=0.1)
    restore_checkpoint(path, again, optimizer_again)
    for each in ((model, optimizer), (again, optimizer_again)):
        one_step(*each, seed=2)
    assert_same(again.net.state_dict(), model.net.state_dict())
    assert model.base == again.base


def test_a_model_without_a_source_of_its_base_is_saved_with_the_quantized_weights(tmp_path):
    model = quantized_chain()
    path = save_checkpoint(CheckpointStore(tmp_path), 1, model, None, {}, {})
    other = chain(seed=3)
    again = staged(lora(quantize(other), rank=2, targets="all-linear"), 3)
    restore_checkpoint(path, again)
    assert_same(again.net.state_dict(), model.net.state_dict())


@pytest.mark.parametrize(("saved", "resumed"), [("nf4", "int8"), ("nf4", None), (None, "nf4")])
def test_an_adapter_does_not_go_on_with_another_quantization_of_its_base(
    base, tmp_path, saved, resumed
):
    model = quantized_chain(kind=saved)
    init_from(model, base)
    path = save_checkpoint(CheckpointStore(tmp_path / "saved"), 1, model, None, {}, {})
    with pytest.raises(CheckpointError, match=r"plain weights|nf4, 3 layers") as refused:
        restore_checkpoint(path, quantized_chain(kind=resumed))
    assert f"quantize={saved}" in str(refused.value)
    assert f"init_from={path}" in str(refused.value)
    restore_checkpoint(path, quantized_chain(kind=saved))
    init_from(quantized_chain(kind=resumed), path)


def test_a_process_quantizes_only_the_weights_that_it_owns(caplog):
    def build():
        torch.manual_seed(3)
        return lora(quantize(chain()), rank=2, targets="all-linear")

    whole = build()
    names = {n for n, _ in whole.named_parameters() if n.startswith("2.")}
    with caplog.at_level(logging.DEBUG, "hybridtrain"):
        part = construct_part(build, names.__contains__)
    assert "building the whole model" not in caplog.text
    for name, parameter in part.named_parameters():
        assert parameter.is_meta == (name not in names), name
        assert parameter.is_meta or torch.equal(parameter, whole.get_parameter(name)), name


def test_weights_that_a_base_will_fill_are_never_made(base, caplog):
    made = []

    def build():
        net = chain()
        made.append({n: p.is_meta for n, p in net.named_parameters()})
        return net

    def adapted():
        net = construct_without(build, lambda net: quantized_weights(quantize(net)))
        return lora(quantize(net), rank=2, targets="all-linear")

    model = staged(adapted())
    left_out = {"0.weight", "2.weight", "4.weight"}
    assert made[-1] == {name: name in left_out for name in made[-1]}
    init_from(model, base)
    expected = quantized_chain()
    init_from(expected, base)
    frozen = {n: p for n, p in model.net.named_parameters() if not p.requires_grad}
    assert_same(frozen, {n: expected.net.get_parameter(n) for n in frozen})
    names = {n for n in frozen if n.startswith("2.")}
    with caplog.at_level(logging.DEBUG, "hybridtrain"):
        part = construct_part(adapted, names.__contains__)
    assert "building the whole model" not in caplog.text
    assert {n for n, p in part.named_parameters() if not p.is_meta} == names


def test_quantized_blocks_are_opened_and_split_by_their_bytes():
    pytest.importorskip("transformers")
    inputs = padded([Texts()[i] for i in range(4)])
    net = with_values(quantize(small_llama()))
    model = HybridModel(net, cpu_world(2), chunks=2, split="size", example_inputs=inputs)
    names = {name for names in model.plan.layer_names for name in names}
    assert {f"model.layers.{i}.self_attn" for i in range(4)} <= names
    sizes = [sum(s.weights for s in layer_sizes(stage.layers)) for stage in model.stages]
    assert max(sizes) < 1.25 * min(sizes)
    assert sum(sizes) == sum(p.nbytes for p in [*model.net.parameters(), *model.net.buffers()])


def test_a_quantized_layer_itself_runs_where_its_cost_is_found_and_it_may_be_moved():
    net = quantize(chain())
    assert len(quantized_weights(net)) > 1
    assert all(packed_weight(layer) is None for layer in net.modules())


def test_what_cannot_be_quantized_is_one_line_with_the_way_out(monkeypatch):
    with pytest.raises(ConfigError, match="kind=nf5 is unknown: did you mean 'nf4'"):
        quantize(chain(), "nf5")
    with pytest.raises(ConfigError, match="quantize=nf4: a Sequential has no linear layer"):
        quantize(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="keep=7: a Sequential has no such linear layer"):
        quantize(chain(), keep=["7"])
    settings = {"rank": 2, "targets": ["0"], "modules_to_save": ["4"]}
    with pytest.raises(ConfigError, match=r"=4: the weights of 4 are quantized.*keep="):
        lora(quantize(chain()), **settings)
    net = lora(quantize(chain(), keep=["4"]), **settings)
    assert len(quantized_weights(net)) == 2


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    from hybridtrain.models import quantized

    quantized._operators.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"quantize= needs .*: pip install 'hybridtrain\[bnb"):
        quantize(chain())
