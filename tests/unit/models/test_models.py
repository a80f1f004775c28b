"""The models: the weights and outputs of those they come from, and what they refuse."""

import importlib
import inspect
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import get_method as locate
from omegaconf import OmegaConf
from support.small_data import write_imdb
from torch import nn

from hybridtrain import datasets, models
from hybridtrain.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"


class ReferenceBasicNet(nn.Module):
    """The class as published (see `hybridtrain.models.basicnet`)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)
        self.act = F.relu

    def forward(self, x):
        x = self.act(self.conv1(x))
        x = self.act(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.act(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def small_transformer(**changes):
    arguments = {
        "vocab_size": 50,
        "num_classes": 3,
        "max_len": 12,
        "d_model": 16,
        "nhead": 4,
        "d_hid": 32,
        "nlayers": 3,
        "dropout": 0.0,
        "pad_index": 1,
    }
    return models.transformer(**{**arguments, **changes})


def small_gpt(**changes):
    arguments = {"vocab_size": 30, "seq_len": 10, "n_layer": 2, "n_head": 4, "d_model": 16}
    return models.gpt(**{**arguments, **changes})


def reviews(lengths, length):
    """Token ids and padding mask of random reviews with these numbers of tokens."""
    mask = torch.arange(length) >= torch.tensor(lengths).unsqueeze(1)
    return torch.randint(2, 50, mask.shape).masked_fill(mask, 1), mask


def examples():
    """Each model, small, with an input, and the number of elements it can be cut between."""
    torch.manual_seed(0)
    return {
        "basicnet": (models.basicnet(), torch.randn(4, 1, 28, 28), 12),
        "transformer": (small_transformer(), reviews([12, 5, 1, 9], 12), 5),
        "gpt": (small_gpt(), torch.randint(0, 30, (4, 10)), 5),
    }


def elements(model):
    """The layers of nested Sequentials in order, which is what a pipeline is cut from."""
    for child in model:
        if isinstance(child, nn.Sequential):
            yield from elements(child)
        else:
            yield child


# All of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["basicnet", "transformer", "gpt"])
def test_elements_run_one_by_one_are_the_model(name):
    model, x, count = examples()[name]
    model.eval()
    layers = list(elements(model))
    assert len(layers) == count
    expected = model(x)
    for layer in layers:
        x = layer(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ["basicnet", "transformer", "gpt"])
def test_every_parameter_gets_a_gradient_from_one_batch(name):
    model, x, _ = examples()[name]
    model(x).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", ["basicnet", "transformer", "gpt"])
def test_samples_of_a_batch_do_not_see_each_other(name):
    model, x, _ = examples()[name]
    model.eval()
    parts = [
        model(tuple(t[i : i + 1] for t in x) if isinstance(x, tuple) else x[i : i + 1])
        for i in range(4)
    ]
    torch.testing.assert_close(torch.cat(parts), model(x))


@pytest.mark.parametrize(
    ("package", "name"), [(models, "gpt"), (datasets, "imdb")], ids=["gpt", "imdb"]
)
def test_a_function_is_not_hidden_by_the_module_of_its_name(package, name):
    module = importlib.import_module(f"{package.__name__}.{name}")
    assert inspect.isfunction(getattr(package, name))
    assert getattr(package, name) is getattr(module, name)
    assert name in dir(package)
    with pytest.raises(AttributeError, match=f"{package.__name__}.*nothing"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("model/*.yaml")), ids=lambda path: path.stem)
def test_a_models_config_has_its_functions_parameters(path):
    config = OmegaConf.load(path)
    function = locate(config.pop("_target_"))
    assert list(config) == [*inspect.signature(function).parameters, *models.WRAPPERS]


# BasicNet -----------------------------------------------------------------------------------------


def test_basicnet_and_the_reference_load_each_others_weights():
    torch.manual_seed(0)
    reference, model = ReferenceBasicNet(), models.basicnet()
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    x = torch.randn(3, 1, 28, 28)
    assert torch.equal(model.eval()(x), reference.eval()(x))
    other = models.basicnet()
    reference.load_state_dict(other.state_dict())
    assert torch.equal(other.eval()(x), reference.eval()(x))


def test_basicnet_draws_the_references_dropout():
    torch.manual_seed(0)
    reference, model = ReferenceBasicNet(), models.basicnet()
    model.load_state_dict(reference.state_dict())
    x = torch.randn(3, 1, 28, 28)
    torch.manual_seed(1)
    expected = reference(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(("size", "channels"), [(6, 1), (8, 1), (9, 3), (32, 3)])
def test_basicnet_fits_other_images(size, channels):
    x = torch.randn(2, channels, size, size)
    logits = models.basicnet(num_classes=7, image_size=size, channels=channels)(x)
    assert logits.shape == (2, 7)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(2))


def test_basicnet_learns_the_digits():
    torch.manual_seed(0)
    splits = datasets.digits()
    model = models.basicnet(image_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(5):
        for picked in torch.randperm(len(splits.train)).split(64):
            images, labels = splits.train.__getitems__(picked.tolist())
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
    images, labels = splits.eval.__getitems__(range(len(splits.eval)))
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.93


# Transformer --------------------------------------------------------------------------------------


def test_transformer_is_torchs_encoder_with_a_mean_over_the_words():
    torch.manual_seed(0)
    model = small_transformer()
    tokens, mask = reviews([12, 5, 1, 9], 12)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    reference = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    # strict: so the names are torch's too.
    of_layers = {k: v for k, v in model.state_dict().items() if k.startswith("layers.")}
    reference.load_state_dict(of_layers)
    embedded = model.encoder.embedding(tokens) * 4
    for position in range(12):
        for i in range(8):
            angle = position / 10_000 ** (2 * i / 16)
            embedded[:, position, 2 * i] += math.sin(angle)
            embedded[:, position, 2 * i + 1] += math.cos(angle)
    encoded = reference(embedded, src_key_padding_mask=mask)
    means = torch.stack([row[~m].mean(0) for row, m in zip(encoded, mask, strict=True)])
    torch.testing.assert_close(model((tokens, mask)), model.decoder.classifier(means))


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_transformer_gives_the_same_bits_in_evaluation_as_in_training_without_dropout(inference):
    model, x, _ = examples()["transformer"]
    layers = list(elements(model))
    expected = model.train()(x)
    state = x
    for layer in layers[:-1]:
        state = layer(state)
    with inference():
        assert torch.equal(model.eval()(x), expected)
        # Padded places too: torch's fused kernel would leave zeros there.
        for layer in layers[:-1]:
            x = layer(x)
        assert torch.equal(x[0], state[0])


def test_padding_has_no_influence_on_the_logits():
    model, (tokens, mask), _ = examples()["transformer"]
    expected = model((tokens, mask))
    torch.testing.assert_close(model((tokens.masked_fill(mask, 33), mask)), expected)
    # Nor has its amount: the second review alone, cut to its 5 tokens.
    torch.testing.assert_close(model((tokens[1:2, :5], mask[1:2, :5])), expected[1:2])


def test_padding_that_is_not_a_number_does_not_reach_the_logits():
    decoder = small_transformer().decoder
    x, mask = torch.randn(2, 4, 16), torch.tensor([[False, False, True, True]] * 2)
    expected = decoder((x, mask))
    x[:, 2:] = math.nan
    assert torch.equal(decoder((x, mask)), expected)


def test_embedding_of_the_padding_stays_zero():
    model, (tokens, mask), _ = examples()["transformer"]
    tokens[0, 3] = 1  # the word itself, in the text: not masked
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model((tokens, mask)).square().sum().backward()
    optimizer.step()
    weight = model.encoder.embedding.weight
    assert not weight[1].any()
    assert weight[2:].any()


def test_transformer_loads_a_checkpoint_with_another_longest_sequence():
    small_transformer(max_len=20).load_state_dict(small_transformer().state_dict())


def test_transformer_with_an_odd_width():
    assert small_transformer(d_model=15, nhead=3)(reviews([4], 6)).shape == (1, 3)


@pytest.mark.thorough
def test_transformer_learns_reviews(tmp_path):
    pytest.importorskip("torchtext")
    torch.manual_seed(0)
    write_imdb(tmp_path, 120)
    splits = datasets.imdb(tmp_path, max_len=32, min_freq=1)
    sizes = {name: size for name, size in splits.metadata.items() if name != "classes"}
    model = models.transformer(**sizes, d_model=32, d_hid=64, nlayers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(12):
        for picked in torch.randperm(120).split(20):
            inputs, labels = splits.train.__getitems__(picked.tolist())
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    inputs, labels = splits.eval.__getitems__(range(120))
    with torch.no_grad():
        accuracy = (model.eval()(inputs).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.9


# GPT ----------------------------------------------------------------------------------------------


def test_gpt_sees_no_later_token():
    model, tokens, _ = examples()["gpt"]
    expected = model(tokens)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 30
    torch.testing.assert_close(model(changed)[:, :6], expected[:, :6])
    assert not torch.allclose(model(changed)[:, 6:], expected[:, 6:])
    torch.testing.assert_close(model(tokens[:, :4]), expected[:, :4])


def test_gpt_block_is_the_attention_of_the_formula():
    torch.manual_seed(0)
    block = small_gpt().blocks[0]
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 10, 16)
    h = block.norm1(x)
    q, k, v = (t.view(2, 10, 4, 4).transpose(1, 2) for t in block.attention.qkv(h).split(16, -1))
    scores = q @ k.transpose(-2, -1) / 2 + torch.full((10, 10), -math.inf).triu(1)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 10, 16)
    y = x + block.attention.proj(mixed)
    expected = y + block.mlp(block.norm2(y))
    torch.testing.assert_close(block(x), expected)


def test_gpt_starts_with_gpt2s_spread():
    torch.manual_seed(0)
    model = models.gpt(vocab_size=256, seq_len=128, n_layer=8, n_head=4, d_model=128)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            expected = 0.02 / 4 if name.endswith("proj.weight") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name
    # So every byte is about as likely as any other before training.
    tokens = torch.randint(0, 256, (4, 128))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_gpt_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model, tokens = small_gpt(dropout=0.5), torch.randint(0, 30, (2, 10))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.thorough
def test_gpt_learns_python():
    torch.manual_seed(0)
    splits = datasets.python_source(seq_len=32, max_bytes=40_000, eval_bytes=2000)
    model = models.gpt(**splits.metadata, n_layer=2, d_model=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # twice, since other versions of Python have other files
    batches = torch.randperm(len(splits.train)).split(16)
    for picked in batches * 2:
        x, y = splits.train.__getitems__(picked.tolist())
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    x, y = splits.eval.__getitems__(range(len(splits.eval)))
    with torch.no_grad():
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    assert loss < 3.2  # a byte drawn at random: 5.5


# What they refuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "changes", "message"),
    [
        (models.basicnet, {"image_size": 5}, r"^image_size=5 is too small"),
        (models.basicnet, {"num_classes": 0}, r"^num_classes=0 must be"),
        (models.basicnet, {"channels": None}, r"^channels=None: pass channels="),
        (small_transformer, {"nhead": 5}, r"^d_model=16 .*multiple of nhead=5"),
        (small_transformer, {"pad_index": 50}, r"^pad_index=50 .*vocab_size=50"),
        (small_transformer, {"pad_index": None}, r"^pad_index=None"),
        (small_transformer, {"dropout": 1.5}, r"^dropout=1\.5"),
        (small_transformer, {"nlayers": 2.5}, r"^nlayers=2\.5 must be a whole number"),
        (small_transformer, {"vocab_size": None}, r"^vocab_size=None"),
        (small_gpt, {"n_head": 3}, r"^d_model=16 .*multiple of n_head=3"),
        (small_gpt, {"dropout": -0.1}, r"^dropout=-0\.1"),
        (small_gpt, {"seq_len": 0}, r"^seq_len=0 must be"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(build, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_too_long_a_sequence_names_the_argument():
    with pytest.raises(ConfigError, match=r"11 tokens is too long for seq_len=10"):
        small_gpt()(torch.zeros(1, 11, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"13 tokens is too long for max_len=12"):
        small_transformer()(reviews([13], 13))


def test_a_model_stays_as_traced_when_another_one_is_built():
    transformers = pytest.importorskip("transformers")
    settings = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}
    settings |= {"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 16}

    def build(attention):
        return models.transformers_model(
            config=settings, task="classification", num_classes=2, attention=attention
        )

    build("eager")
    # the forward of a traced model has read these tables
    tables = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    read = list(map(dict, tables))
    build("sdpa_masked")
    build("eager")
    assert list(map(dict, tables)) == read
