"""Samples of the text that a language model generates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from hybridtrain.errors import ConfigError, argument, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.loop.callbacks.tracker import call_hook
from hybridtrain.loop.generation import Prompt, answers, check_generates, prompts_of
from hybridtrain.loss import check_number_of_tokens
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer

_log = logging.getLogger(__name__)

# Of a text without a prompt, the number of tokens to continue.
_START = 16


class Samples(Callback):
    """Shows at each evaluation what the model answers to a few prompts, in the log and trackers.

    It generates greedily with the evaluated weights, through the stages of a pipeline too. The
    prompts come from the first evaluation samples: the text before the last answer, the source of
    a sequence-to-sequence model, or the first 16 tokens of a plain text. Every rank generates.

    Args:
        number: the number of prompts, if there are no `prompts`.
        max_new_tokens: the maximum number of tokens to generate for each prompt.
        prompts: texts to use instead; a tokenizer with a chat template renders each as a message of
            the user.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @names_checked
    def __init__(
        self,
        number: int = 3,
        max_new_tokens: int = 48,
        prompts: Sequence[str] | None = None,
    ) -> None:
        if type(number) is not int or number < 1:
            raise ConfigError(f"{setting('number', number)} must be a whole number of at least 1")
        check_number_of_tokens(max_new_tokens)
        if isinstance(prompts, str) or not all(isinstance(text, str) for text in prompts or []):
            raise ConfigError(f"{setting('prompts', prompts)} must be a list of texts")
        self._number, self._texts, self._most = number, prompts, max_new_tokens
        self._prompts: list[Prompt] = []

    def on_init(self, trainer: Trainer) -> None:
        """Reads the prompts.

        Raises:
            ConfigError: the model generates no text, or there is no evaluation with a tokenizer.
        """
        evaluation = trainer.evaluation
        if evaluation is None or evaluation.tokenizer is None:
            raise ConfigError(
                "samples of generated text need an evaluation split and the tokenizer of a model "
                "of transformers: use data=datasets or data=chat"
            )
        check_generates(trainer.model)
        if self._texts is not None:
            self._prompts = [_prompt(evaluation.tokenizer, text) for text in self._texts]
            return
        if not hasattr(evaluation.dataset, "__getitem__"):
            raise ConfigError(
                f"the evaluation is a stream, so its first samples are not known: set "
                f"{argument('prompts')}"
            )
        self._prompts = []
        for number in range(min(self._number, len(evaluation.dataset))):
            sample = evaluation.dataset[number]
            inputs, labels = tree_map_only(torch.Tensor, lambda x: x[None], sample)
            self._prompts += prompts_of(inputs, labels, start=_START)

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Generates, logs the texts, and passes them to the trackers."""
        generated = answers(trainer.model, self._prompts, self._most)
        if not trainer.world.is_main:
            return
        assert trainer.evaluation is not None
        decode = trainer.evaluation.tokenizer.decode
        shown: dict[str, str] = {}
        for number, (prompt, ids) in enumerate(zip(self._prompts, generated, strict=True), 1):
            texts = {"prompt": prompt.ids, "generated": ids, "reference": prompt.reference}
            parts = {
                name: decode(tokens, skip_special_tokens=True).strip()
                for name, tokens in texts.items()
                if tokens is not None
            }
            line = "  ".join(f"{name} {text!r}" for name, text in parts.items())
            _log.info("step %d, sample %d: %s", trainer.step, number, line)
            shown[f"samples/{number}"] = "\n\n".join(f"{n}: {text}" for n, text in parts.items())
        for callback in trainer.callbacks:
            call_hook(callback, "on_texts", trainer, shown)


def _prompt(tokenizer: Any, text: str) -> Prompt:
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        coded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return Prompt(torch.tensor(coded["input_ids"]))
    return Prompt(torch.tensor(tokenizer(text)["input_ids"]))
