"""torchvision's models on any images: their names and weights, sizes, auxiliary heads, and cuts."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torchvision
from support.cases import thinned
from torch import nn
from torchvision.models import get_model, list_models
from torchvision.models.googlenet import GoogLeNetOutputs
from torchvision.models.inception import InceptionOutputs

from hybridtrain import HybridModel, World
from hybridtrain.errors import ConfigError
from hybridtrain.loss import accuracy, cross_entropy, mse, nll
from hybridtrain.models import torchvision_model, torchvision_models
from hybridtrain.models.torchvision_models import shapes_only
from hybridtrain.partitioning import observed_chain

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

NAMES = list_models(module=torchvision.models)

# The size that digits, 8x8, are resized to for one model of each family; None: they are not.
SIDES = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": None,
    "googlenet": 16,
    "inception_v3": 299,
    "maxvit_t": 224,
    "mnasnet0_5": None,
    "mobilenet_v2": None,
    "mobilenet_v3_small": None,
    "regnet_y_400mf": None,
    "resnet18": None,
    "shufflenet_v2_x0_5": None,
    "squeezenet1_1": 28,
    "swin_t": None,
    "swin_v2_t": None,
    "vgg11": 32,
    "vit_b_16": 16,
    "vit_h_14": 28,
}
QUICK = ["mnasnet0_5", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1"]


def for_digits(name, **changes):
    arguments = {"num_classes": 10, "image_size": 8, "channels": 1}
    return torchvision_model(name, **{**arguments, **changes})


def shapes_for_digits(name, **changes):
    """The same without memory."""
    with shapes_only():
        return for_digits(name, **changes).to("meta")


def digits(samples=4):
    return torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(0))


# Names and weights --------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_model_is_built_and_its_state_is_torchvisions(monkeypatch):
    # which size fits is another test's, and takes a forward
    monkeypatch.setattr(torchvision_models, "_first_that_fits", lambda name, build, sides: sides[0])
    assert len(NAMES) >= 80
    for name in NAMES:
        ours = shapes_for_digits(name, num_classes=7, image_size=224).state_dict()
        assert {tensor.shape[0] for tensor in list(ours.values())[-2:]} & {7}, name
        if name in SIDES:
            with shapes_only(), warnings.catch_warnings(action="ignore"):
                theirs = get_model(name, num_classes=7).state_dict()
            assert [(key, t.shape) for key, t in ours.items()] == [
                (key, t.shape) for key, t in theirs.items()
            ], name


@pytest.mark.parametrize("name", [*QUICK, "googlenet"])
@pytest.mark.filterwarnings("ignore:The default weight initialization")
@pytest.mark.quick_cases(1)
def test_a_seed_gives_the_weights_that_torchvision_draws(name):
    torch.manual_seed(5)
    ours = for_digits(name).state_dict()
    torch.manual_seed(5)
    theirs = get_model(name, num_classes=10).state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def test_shapes_alone_take_no_memory_and_no_draws():
    before = torch.get_rng_state()
    with shapes_only():
        layer = nn.Linear(3, 3)
        layer.token = nn.Parameter(torch.empty(3).normal_())  # as in ViT
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert not nn.Linear(3, 3).weight.is_meta


def test_a_copy_computes_the_same_with_weights_of_its_own():
    net = for_digits("squeezenet1_1").eval()
    twin = copy.deepcopy(net)
    assert torch.equal(twin(digits()), net(digits()))
    with torch.no_grad():
        twin.features[0].weight.zero_()
    assert not torch.equal(twin(digits()), net(digits()))


# Images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", thinned(list(SIDES), 4))
@pytest.mark.quick_cases(1)
def test_digits_are_resized_only_where_the_model_needs_it(name):
    net = shapes_for_digits(name)
    assert net.side == SIDES[name]
    images = torch.empty(4, 1, 8, 8, device="meta")
    with torch.random.fork_rng([]), torch.no_grad():
        assert net.eval()(images).shape == (4, 10)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.quick_cases(1)
def test_what_a_model_returns_are_log_probabilities(name):
    output = for_digits(name)(digits())
    torch.testing.assert_close(output.exp().sum(1), torch.ones(4))


@pytest.mark.parametrize(("size", "channels", "side"), [(8, 1, 28), (8, 3, 28), (40, 3, 40)])
def test_the_models_own_forward_sees_three_colours_of_the_right_size(size, channels, side):
    net = for_digits("squeezenet1_1", image_size=size, channels=channels).eval()
    plain = get_model("squeezenet1_1", num_classes=10).eval()
    plain.load_state_dict(net.state_dict())
    images = torch.randn(2, channels, size, size)
    prepared = F.interpolate(images.expand(2, 3, -1, -1), side, mode="bilinear", antialias=True)
    torch.testing.assert_close(net(images), plain(prepared).log_softmax(1))


@pytest.mark.parametrize(
    ("changes", "tokens"), [({}, 1), ({"image_size": 28}, 4), ({"image_size": 8, "resize": 48}, 9)]
)
@pytest.mark.quick_cases(1)
def test_a_vit_is_built_for_the_size_of_its_images(changes, tokens):
    net = shapes_for_digits("vit_b_16", **changes)
    assert net.encoder.pos_embedding.shape[1] == tokens + 1  # and the class token


def test_a_given_size_needs_no_size_of_the_data():
    net = for_digits("squeezenet1_1", image_size=None, resize=32)
    assert net(torch.randn(2, 1, 50, 50)).shape == (2, 10)
    assert for_digits("squeezenet1_1", image_size=32, resize=32).side is None


# Auxiliary heads ----------------------------------------------------------------------------------


def test_googlenet_returns_log_probabilities_of_all_heads_in_training_alone():
    net = for_digits("googlenet")
    outputs = net(digits())
    assert type(outputs) is GoogLeNetOutputs
    for output in outputs:
        torch.testing.assert_close(output.exp().sum(1), torch.ones(4))
    assert isinstance(net.eval()(digits()), torch.Tensor)


@pytest.mark.parametrize("loss", [cross_entropy, nll])
def test_auxiliary_heads_count_as_their_authors_have_it(loss):
    main, first, second = torch.randn(3, 6, 10).log_softmax(-1)
    targets = torch.arange(6)
    expected = loss(main, targets) + 0.3 * loss(first, targets) + 0.3 * loss(second, targets)
    assert torch.equal(loss(GoogLeNetOutputs(main, first, second), targets), expected)
    expected = loss(main, targets) + 0.4 * loss(first, targets)
    assert torch.equal(loss(InceptionOutputs(main, first), targets), expected)


def test_log_probabilities_have_one_loss_under_either_name():
    logits, targets = torch.randn(6, 10), torch.arange(6)
    log_probabilities = logits.log_softmax(1)
    torch.testing.assert_close(nll(log_probabilities, targets), cross_entropy(logits, targets))
    torch.testing.assert_close(
        nll(log_probabilities, targets), cross_entropy(log_probabilities, targets)
    )


def test_metrics_and_losses_look_at_the_logits_of_an_output_with_fields():
    @dataclass
    class Output:
        logits: torch.Tensor
        hidden_states: torch.Tensor | None = None

    logits, targets = torch.eye(6), torch.tensor([0, 1, 2, 3, 4, 0])
    for output in (
        Output(logits),
        Output(logits, torch.ones(6)),
        InceptionOutputs(logits, -logits),
    ):
        metric = accuracy()
        metric.update(output, targets)
        assert float(metric.compute()) == 5 / 6
        assert torch.equal(mse(output, logits + 1), torch.tensor(1.0))
    assert torch.equal(cross_entropy(Output(logits), targets), cross_entropy(logits, targets))


def test_an_output_without_logits_is_one_message():
    targets = torch.zeros(2, dtype=torch.long)
    given = {"logits": torch.zeros(2, 3)}
    assert torch.equal(cross_entropy(given, targets), cross_entropy(given["logits"], targets))
    with pytest.raises(ConfigError, match=r"the model returns a dict: .*logits"):
        cross_entropy({"scores": torch.zeros(2, 3)}, targets)


# Stages -------------------------------------------------------------------------------------------


BETWEEN_LAYERS = {"vit_b_16": {"class_token", "encoder.pos_embedding"}}


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "swin_t", "vit_b_16"])
@pytest.mark.quick_cases(1)
def test_a_model_is_a_chain_of_layers_under_torchvisions_names(name):
    net = shapes_for_digits(name)
    chain = observed_chain(net, digits())
    assert len(chain.layers) > 10
    held = {id(p) for layer in chain.layers for p in layer.module.parameters()}
    others = {name for name, p in net.named_parameters() if id(p) not in held}
    assert others == BETWEEN_LAYERS.get(name, set())


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet"])
@pytest.mark.thorough
def test_two_stages_train_as_the_model_does(name):
    net = for_digits(name)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(net)
    targets = torch.arange(4)
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, world, chunks=2, split="size", example_inputs=digits())
    assert len(model.stages) == 2
    model.train_step(digits(), targets, nll)
    for images, labels in zip(digits().split(2), targets.split(2), strict=True):
        (nll(plain(images), labels) / 2).backward()
    for (key, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), key


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet81", {}, r"^name=resnet81: .* did you mean 'resnet18'\?"),
        ("zzz", {}, r"^name=zzz: .* the models are: alexnet, "),
        ("fcn_resnet50", {}, r"^name=fcn_resnet50: .* no such classification model"),
        (None, {}, r"^name=None: .* the models are: alexnet"),
        (18, {}, r"^name=18: "),
        ("resnet18", {"num_classes": None}, r"^num_classes=None: pass num_classes="),
        ("resnet18", {"channels": 4}, r"^channels=4: .* 3 color channels, or 1"),
        ("resnet18", {"image_size": None}, r"^image_size=None: pass image_size="),
        ("resnet18", {"image_size": 0}, r"^image_size=0 must be"),
        ("resnet18", {"resize": 2.5}, r"^resize=2\.5 must be"),
        ("vit_b_16", {"resize": 20}, r"images of 20 pixels .*patch.*pass resize="),
        ("alexnet", {"resize": 8}, r"^name=alexnet .*images of 8 pixels"),
        ("resnet18", {"dropout": 0.1}, r"^dropout=0\.1: resnet18 has no such argument"),
        ("alexnet", {"dropout": 1.5}, r"^dropout=1\.5 must be a number of at least 0 and below 1"),
        ("alexnet", {"dropout": "half"}, r"^dropout='half' must be a number"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        shapes_for_digits(name, **changes)


def test_dropout_is_the_models():
    net = shapes_for_digits("alexnet", dropout=0.125)
    assert {m.p for m in net.modules() if isinstance(m, nn.Dropout)} == {0.125}
