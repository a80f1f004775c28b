"""Models of Hugging Face's transformers, by task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridtrain.errors import ConfigError, argument, check_choice, setting
from hybridtrain.models.check import returns

TASKS = {
    "classification": "AutoModelForSequenceClassification",
    "multilabel": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "image_classification": "AutoModelForImageClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
"""The Auto class for each task."""

# the names of tables of absolute positions
_OF_POSITIONS = re.compile(r"(^|[.])(wpe|(embed_)?positions?(_embed(dings?)?)?)$")

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")

DTYPES = ("float32", "bfloat16", "float16")


def _output(arguments: Mapping[str, Any]) -> str:
    kinds = {"regression": "values", "multilabel": "label_logits"}
    return kinds.get(arguments.get("task") or "", "logits")


@returns(_output)
def transformers_model(
    source: str | None = None,
    config: Mapping[str, Any] | None = None,
    task: str | None = None,
    auto: str | None = None,
    num_classes: int | None = None,
    vocab_size: int | None = None,
    pad_index: int | None = None,
    attention: str | None = None,
    dtype: str = "float32",
    classes: Sequence[str] | None = None,
    special_tokens: Mapping[str, int] | None = None,
    max_len: int | None = None,
    longest: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
) -> nn.Module:
    """Returns a transformers model with random weights and the parameter names of transformers.

    Its output has `logits`, as losses chosen by name expect; no labels are passed to the model. To
    load the weights of `source`, set `init_from=<source>`, which each process reads for its own
    stages.

    Args:
        source: a folder with a `config.json`, or a name on the Hub, to take the configuration from.
        config: instead of `source`, a `model_type` and settings that differ from its defaults, such
            as `{model_type: bert, hidden_size: 256}`.
        task: classification, multilabel, regression, token_classification, image_classification,
            causal_lm, masked_lm or seq2seq; None: classification.
        auto: the name of an Auto class of transformers, for other tasks; None: the task's class.
        num_classes: the number of classes, or of predicted numbers in a regression.
        vocab_size: the size of the data's vocabulary; the default of `config.vocab_size`.
        pad_index: the id of the data's padding token.
        attention: the attention implementation, such as eager or sdpa; None: the model's default.
            `sdpa_masked` is sdpa with a mask in every batch: transformers omits the mask for a
            batch without padding, which selects another kernel with slightly different results.
        dtype: the dtype of the parameters: float32, bfloat16 or float16. float32 keeps small
            updates of the optimizer from being rounded away, whatever the source's dtype.
        classes: the class names, for `id2label` in `config.json`.
        special_tokens: ids of the data's tokenizer, such as `eos_token_id`, for the model's
            configuration and generation.
        max_len: the number of tokens to which the data truncates texts.
        longest: the number of tokens of the longest text, if known.
        image_size: pixels per side of the data's images; the default of `config.image_size`.
        channels: color channels of the data's images; the default of `config.num_channels`.

    Raises:
        ConfigError: transformers is not installed, an argument is unknown, or the data does not
            match the model: its vocabulary or texts are too large, it lacks a padding token, its
            images have a different size, or it has texts for an image model or the reverse.
    """
    transformers = _transformers()
    task = task or "classification"
    check_choice("task", task, list(TASKS))
    check_choice("dtype", dtype, DTYPES)
    if (source is None) == (config is None):
        raise ConfigError(
            f"set either {argument('source')} or {argument('config')}, which selects the model"
        )
    labels: dict[str, Any] = {}
    if num_classes is not None and task not in ("causal_lm", "masked_lm", "seq2seq"):
        labels["num_labels"] = num_classes
        if task == "multilabel":
            labels["problem_type"] = "multi_label_classification"
        if classes is not None and task != "regression" and len(classes) == num_classes:
            labels["id2label"] = dict(enumerate(classes))
            labels["label2id"] = {name: number for number, name in enumerate(classes)}
    if source is not None:
        if source.startswith((".", "/", "~")) and not Path(source).expanduser().exists():
            raise ConfigError(
                f"{setting('source', source)}: no such folder ({Path(source).absolute()})"
            )
        try:
            model_config = transformers.AutoConfig.from_pretrained(
                source, trust_remote_code=False, **labels
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting('source', source)}: {_first_line(error)}") from error
    else:
        of_data = {"vocab_size": vocab_size, "image_size": image_size, "num_channels": channels}
        model_config = _from_settings(transformers, dict(config or {}), labels, of_data)
    model_vocab_size = getattr(model_config, "vocab_size", None)
    if vocab_size is not None and model_vocab_size is not None and model_vocab_size < vocab_size:
        raise ConfigError(_too_few_rows(source, auto or TASKS[task], vocab_size, model_vocab_size))
    _take_special_tokens(model_config, special_tokens or {}, pad_index, set(config or {}))
    if (
        task in ("classification", "multilabel", "regression")
        and getattr(model_config, "pad_token_id", 0) is None
    ):
        raise ConfigError(
            "this model classifies by the last token that is not padding, but neither it nor the "
            "tokenizer has a padding token: add one to the tokenizer, or set "
            f"{argument('pad_index')}"
        )
    generation = _generation_config(transformers, source, model_config, special_tokens or {})
    with_cache = getattr(model_config, "use_cache", None)
    model_config.use_cache = False  # the key-value cache is for generation
    name = auto or TASKS[task]
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "from_config"):
        raise ConfigError(f"{setting('auto', name)}: transformers has no such Auto class")
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        model: nn.Module = kind.from_config(model_config, trust_remote_code=False, **options)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{name} of {model_config.model_type}: {_first_line(error)} {setting('task', task)} "
            f"may be the wrong task; choose among {', '.join(TASKS)}"
        ) from error
    model.to_be_saved = {"use_cache": with_cache}  # type: ignore[assignment]
    if getattr(model, "generation_config", None) is not None:
        model.generation_config = generation
    _check_kind_of_data(model, vocab_size, image_size)
    if image_size is not None:
        _check_images(kind, model_config, options, image_size, channels or 3)
    length, positions = longest if longest is not None else max_len, _positions(model)
    if length is not None and max_len is not None and positions is not None:
        length = min(length, max_len)
        if length > positions:
            raise ConfigError(
                f"texts have up to {length} tokens, but the model only has {positions} positions: "
                f"set data.max_len={positions} or less"
            )
    return model


def as_published(net: Any) -> Any:
    """Returns a model of `transformers_model` with its source's settings that training changes.

    Args:
        net: the model; it is modified.
    """
    for name, value in getattr(net, "to_be_saved", {}).items():
        if value is None:
            delattr(net.config, name)
        else:
            setattr(net.config, name, value)
    return net


def _too_few_rows(source: str | None, auto: str, tokens: int, rows: int) -> str:
    """Returns the message for a tokenizer with more tokens than the model's embedding has rows."""
    problem = f"the data has {tokens} tokens, but the model only {rows}: "
    if source is None:
        return f"{problem}set {argument('config')}{{vocab_size: {tokens}, ...}}"
    return (
        f"{problem}use the model's tokenizer, or add the rows once in Python, net = transformers."
        f"{auto}.from_pretrained({source!r}); net.resize_token_embeddings({tokens}); "
        f"net.save_pretrained('resized'), and set {setting('source', 'resized')} and "
        f"data.tokenizer= to this tokenizer"
    )


