"""Counts for `output.loss` of transformers models, which compute the loss from their labels.

The rules follow transformers 5.23 (`loss/loss_utils.py`, and the models' forwards). A rule is only
used if the source of the model's forward matches it; other models are refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hybridtrain.errors import BatchError, ConfigError, setting
from hybridtrain.loss.by_name import CountFn
from hybridtrain.loss.metrics import IGNORED

WAY_OUT = (
    "pass its count: MeanLoss(model_output, lambda inputs, _: "
    '(inputs["labels"] != -100).sum()), with inputs["labels"][:, 1:] for a causal language model'
)


def count_of_output(net: nn.Module) -> CountFn:
    """Returns `count(inputs, targets)`, the number of elements that `output.loss` is a mean over.

    - causal language models: the labels from the second on that are not -100;
    - masked language models, token classification, encoders with decoders: the labels that are
      not -100;
    - classification of samples, multiple choice: the samples with a label that is not -100;
    - question answering: the samples; their positions must lie within the sequence.

    Raises:
        ConfigError: the forward of `net` matches no rule.
    """
    for module in _inside(net):
        config, name = getattr(module, "config", None), type(module).__name__
        configs = config, getattr(config, "text_config", None)
        for term in ("output_router_logits", "z_loss_coefficient"):
            if any(getattr(settings, term, 0) for settings in configs):
                raise ConfigError(
                    f"{setting('loss', 'model_output')}: {name} adds a second loss, which is not "
                    f"a mean over labels: set {term}=0 in its config, or {WAY_OUT}"
                )
        try:
            source = inspect.getsource(inspect.unwrap(type(module).forward))
        except (OSError, TypeError):
            source = ""
        count = _RULES.get(_rule(module, name, source))
        if count is not None:
            return _attended if count is _valid and "active_loss" in source else count
    raise ConfigError(
        f"{setting('loss', 'model_output')}: it is unknown what {type(net).__name__} averages its "
        f"loss over; {WAY_OUT}"
    )


def _inside(net: nn.Module) -> Iterator[nn.Module]:
    """Yields `net` and, if it is a wrapper such as PEFT's, the modules inside it in turn.

    A wrapper may change the loss; the check of the first step detects that.
    """
    while True:
        yield net
        base = getattr(net, "get_base_model", None)
        children = [base()] if callable(base) else list(net.children())
        if len(children) != 1 or children[0] is net:
            return
        net = children[0]


def _rule(net: nn.Module, name: str, source: str) -> str:
    """Returns the key of `_RULES` that the forward of `net` matches, or an empty string."""
    if "self.loss_function(" in source:
        return "" if "shift_labels" in source else getattr(net.loss_function, "__name__", "")
    suffix, config = name[name.rfind("For") :], getattr(net, "config", None)
    if suffix == "ForConditionalGeneration" and not getattr(config, "is_encoder_decoder", False):
        return ""
    answers = suffix == "ForQuestionAnswering"
    accepted = [["ignore_index=ignored_index"]] if answers else [[""], ["ignore_index=-100"]]
    return suffix if re.findall(r"CrossEntropyLoss\((.*?)\)", source) in accepted else ""


def _labels(inputs: Any) -> Tensor:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor):
        raise BatchError(
            f"{setting('loss', 'model_output')}: the inputs must be a mapping with labels"
        )
    for name in ("num_items_in_batch", "output_router_logits"):
        if inputs.get(name) not in (None, False):
            raise BatchError(f"{setting('loss', 'model_output')}: remove {name} from the inputs")
    return labels


def _shifted(inputs: Any, _: Any) -> Tensor:
    return (_labels(inputs)[..., 1:] != IGNORED).sum()


def _valid(inputs: Any, _: Any) -> Tensor:
    return (_labels(inputs) != IGNORED).sum()


def _attended(inputs: Any, _: Any) -> Tensor:
    valid = _labels(inputs) != IGNORED
    mask = inputs.get("attention_mask")
    return (valid if mask is None else valid & (mask == 1)).sum()


def _samples(inputs: Any, _: Any) -> Tensor | int:
    labels = _labels(inputs)
    return len(labels) if labels.is_floating_point() else (labels != IGNORED).sum()


def _answers(inputs: Any, _: Any) -> int:
    named = inputs if isinstance(inputs, Mapping) else {}
    positions: list[Any] = [named.get(name) for name in ("start_positions", "end_positions")]
    tokens: Any = named.get("input_ids", named.get("inputs_embeds"))
    if not all(isinstance(tensor, Tensor) for tensor in (*positions, tokens)):
        raise BatchError(
            f"{setting('loss', 'model_output')}: the inputs must be a mapping with input_ids, "
            "start_positions and end_positions"
        )
    if any(int(position.max()) >= tokens.shape[1] for position in positions):
        raise BatchError(
            f"{setting('loss', 'model_output')}: an answer lies outside its sequence; its start "
            "and end would be ignored independently of each other: remove such samples"
        )
    return int(positions[0].shape[0])


_RULES: dict[str, CountFn] = {
    "ForCausalLMLoss": _shifted,
    "ForMaskedLMLoss": _valid,
    "ForTokenClassification": _valid,
    "ForSequenceClassificationLoss": _samples,
    "ForQuestionAnsweringLoss": _answers,
    # models that call a PyTorch loss, by the suffix of their names
    "ForMaskedLM": _valid,
    "ForConditionalGeneration": _valid,
    "ForSequenceClassification": _samples,
    "ForImageClassification": _samples,
    "ForMultipleChoice": _samples,
    "ForNextSentencePrediction": _samples,
    "ForQuestionAnswering": _answers,
}
