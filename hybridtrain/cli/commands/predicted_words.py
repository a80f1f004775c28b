"""Predictions for the words of a text: a class and a probability each, and the spans of BIO."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

# the prefixes of BIO, BIOES and BILOU, and the label of words outside of any span
_TAG = re.compile(r"([BIESLU])-(.+)")
_OUTSIDE = "O"
_FIRST = "BSU"


def words_of(
    logits: Tensor, first_tokens: Sequence[int | None], names: Sequence[Any]
) -> dict[str, list[Any]]:
    """Returns the classes and probabilities of a sample's words, and with BIO labels its spans.

    A word has the class of its first token. Without a token, because the tokenizer dropped or
    truncated it, its class and probability are None.

    Args:
        logits: of the tokens, of shape (tokens, classes).
        first_tokens: the position of the first token of each word, or None.
        names: the classes in index order.
    """
    values, indices = logits.double().softmax(-1).max(-1)
    words = [
        (None, None) if place is None else (names[int(indices[place])], float(values[place]))
        for place in first_tokens
    ]
    classes = [name for name, _ in words]
    columns: dict[str, list[Any]] = {
        "classes": classes,
        "probabilities": [probability for _, probability in words],
    }
    return columns | ({"spans": spans_of(classes)} if are_tags(names) else {})


def are_tags(names: Sequence[Any]) -> bool:
    """Returns whether classes are the labels of BIO, BIOES or BILOU."""
    others = [name for name in names if name != _OUTSIDE]
    return bool(others) and all(_TAG.fullmatch(str(name)) for name in others)


def spans_of(tags: Sequence[str | None]) -> list[dict[str, Any]]:
    """Returns the spans of BIO labels: class, first word, and the word after the last.

    As in conlleval, a label that continues no span of its class begins one. A word without a label
    ends a span.

    >>> spans_of(["B-PER", "I-PER", "O", "I-LOC"])
    [{'class': 'PER', 'start': 0, 'end': 2}, {'class': 'LOC', 'start': 3, 'end': 4}]
    """
    spans: list[dict[str, Any]] = []
    for place, tag in enumerate(tags):
        match = _TAG.fullmatch(tag or "")
        if match is None:
            continue
        prefix, name = match.groups()
        last = spans[-1] if spans else None
        if prefix not in _FIRST and last and (last["class"], last["end"]) == (name, place):
            last["end"] = place + 1
        else:
            spans.append({"class": name, "start": place, "end": place + 1})
    return spans
