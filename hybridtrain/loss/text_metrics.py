"""Metrics of generated texts by name: exact match and ROUGE, the latter from torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, setting

_ROUGE = ("rouge1", "rouge2", "rougeL")

# Scores are added as whole multiples of its inverse, so that the sum does not depend on the order.
# An int64 holds the sum of two billion scores of 1, or of 21 million scores of 100.
_UNIT = 1 << 32


class OfTexts(nn.Module):
    """The mean over all samples of scores that compare a generated text with its reference.

    An evaluation generates the texts for it, see `hybridtrain.loop.generation`.

    Attributes:
        max_new_tokens: the maximum number of tokens to generate per sample.
        dist_sync_fn: gathers a tensor of sums from all replicas; None with a single replica.

    Raises:
        ConfigError: `max_new_tokens` is not a positive whole number.
    """

    higher_is_better = True
    names: Sequence[str] = ()
    sums: Tensor

    def __init__(self, max_new_tokens: int = 64) -> None:
        super().__init__()
        check_number_of_tokens(max_new_tokens)
        self.max_new_tokens = max_new_tokens
        self.dist_sync_fn: Callable[[Tensor], list[Tensor]] | None = None
        # the sum of each score, in units, and the number of samples
        sums = torch.zeros(len(self.names) + 1, dtype=torch.int64)
        self.register_buffer("sums", sums, persistent=False)

    def reset(self) -> None:
        """Resets the metric."""
        self.sums.zero_()

    def update(self, texts: Sequence[str], references: Sequence[str]) -> None:
        """Adds the texts of a batch."""
        for text, reference in zip(texts, references, strict=True):
            values = [*(round(_UNIT * score) for score in self.scores(text, reference)), 1]
            self.sums += torch.tensor(values).to(self.sums.device)

    def scores(self, text: str, reference: str) -> list[float]:
        """Returns each score of a text, in the order of `names`."""
        raise NotImplementedError

    def compute(self) -> Any:
        """Returns the means, by name if there are several; NaN without texts."""
        gather = self.dist_sync_fn or (lambda sums: [sums])
        sums = torch.stack(gather(self.sums)).sum(0)
        means = (sums[:-1].double() / _UNIT / sums[-1]).unbind()
        return means[0] if len(means) == 1 else dict(zip(self.names, means, strict=True))


class ExactMatch(OfTexts):
    """The share of texts that equal their references, apart from white space at the ends."""

    names = ("exact_match",)

    def scores(self, text: str, reference: str) -> list[float]:
        """See `OfTexts`."""
        return [float(text.strip() == reference.strip())]


class Rouge(OfTexts):
    """The F-measures ROUGE-1, ROUGE-2 and ROUGE-L, without stemming, 0 to 1.

    Source: C.-Y. Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004.
    """

    names = _ROUGE

    def scores(self, text: str, reference: str) -> list[float]:
        """See `OfTexts`."""
        from torchmetrics.functional.text import rouge_score  # takes long to import

        values = rouge_score(text, reference, rouge_keys=_ROUGE)
        return [float(values[f"{name}_fmeasure"]) for name in self.names]


TEXT_METRICS: dict[str, Callable[..., OfTexts]] = {"exact_match": ExactMatch, "rouge": Rouge}


def check_number_of_tokens(number: Any) -> None:
    """Raises a ConfigError unless it is a positive whole number."""
    if type(number) is not int or number < 1:
        raise ConfigError(
            f"{setting('max_new_tokens', number)} must be a whole number of at least 1"
        )
