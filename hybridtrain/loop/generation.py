"""Text that a language model generates during a run, for samples and metrics.

    item of a data set  --prompts_of-->  prompt and reference
    prompts             --answers-->     new ids, greedy: the most likely token each time

On one device `generate` of transformers caches keys and values. In a pipeline, each token is a
forward of all texts so far through the stages, as in an evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridtrain.errors import ConfigError
from hybridtrain.loss import IGNORED, main_output
from hybridtrain.model import HybridModel


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or for a model with a decoder to answer.

    Attributes:
        ids: its tokens, int64 of shape (tokens,).
        reference: the tokens that the data has there; None: unknown.
    """

    ids: Tensor
    reference: Tensor | None = None


def prompts_of(inputs: Any, labels: Any, start: int | None = None) -> Iterator[Prompt]:
    """Yields the prompt of each sample of a batch.

    With a decoder it is the encoder's text. Otherwise it is the text before the last answer, which
    is the last run of labels that count.

    Args:
        inputs: `input_ids` and others, as from `hybridtrain.datasets.hf_datasets`.
        labels: int64 of shape (N, tokens), already shifted.
        start: of a text without a prompt, where all labels count, the number of tokens to begin
            with; None: an error.

    Raises:
        ConfigError: the data is not for a language model that generates, or has no prompts.
    """
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs or labels.dim() != 2:
        raise ConfigError(
            "generated texts need samples with input_ids, and a label for each token to generate: "
            "use data.task=seq2seq or causal_lm of data=datasets, or data=chat"
        )
    for row, of_row in enumerate(labels):
        ids, counts = inputs["input_ids"][row], of_row != IGNORED
        if "decoder_input_ids" in inputs:
            yield Prompt(ids[inputs["attention_mask"][row].bool()], of_row[counts])
            continue
        if not counts.any():
            continue
        last = int(counts.nonzero()[-1])
        others = (~counts[: last + 1]).nonzero()
        first = int(others[-1]) + 1 if len(others) else 0
        begin = 0
        if (positions := inputs.get("position_ids")) is not None:  # a window of conversations
            begin = int((positions[row, : first + 1] == 0).nonzero()[-1])
        if first == begin:
            if start is None:
                raise ConfigError(
                    "generated texts are compared with answers, but here every token is learned, "
                    "so there is no prompt: use data=chat, or data.task=seq2seq"
                )
            first = min(begin + start - 1, last)
        yield Prompt(ids[begin : first + 1], of_row[first : last + 1])


def check_generates(model: HybridModel) -> None:
    """Raises a ConfigError unless the model is one of transformers that generates text."""
    if not callable(getattr(model.net, "generate", None)):
        raise ConfigError(
            f"{type(model.net).__name__} does not generate texts: use a causal language model or a "
            "sequence-to-sequence model of transformers"
        )


def answers(model: HybridModel, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Tensor]:
    """Returns the ids that the model generates for each prompt, without its end token.

    All processes of a replica call this with the same prompts.

    Args:
        model: a model of transformers, see `check_generates`; its modes are left as they were.
        prompts: texts of at least one token.
        max_new_tokens: the maximum number of tokens for each prompt.
    """
    if not prompts:
        return []
    net: Any = model.net
    ends = net.generation_config.eos_token_id
    end_tokens = {*(ends if isinstance(ends, list) else [ends])} - {None}
    is_alone = model.world.nb_part == model.world.processes_per_replica == 1
    with model.evaluating(), torch.no_grad(), model.autocast():
        ids = (_cached if is_alone else _through_stages)(model, prompts, max_new_tokens, end_tokens)
    return [_without_end(row, end_tokens) for row in ids]


def _without_end(ids: Tensor, ends: set[int]) -> Tensor:
    stop = [number for number, token in enumerate(ids.tolist()) if token in ends]
    return ids[: stop[0]] if stop else ids


def _room(net: Any, longest: int, max_new_tokens: int) -> int:
    """Returns the number of tokens to generate, which the model's positions may limit."""
    positions = getattr(net.config, "max_position_embeddings", None)
    used = 1 if net.config.is_encoder_decoder else longest
    return min(max_new_tokens, positions - used) if isinstance(positions, int) else max_new_tokens


def _padding(net: Any, ends: set[int]) -> int:
    pad = net.generation_config.pad_token_id
    return int(pad) if pad is not None else min(ends, default=0)


def _cached(model: HybridModel, prompts: Sequence[Prompt], most: int, ends: set[int]) -> Tensor:
    """Returns the new ids, (N, tokens), by `generate` of transformers."""
    net: Any = model.net
    pad = _padding(net, ends)
    side = "right" if net.config.is_encoder_decoder else "left"
    rows = [prompt.ids for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    if (room := _room(net, ids.shape[1], most)) < 1:
        return ids[:, :0]
    config = copy.deepcopy(net.generation_config)
    config.update(
        do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None, use_cache=True,
        max_new_tokens=room, max_length=None, pad_token_id=pad,
    )  # fmt: skip
    device = model.output_device
    made = net.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config
    )
    new: Tensor = made[:, 1 if net.config.is_encoder_decoder else ids.shape[1] :]
    return new.cpu()


def _through_stages(
    model: HybridModel, prompts: Sequence[Prompt], most: int, ends: set[int]
) -> Tensor:
    """Returns the new ids, (N, tokens), by one forward through the pipeline per token.

    The texts are padded on the right to their final length, so that all forwards have one shape.
    """
    net: Any = model.net
    pad = _padding(net, ends)
    rows = [prompt.ids for prompt in prompts]
    fixed: dict[str, Tensor] = {}
    if net.config.is_encoder_decoder:
        fixed["input_ids"] = pad_sequence(rows, batch_first=True, padding_value=pad)
        ones = [torch.ones_like(row) for row in rows]
        fixed["attention_mask"] = pad_sequence(ones, batch_first=True)
        rows = [torch.tensor([net.generation_config.decoder_start_token_id])] * len(rows)
    lengths = torch.tensor([len(row) for row in rows])
    room = _room(net, int(lengths.max()), most)
    if room < 1:
        return torch.zeros(len(rows), 0, dtype=torch.int64)
    text = torch.full((len(rows), int(lengths.max()) + room), pad)
    for row, ids in enumerate(rows):
        text[row, : len(ids)] = ids
    mask = (torch.arange(text.shape[1]) < lengths[:, None]).long()
    ended = torch.zeros(len(rows), dtype=torch.bool)
    numbers = torch.arange(len(rows))
    for step in range(room):
        of_text = {"input_ids": text, "attention_mask": mask}
        if fixed:
            of_text = {"decoder_input_ids": text}
        places = lengths + step
        parts = model.map_outputs({**fixed, **of_text}, places - 1, _most_likely)
        new = torch.cat(model.pipeline.gather(parts))  # from the process with the last stage
        text[numbers, places], mask[numbers, places] = new, 1
        ended |= torch.isin(new, torch.tensor(sorted(ends)))
        if ended.all():
            break
    columns = lengths[:, None] + torch.arange(step + 1)
    return text.gather(1, columns)


def _most_likely(output: Any, places: Tensor) -> Tensor:
    """Returns the most likely next token of each text, on the CPU."""
    logits = main_output(output)
    return logits[torch.arange(len(places), device=logits.device), places].argmax(-1).cpu()
