"""Texts that a trained run writes, for `evaluate` and `predict`."""

from __future__ import annotations

from functools import partial

from hybridtrain.cli.run.build import RunContext
from hybridtrain.data import EvalLoader
from hybridtrain.errors import ConfigError
from hybridtrain.loop import generate


def generated_texts(
    context: RunContext, loader: EvalLoader, compared: bool = False
) -> list[tuple[str, str | None]]:
    """Returns the texts that the model writes, and those of the targets."""
    tokens, tokenizer = context.config.generate, context.data.tokenizer
    if tokenizer is None:
        raise ConfigError("generate= needs data with a tokenizer, such as data=datasets")
    if tokens is None or tokens < 1:
        raise ConfigError(f"generate={tokens} must be at least 1")
    pad = context.data.metadata.get("pad_index", 0)
    pairs = generate(context.model, loader, tokens, tokenizer.eos_token_id, pad, compared)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return [(decode(ids), None if wanted is None else decode(wanted)) for ids, wanted in pairs]


def agreement(pairs: list[tuple[str, str | None]]) -> dict[str, float]:
    """Returns the share of texts that are the target's, and their BLEU (Papineni et al., 2002).

    It compares runs of up to four words, or of as many as the longest target has.
    """
    from torchmetrics.functional.text import bleu_score

    known = [(text, wanted) for text, wanted in pairs if wanted is not None]
    if not known:
        raise ConfigError("evaluate generate= needs a text as the target, as task=seq2seq has it")
    longest = max(1, *(len(wanted.split()) for _, wanted in known))
    bleu = bleu_score(
        [text for text, _ in known], [[wanted] for _, wanted in known], n_gram=min(4, longest)
    )
    return {"exact_match": sum(a == b for a, b in known) / len(known), "bleu": float(bleu)}