def _generation_config(
    transformers: Any, source: str | None, config: Any, tokens: Mapping[str, int]
) -> Any:
    """Returns the generation settings of `source`, or else those that `config` implies.

    The tokenizer's end-of-text token is added: training has taught it. Missing ids are the data's.
    """
    generation = None
    if source is not None:
        try:
            generation = transformers.GenerationConfig.from_pretrained(source)
        except (OSError, ValueError):  # the source has no such file
            generation = None
    if generation is None:
        generation = transformers.GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if (end := tokens.get("eos_token_id")) is not None and end not in known:
        generation.eos_token_id = [end, *known] if known else end
    for name in ("bos_token_id", "pad_token_id"):
        if getattr(generation, name) is None and name in tokens:
            setattr(generation, name, tokens[name])
    if "decoder_start_token_id" in tokens:
        generation.decoder_start_token_id = tokens["decoder_start_token_id"]
    return generation


def _check_kind_of_data(model: nn.Module, vocab_size: int | None, image_size: int | None) -> None:
    """Refuses texts for an image model, and images for a text model."""
    takes = getattr(model, "main_input_name", None)
    if takes == "pixel_values" and vocab_size is not None and image_size is None:
        raise ConfigError(
            f"{type(model).__name__} takes images, but the data set has texts: choose a text model "
            f"or an image data set"
        )
    if takes == "input_ids" and image_size is not None and vocab_size is None:
        raise ConfigError(
            f"{type(model).__name__} takes token ids, but the data set has images: choose an image "
            f"model ({argument('source')} or {argument('config')}), with "
            f"{setting('task', 'image_classification')}, or a text data set"
        )


