"""Models of Hugging Face's transformers, by task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridtrain.errors import ConfigError, check_choice

TASKS = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
"""The class that makes a model for a task."""

DTYPES = ("float32", "bfloat16", "float16")


def transformers_model(
    source: str | None = None,
    config: Mapping[str, Any] | None = None,
    task: str = "classification",
    auto: str | None = None,
    num_classes: int | None = None,
    vocab_size: int | None = None,
    pad_index: int | None = None,
    attention: str | None = None,
    dtype: str = "float32",
) -> nn.Module:
    """Returns a model of transformers with random weights and the parameter names of transformers.

    Its output has `logits`, which the losses that are chosen by name take; no labels are passed
    to the model. The weights of `source` are those of `init_from=<source>`, which each process
    reads for its own stages.

    Args:
        source: a folder with a `config.json`, or a name on the Hub, whose configuration it has.
        config: instead, `model_type` and what differs from its defaults, such as
            `{model_type: bert, hidden_size: 256}`.
        task: classification, regression, image_classification, causal_lm, masked_lm or seq2seq.
        auto: an Auto class of transformers by its name, for other tasks; None: that of the task.
        num_classes: classes, or numbers, that it predicts; for classification and regression.
        vocab_size: tokens in the vocabulary of the data; a `config` without one takes it.
        pad_index: the padding's token id, likewise.
        attention: how attention is computed, such as eager or sdpa; None: the model's default.
        dtype: of the parameters: float32, bfloat16 or float16. In float32, also where the source
            was saved in another, the optimizer's small steps are not rounded away.

    Raises:
        ConfigError: transformers is not installed, an argument is unknown, or the data has tokens
            that the model does not.
    """
    transformers = _transformers()
    check_choice("task", task, list(TASKS))
    check_choice("dtype", dtype, DTYPES)
    if (source is None) == (config is None):
        raise ConfigError("give either source= or config=, not both: what model is it?")
    labels = {}
    if num_classes is not None and task in ("classification", "regression", "image_classification"):
        labels["num_labels"] = num_classes
    if source is not None:
        if source.startswith((".", "/", "~")) and not Path(source).expanduser().exists():
            raise ConfigError(
                f"source={source}: there is no such folder ({Path(source).absolute()})"
            )
        try:
            made = transformers.AutoConfig.from_pretrained(
                source, trust_remote_code=False, **labels
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"source={source}: {_first_line(error)}") from error
    else:
        made = _from_settings(transformers, dict(config or {}), labels, vocab_size, pad_index)
    known = getattr(made, "vocab_size", None)
    if vocab_size is not None and known is not None and known < vocab_size:
        raise ConfigError(
            f"the data has {vocab_size} tokens, and the model {known}: take the tokenizer of the "
            f"model"
        )
    made.use_cache = False  # of keys and values, for generation; stages cannot pass it on
    name = auto or TASKS[task]
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "from_config"):
        raise ConfigError(f"auto={name}: transformers has no such Auto class")
    how: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attention is not None:
        how["attn_implementation"] = attention
    try:
        model: nn.Module = kind.from_config(made, trust_remote_code=False, **how)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{name} of {made.model_type}: {_first_line(error)}") from error
    return model


def _from_settings(
    transformers: Any,
    settings: dict[str, Any],
    labels: Mapping[str, Any],
    vocab_size: int | None,
    pad_index: int | None,
) -> Any:
    kind = settings.pop("model_type", None)
    known = sorted(transformers.CONFIG_MAPPING)
    if kind is None:
        raise ConfigError("config= needs a model_type, such as bert or gpt2")
    check_choice("config.model_type", kind, known)
    of_data = {"vocab_size": vocab_size, "pad_token_id": pad_index}
    of_data = {key: value for key, value in of_data.items() if value is not None}
    default = transformers.AutoConfig.for_model(kind)
    if unknown := [key for key in settings if not hasattr(default, key)]:
        raise ConfigError(f"config.{unknown[0]}: a model of type {kind} has no such setting")
    return transformers.AutoConfig.for_model(kind, **{**of_data, **settings, **labels})


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "models of transformers need pip install 'hybridtrain[transformers]'"
        ) from error
    return transformers


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
