"""Models that others wrote train in stages as they do unsplit; `scripts/zoo.py` has all of them.

The smallest of each family of torchvision, on images as small as it takes. VGG is left out, since
it is AlexNet with half a gigabyte of weights, and so is MaxVit, which takes no small images.
"""

import copy
import gc

import pytest
from support.zoo import (
    difference,
    torchvision_case,
    traced_by,
    train_in_stages,
    train_plain,
    transformers_case,
    without_dropout,
)

STAGES = (2, 4)

# The height and width of the images; 32 for the others. With 64 some gradients of ConvNeXt are laid
# out in memory otherwise than the values that they belong to.
SIZES = {"alexnet": 63, "convnext_tiny": 64, "inception_v3": 75}

FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vit_b_16",
]

# Models of transformers, with the parameter that both the first and the last layer use, if any.
TIED = {
    "BertForSequenceClassification": None,
    "GPT2LMHeadModel": "transformer.wte.weight",
    "ViTForImageClassification": None,
}


@pytest.fixture(autouse=True)
def _models_are_let_go(one_intra_op_thread):
    yield
    gc.collect()


def images(name):
    # the auxiliary classifier of Inception takes images of 299 x 299
    options = {"aux_logits": False} if name == "inception_v3" else {}
    return torchvision_case(name, SIZES.get(name, 32), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_torchvision_trains_in_stages_as_it_does_unsplit(name):
    case = images(name)
    without_dropout(case.net)
    nets = [copy.deepcopy(case.net) for _ in STAGES]
    expected = train_plain(case.net, case)
    for stages, net in zip(STAGES, nets, strict=True):
        seen, model = train_in_stages(net, case, stages)
        assert len(model.stages) == stages
        assert difference(seen, expected) == (0.0, "nowhere")


@pytest.mark.parametrize("name", ["efficientnet_b0", "googlenet", "mobilenet_v2", "swin_t"])
def test_the_dropout_of_a_model_of_torchvision_does_not_depend_on_the_split(name):
    case = images(name)
    nets = [copy.deepcopy(case.net) for _ in STAGES]
    quiet = copy.deepcopy(case.net)
    assert without_dropout(quiet)
    expected, _ = train_in_stages(case.net, case, 1)
    for stages, net in zip(STAGES, nets, strict=True):
        seen, _ = train_in_stages(net, case, stages)
        assert difference(seen, expected) == (0.0, "nowhere")
    assert difference(train_plain(quiet, case), expected)[0] > 0.01, "it draws"


@pytest.mark.parametrize("name", TIED)
def test_a_model_of_transformers_trains_in_stages_as_it_does_unsplit(name):
    pytest.importorskip("transformers")
    case = transformers_case(name, layers=2)
    without_dropout(case.net)
    net = copy.deepcopy(case.net)
    expected = train_plain(case.net, case)
    seen, model = train_in_stages(net, case, stages=2)
    assert traced_by(model) == "torch.export"
    if TIED[name] is not None:
        # its gradients come from two stages, and are added up in another order
        tied = f"gradient of {TIED[name]}"
        assert difference({tied: seen.pop(tied)}, {tied: expected.pop(tied)})[0] < 1e-6
    assert difference(seen, expected) == (0.0, "nowhere")
