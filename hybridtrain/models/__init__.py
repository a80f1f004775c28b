"""Models: one function each, from plain arguments to an `nn.Module`.

Each function is the `_target_` of a file in `configs/model/`, and its parameters are that file's
keys. Models written for this project return an `nn.Sequential`, which the pipeline splits between
its elements: each takes one argument and returns one value; both may be a tuple of tensors, batch
first. Invalid arguments raise a `ConfigError` that names them. `returns` declares whether a model
returns logits, log-probabilities, values or its own loss, which determines the loss of a run.

A wrapper takes the module of any model and returns the module to train; its name is a key of
`model`.
"""

from typing import TYPE_CHECKING

from hybridtrain._base.registry import import_on_first_use
from hybridtrain.models.check import loss_of_model as loss_of_model
from hybridtrain.models.check import returns as returns

if TYPE_CHECKING:
    from hybridtrain.models.basicnet import basicnet
    from hybridtrain.models.gpt import gpt
    from hybridtrain.models.lora import lora as lora
    from hybridtrain.models.quantized import quantize as quantize
    from hybridtrain.models.tabular_mlp import tabular_mlp
    from hybridtrain.models.timm_models import timm_model
    from hybridtrain.models.torchvision_models import torchvision_model
    from hybridtrain.models.transformer import transformer
    from hybridtrain.models.transformers_models import transformers_model

WRAPPERS = {
    "quantize": "hybridtrain.models.quantized:quantize",
    "lora": "hybridtrain.models.lora:lora",
}
"""Functions that change a model after its creation, in this order, by the key of `model`; each as
`module:function`."""

__all__ = [
    "basicnet",
    "gpt",
    "tabular_mlp",
    "timm_model",
    "torchvision_model",
    "transformer",
    "transformers_model",
]

import_on_first_use(
    __name__,
    [
        "hybridtrain.models.basicnet:basicnet",
        "hybridtrain.models.gpt:gpt",
        "hybridtrain.models.tabular_mlp:tabular_mlp",
        "hybridtrain.models.timm_models:timm_model",
        "hybridtrain.models.torchvision_models:torchvision_model",
        "hybridtrain.models.transformer:transformer",
        "hybridtrain.models.transformers_models:transformers_model",
        *WRAPPERS.values(),
    ],
)
