"""Models that others wrote compute in stages what they do unsplit; `scripts/zoo.py` has them all.

The smallest of each family of torchvision, on images as small as it takes. VGG is left out, since
it is AlexNet with half a gigabyte of weights, and so is MaxVit, which takes no small images.
"""

import gc

import pytest
from support.cases import thorough
from support.zoo import (
    TRANSFORMERS,
    in_stages,
    loss_fn,
    torchvision_case,
    transformers_case,
    verified,
)

from hybridtrain.errors import UserError

# The height and width of the images; 32 for the others. With 64 some gradients of ConvNeXt
# have another memory format than their values.
SIZES = {"alexnet": 63, "convnext_tiny": 64, "inception_v3": 75}

FAMILIES = ["mobilenet_v3_small", "resnet18"]
MORE_FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "mnasnet0_5",
    "mobilenet_v2",
    "regnet_y_400mf",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vit_b_16",
]
LANGUAGE = ["GPT2LMHeadModel"]
SEEDS_ITSELF = "ReformerModelWithLMHead"
MORE_OF_TRANSFORMERS = [name for name in TRANSFORMERS if name not in (*LANGUAGE, SEEDS_ITSELF)]


@pytest.fixture(autouse=True)
def _models_are_let_go(one_intra_op_thread):
    yield
    gc.collect()


@pytest.mark.parametrize("name", [*FAMILIES, *thorough(MORE_FAMILIES)])
@pytest.mark.quick_cases("resnet18")
def test_a_model_of_torchvision_computes_in_stages_what_it_does_unsplit(name):
    # the auxiliary classifier of Inception takes images of 299 x 299
    options = {"aux_logits": False} if name == "inception_v3" else {}
    case = torchvision_case(name, SIZES.get(name, 32), **options)
    comparison = verified(in_stages(case, 3), case)
    assert comparison.bitwise, comparison


@pytest.mark.parametrize("name", [*LANGUAGE, *thorough(MORE_OF_TRANSFORMERS)])
@pytest.mark.thorough
def test_a_model_of_transformers_computes_in_stages_what_it_does_unsplit(name):
    case = transformers_case(name, layers=2 if name in LANGUAGE else 4)
    comparison = verified(in_stages(case, 2), case)
    assert comparison.bitwise, comparison


def test_a_model_that_seeds_its_dropout_itself_is_refused():
    case = transformers_case(SEEDS_ITSELF, layers=2)
    model = in_stages(case, 2)
    with pytest.raises(UserError, match="sets the state of the random generator"):
        model.train_step(case.inputs, case.targets, loss_fn)
