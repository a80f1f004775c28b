"""`smp.nn`: the layers that PyTorch provides. Tensor-parallel layers are refused by name.

Scripts also import functions that convert states between these layers and those of transformers,
`smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2`. Here a model is a plain transformers
model, so they return the state unchanged. All submodules of `huggingface` are this module.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn import LayerNorm as FusedLayerNorm

from hybridtrain.errors import ConfigError

__all__ = ["FusedLayerNorm"]

__path__: list[str] = []  # an import of a submodule asks for it

_MODELS = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5", "vit")
_MODULES = {"huggingface", *_MODELS}
sys.modules |= {
    f"{__name__}.{name}": sys.modules[__name__]
    for name in ("huggingface", *(f"huggingface.{model}" for model in _MODELS))
}


def _unchanged(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns `state_dict` unchanged: its names are already those of transformers."""
    return state_dict


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return sys.modules[__name__]
    if name.startswith("translate_"):
        return _unchanged
    if name.startswith("Distributed") or name == "FlashAttentionLayer":
        raise ConfigError(
            f"smp.nn.{name} needs tensor parallelism, which is not supported: write the layer in "
            f"plain PyTorch, with torch.nn.functional.scaled_dot_product_attention"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
