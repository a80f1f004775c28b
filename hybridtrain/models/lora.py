"""LoRA with the library PEFT: trains low-rank matrices next to frozen weights.

Source: E. Hu et al., LoRA, 2021 (arXiv:2106.09685); DoRA: S. Liu et al., 2024 (arXiv:2402.09353).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hybridtrain._base.adapter import put_adapter
from hybridtrain.errors import ConfigError, argument, check_choice, closest, phrase, setting
from hybridtrain.models.quantized import QuantizedLinear, is_linear, without_dequantizing

INITS: dict[str, bool | str] = {
    "default": True,
    "gaussian": "gaussian",
    "orthogonal": "orthogonal",
}
"""Initializations of the matrices, by PEFT's names. Those that change the base's weights (pissa,
olora) are excluded, because the adapter would no longer match the base that it names."""

ALL_LINEAR = "all-linear"

_ADAPTER = "default"  # PEFT's name for the only adapter
# PEFT's names of modules around the base's modules.
_WRAPPED = re.compile(rf"\.(base_layer|original_module|modules_to_save\.{_ADAPTER})(?=\.)")
_ADDED = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.")
# PEFT's task, by the suffix of a transformers class name.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
# The heads that a pretrained base lacks, by PEFT's names.
_HEADS = ("classifier", "score")


def lora(
    net: nn.Module,
    rank: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Sequence[str] | None = None,
    modules_to_save: Sequence[str] | None = None,
    dora: bool = False,
    init: str = "default",
) -> nn.Module:
    """Returns `net` with LoRA in some of its layers; everything else is frozen.

    Modules and parameters have PEFT's names. The matrices for a half-precision base are float32, as
    in PEFT.

    Args:
        net: a model of transformers, or any other; it is modified.
        rank: the rank of the matrices.
        alpha: the matrices' product is multiplied by alpha / rank; None: 2 x rank.
        dropout: the dropout probability before the matrices.
        targets: names of linear layers, convolutions or embeddings, or suffixes of names, such as
            `[q_proj, v_proj]`; `all-linear`: all linear layers but the output's; None: PEFT's
            choice for the model type.
        modules_to_save: names, or suffixes of names, of modules to train as a whole; None: the
            head of a classifier.
        dora: train the magnitudes of the weights as well.
        init: `default`, `gaussian` or `orthogonal`; see `INITS`.

    Raises:
        ConfigError: PEFT is not installed, a number is out of range, or a name is not one of the
            model's modules.
    """
    peft = _peft()
    for name, value, low in (("rank", rank, 1), ("dropout", dropout, 0)):
        if isinstance(value, bool) or not isinstance(value, Real) or value < low:
            raise ConfigError(f"{setting(name, value)} must be a number of at least {low}")
    if not isinstance(rank, int):
        raise ConfigError(f"{setting('rank', rank)} must be a whole number")
    if dropout >= 1:
        raise ConfigError(f"{setting('dropout', dropout)} must be below 1")
    alpha = 2 * rank if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or alpha <= 0:
        raise ConfigError(f"{setting('alpha', alpha)} must be a number above 0")
    check_choice("init", init, INITS)
    chosen = _targets(peft, net, targets)
    whole = _whole_modules(net, modules_to_save)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=chosen,
        modules_to_save=whole or None,
        use_dora=dora,
        init_lora_weights=INITS[init],
        task_type=next((t for end, t in _TASKS.items() if type(net).__name__.endswith(end)), None),
    )
    # only DoRA needs the values of the base
    formats_alone = nullcontext() if dora else without_dequantizing()
    with warnings.catch_warnings(), formats_alone:
        # fan_in_fan_out follows from the layers
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        try:
            net = peft.inject_adapter_in_model(config, net, _ADAPTER)
        except (ValueError, NotImplementedError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{argument('targets')}: {reason}") from error
    for name, parameter in net.named_parameters():
        if _ADDED.search(name) and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    put_adapter(net, LoraAdapter(config))
    return net


@dataclass(frozen=True)
class LoraAdapter:
    """The names of PEFT's tensors in a model, and its files; see `Adapter`.

    Attributes:
        config: PEFT's `LoraConfig`.
    """

    config: Any

    def base_name(self, name: str) -> str | None:
        """Returns the name of a tensor in the plain base, or None for an adapter tensor."""
        return None if _ADDED.search(f".{name}") else _WRAPPED.sub("", f".{name}")[1:]

    def is_replaced(self, name: str) -> bool:
        """Returns whether a tensor is PEFT's unused copy of a module in `modules_to_save`."""
        return ".original_module." in f".{name}"

    def train_whole(self, layers: Sequence[str]) -> str:
        """Returns the setting that also trains `layers` as a whole."""
        names = [*layers, *(self.config.modules_to_save or ())]
        return f"{argument('modules_to_save', 'lora')}[{','.join(names)}]"

    @torch.no_grad()
    def follow_base(self, net: nn.Module) -> None:
        """Sets DoRA's magnitudes to those of the base's weights."""
        for _, module in _layers(net):
            if _ADAPTER not in getattr(module, "lora_variant", {}):
                continue
            if any(parameter.is_meta for parameter in module.parameters()):
                continue  # another process's
            magnitudes = module.lora_magnitude_vector
            magnitude = magnitudes[_ADAPTER]  # the parameter that the optimizer references
            module.lora_variant[_ADAPTER].init(module, adapter_name=_ADAPTER)
            magnitude.weight.copy_(magnitudes[_ADAPTER].weight)
            magnitudes[_ADAPTER] = magnitude

    def merged(self, net: nn.Module) -> nn.Module:
        """Returns the base with W + alpha / rank B A instead of W, and the trained modules.

        Quantized weights are dequantized.
        """
        for name, module in [*_layers(net)]:
            base = module.base_layer
            if isinstance(base, QuantizedLinear):
                module.base_layer = base.plain()
            module.merge()
            layer = module.get_base_layer()
            net.set_submodule(
                name, base.as_replaced(layer) if isinstance(base, QuantizedLinear) else layer
            )
        for name, base in [*net.named_modules()]:  # without an adapter
            if isinstance(base, QuantizedLinear):
                net.set_submodule(name, base.as_replaced(base.plain()))
        for name, module in [*_saved_whole(net)]:
            net.set_submodule(name, module.modules_to_save[_ADAPTER])
        return net

    def write(self, folder: Path, net: nn.Module, state: Mapping[str, Tensor], base: str) -> None:
        """Writes `adapter_model.safetensors` and `adapter_config.json`, as PEFT does."""
        peft = _peft()
        config = copy(self.config)
        config.base_model_name_or_path = base or None
        config.inference_mode = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT does not find the base on the Hub
            tensors = peft.get_peft_model_state_dict(
                net, state_dict=dict(state), adapter_name=_ADAPTER, save_embedding_layers=False
            )
        save_file(
            {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()},
            folder / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        config.save_pretrained(str(folder))


def _layers(net: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in net.named_modules() if isinstance(module, LoraLayer))


def _saved_whole(net: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.utils import ModulesToSaveWrapper

    modules = net.named_modules()
    return ((name, module) for name, module in modules if isinstance(module, ModulesToSaveWrapper))


def _targets(
    peft: Any, net: nn.Module, targets: str | Sequence[str] | None
) -> str | list[str] | None:
    """Returns the target modules after checking that the model has them."""
    linear = _linear_names(net)
    if targets is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as OF_TYPE

        kind = getattr(getattr(net, "config", None), "model_type", None)
        if kind in OF_TYPE:
            default: Any = OF_TYPE[kind]
            return default if isinstance(default, str) else [*default]
        what = f"a model of type {kind}" if kind else f"a {type(net).__name__}"
        raise ConfigError(
            f"{argument('targets')} has no default for {what}: name some of its layers, "
            + (f"such as {', '.join(linear[:6])}, or {ALL_LINEAR}" if linear else "by their names")
        )
    if targets == ALL_LINEAR:
        if not linear:
            raise ConfigError(
                f"{setting('targets', targets)}: a {type(net).__name__} has no linear layer"
            )
        if hasattr(net, "get_output_embeddings"):
            return ALL_LINEAR
        names = [name for name, module in net.named_modules() if is_linear(module)]
        return names[:-1] or names
    names = [targets] if isinstance(targets, str) else [*targets]
    if not names:
        raise ConfigError(f"{argument('targets')}[] names no layer")
    for name in names:
        _check_name("targets", name, net, linear)
    return names


def _whole_modules(net: nn.Module, names: Sequence[str] | None) -> list[str]:
    if names is None:
        if not type(net).__name__.endswith("Classification"):
            return []
        return [name for name in _HEADS if any(True for _ in _matching(net, name))]
    names = [names] if isinstance(names, str) else [*names]
    for name in names:
        _check_name("modules_to_save", name, net, [name for name, _ in net.named_children()])
        _check_not_quantized(name, net)
    return names


def _check_not_quantized(name: str, net: nn.Module) -> None:
    """Refuses to train modules as a whole that have quantized weights."""
    quantized = {
        name if part == module else part.rpartition(".")[2]: layer.kind
        for module in _matching(net, name)
        for part, layer in net.get_submodule(module).named_modules(prefix=module)
        if isinstance(layer, QuantizedLinear)
    }
    if quantized:
        kind, keep = next(iter(quantized.values())), ", ".join(quantized)
        way_out = phrase("pass keep= to quantize", kind=kind, keep=keep)
        raise ConfigError(
            f"{setting('modules_to_save', name)}: the weights of {keep} are quantized, so they "
            f"cannot be trained: {way_out}"
        )


def _check_name(key: str, name: str, net: nn.Module, examples: Sequence[str]) -> None:
    if any(True for _ in _matching(net, name)):
        return
    parts = {module.rpartition(".")[2] for module, _ in net.named_modules() if module}
    close = closest(str(name), parts)
    raise ConfigError(
        f"{setting(key, name)}: a {type(net).__name__} has no such module; "
        + (f"did you mean {close!r}?" if close else f"it has {', '.join(examples[:8])}")
    )


def _matching(net: nn.Module, name: str) -> Iterator[str]:
    """Yields the modules with this name or name suffix, as PEFT matches them."""
    for module, _ in net.named_modules():
        if module and (module == name or module.endswith(f".{name}")):
            yield module


def _linear_names(net: nn.Module) -> list[str]:
    """Returns the last parts of the names of linear layers, without duplicates."""
    names = (name for name, module in net.named_modules() if is_linear(module))
    return [*dict.fromkeys(name.rpartition(".")[2] for name in names)]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"LoRA needs PEFT: pip install 'hybridtrain[peft]' ({error})") from error
    return peft