def _check_images(kind: Any, config: Any, how: Mapping[str, Any], side: int, channels: int) -> None:
    """Refuses images that the model rejects only in its forward.

    Some models accept images of other sizes than configured.
    """
    size = getattr(config, "image_size", side)
    sizes = {*size} if isinstance(size, list | tuple) else {size}
    if sizes == {side} and getattr(config, "num_channels", channels) == channels:
        return
    with torch.random.fork_rng([]), torch.device("meta"):
        net = kind.from_config(config, trust_remote_code=False, **how)
        images = torch.empty(2, channels, side, side, dtype=how["dtype"])
        try:
            net(pixel_values=images)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{type(net).__name__} does not accept the images of the data set, {side} x {side} "
                f"pixels with {channels} color channels: {_first_line(error)} Set data.image_size= "
                "to the size of the model; or remove image_size and num_channels from "
                f"{argument('config')}"
            ) from error


def _take_special_tokens(
    config: Any, tokens: Mapping[str, int], pad_index: int | None, settings: set[str]
) -> None:
    """Sets the data's special tokens in a model's configuration, unless `settings` has them.

    Removes a default id outside the vocabulary.
    """
    ids = dict(tokens)
    if pad_index is not None:
        ids["pad_token_id"] = pad_index
    size = getattr(config, "vocab_size", None)
    for name in _SPECIAL_TOKENS:
        current = getattr(config, name, None)
        if name in settings or (isinstance(current, list) and ids.get(name) in current):
            continue
        if name in ids and (name != "sep_token_id" or hasattr(config, name)):
            setattr(config, name, ids[name])
        elif isinstance(current, int) and isinstance(size, int) and current >= size:
            setattr(config, name, None)
    start = "decoder_start_token_id"
    if start in ids and start not in settings:
        setattr(config, start, ids[start])


def _positions(model: nn.Module) -> int | None:
    """Returns the number of positions that the model supports; None without position embeddings.

    In RoBERTa and others, positions start after the padding index, in OPT and BART after an offset.
    """
    table_sizes = [
        module.num_embeddings
        - (getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _OF_POSITIONS.search(name)
    ]
    return min(table_sizes, default=None)


def _from_settings(
    transformers: Any,
    settings: dict[str, Any],
    labels: Mapping[str, Any],
    of_data: dict[str, Any],
) -> Any:
    kind = settings.pop("model_type", None)
    model_types = sorted(transformers.CONFIG_MAPPING)
    if kind is None:
        raise ConfigError(f"{argument('config')} needs a model_type, such as bert or gpt2")
    check_choice("config.model_type", kind, model_types)
    default = transformers.AutoConfig.for_model(kind)
    size = settings.get("vocab_size", of_data["vocab_size"])
    of_data = {
        name: value
        for name, value in of_data.items()
        if value is not None and isinstance(getattr(default, name, None), int)
    }
    if unknown := [key for key in settings if not hasattr(default, key)]:
        raise ConfigError(f"config.{unknown[0]}: a model of type {kind} has no such setting")
    # ids of the default vocabulary, which `_take_special_tokens` replaces
    for name in _SPECIAL_TOKENS:
        token = getattr(default, name, None)
        if isinstance(size, int) and isinstance(token, int) and token >= size:
            of_data[name] = None
    return transformers.AutoConfig.for_model(kind, **{**of_data, **settings, **labels})


@cache
def _transformers() -> Any:
    """Returns the package, with `sdpa_masked`.

    The registration happens once, before any model is built.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "transformers models require pip install 'hybridtrain[transformers]'"
        ) from error
    _register_sdpa_masked(transformers)
    return transformers


def _register_sdpa_masked(transformers: Any) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    never = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    transformers.AttentionInterface.register("sdpa_masked", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(
        "sdpa_masked", lambda *args, **settings: sdpa_mask(*args, **{**settings, **never})
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
