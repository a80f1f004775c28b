"""Texts that a language model writes, token after token, by the pipeline that it is trained in.

Every token is a forward over the whole text, without a cache of keys and values: simple and exact,
for evaluations and a look at what a run has learnt. To serve a model, export it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridtrain._base.microbatch import merge
from hybridtrain.data import EvalLoader
from hybridtrain.errors import DataError
from hybridtrain.loss import IGNORED, main_output
from hybridtrain.model import HybridModel

_DECODER = "decoder_input_ids"


def generate(
    model: HybridModel,
    data: EvalLoader,
    tokens: int,
    end: int | None,
    pad: int,
    compared: bool = False,
) -> list[tuple[list[int], list[int] | None]]:
    """Returns the likeliest tokens after each text, one at a time (greedy); a collective call.

    A model with a decoder writes the text of its decoder, and any other goes on with `input_ids`.
    Texts are padded on the right, as `attention_mask` says.

    Args:
        model: its main output are logits of shape (samples, tokens, vocabulary).
        data: inputs with the names of transformers, in a dict; of which each replica takes a
            stretch.
        tokens: written for a text at most.
        end: the token that ends a text, which is not returned; None: there is none.
        pad: the padding token.
        compared: the texts are for a comparison with the targets, which needs a decoder: any other
            model goes on after the whole text, of which its targets are a part.

    Returns:
        for each sample, in the order of the data set, the ids that were written, and those of the
        target without what the loss ignores (None: no targets, or not of this kind).

    Raises:
        DataError: the inputs have no `input_ids`, or no decoder's where it needs one; or the model
            has no positions for so many tokens.
    """
    model.sync_buffers()
    found: list[tuple[list[int], list[int] | None]] = []
    with model.evaluating():
        for inputs, targets in data:
            if not isinstance(inputs, dict) or "input_ids" not in inputs:
                raise DataError("generate= needs inputs with input_ids, as data=datasets has them")
            if compared and _DECODER not in inputs:
                raise DataError(
                    "evaluate generate= compares what a decoder writes with its target, as "
                    "task=seq2seq has it: leave generate= out, or take predict generate="
                )
            written = _written(model, inputs, tokens, end, pad)
            known = isinstance(targets, Tensor) and targets.dim() == 2
            wanted = [each[each != IGNORED].tolist() for each in targets] if known else None
            found += zip(written, wanted or [None] * len(written), strict=True)
    by_replica = dict(model.world.gather((model.world.replica, found)))
    return [each for replica in sorted(by_replica) for each in by_replica[replica]]


def _written(
    model: HybridModel, inputs: dict[str, Tensor], tokens: int, end: int | None, pad: int
) -> list[list[int]]:
    key = _DECODER if _DECODER in inputs else "input_ids"
    begun = inputs[key][:, :1] if key == _DECODER else inputs[key]  # without the targets
    lengths = torch.full((len(begun),), begun.shape[1])
    if key == "input_ids" and "attention_mask" in inputs:
        lengths = inputs["attention_mask"].sum(1)
    _check_positions(model, begun.shape[1], tokens)
    first, samples = lengths.clone(), torch.arange(len(begun))
    texts = F.pad(begun, (0, tokens), value=pad)  # of one shape from the first token to the last
    ended = torch.zeros(len(begun), dtype=torch.bool)

    def likeliest(output: Any, last: Tensor) -> Tensor:
        logits = main_output(output)
        return logits[torch.arange(len(last), device=last.device), last].argmax(-1)

    for _ in range(tokens):
        known = (torch.arange(texts.shape[1]) < lengths[:, None]).long()
        rest = inputs if key == _DECODER else {"attention_mask": known}
        given = {**rest, key: texts}
        outputs = model.map_outputs(given, lengths - 1, likeliest)
        new = _shared(model, merge(outputs).cpu() if outputs else None, len(texts))
        if end is not None:
            ended |= new == end
        if bool(ended.all()):
            break
        texts[samples[~ended], lengths[~ended]] = new[~ended]
        lengths += ~ended
    return [texts[i, first[i] : lengths[i]].tolist() for i in range(len(texts))]


def _check_positions(model: HybridModel, length: int, tokens: int) -> None:
    config = getattr(model.net, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length + tokens > positions:
        raise DataError(
            f"a text of {length} tokens and generate={tokens} are more than the {positions} "
            f"positions of the model: take a smaller generate=, or shorter texts"
        )


def _shared(model: HybridModel, values: Tensor | None, samples: int) -> Tensor:
    """Returns the values of the process with the last stage in all processes of the pipeline."""
    group = model.world.pipeline_object_group
    if group is None:
        assert values is not None
        return values
    shared = torch.zeros(samples, dtype=torch.int64) if values is None else values
    dist.all_reduce(shared, group=group)
    return shared
