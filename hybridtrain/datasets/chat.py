"""Conversations for a causal language model: messages through the tokenizer's chat template.

    columns   --chat_formats--->  messages with a role and a content, and tools
    messages  --chat template-->  one text, and the positions of the answers in it
              --tokenizer-->      ids, and which of them to learn
              --max_len, pack-->  samples

All conversations are tokenized at the start, so all statistics are known: how many are truncated,
how much is left out, and how full the windows are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.data import DataSplits, for_trained_models
from hybridtrain.datasets.chat_formats import (
    MESSAGES,
    TOOLS,
    ChatFormat,
    check_tools,
    columns_not_used,
    format_of,
    plain_messages,
    tools_of,
)
from hybridtrain.datasets.held_out import check_share
from hybridtrain.datasets.hf_datasets import Padded
from hybridtrain.datasets.sample_files import SampleFiles, check_named
from hybridtrain.datasets.text_files import check_at_least_1
from hybridtrain.datasets.tokenizing import (
    load_tokenizer,
    padding_token,
    special_tokens,
    unknown_tokens,
    vocabulary_digest,
)
from hybridtrain.errors import DataError, argument, check_choice, setting
from hybridtrain.loss import IGNORED

LEARNT = ("answers", "all")

_KEYWORD = "generation"  # the template tag that encloses the assistant's text


def _for_trained_models(
    metadata: Mapping[str, Any],
    tokenizer: str,
    chat_template: str | None = None,
    **of_training: Any,
) -> DataSplits:
    """Returns only the tokenizer; see `for_trained_models`."""
    tok = _chat_tokenizer(tokenizer, chat_template)
    return DataSplits(
        train=(),
        eval=None,
        metadata=metadata,
        tokenizer=tok,
        vocabulary=vocabulary_digest(tok),
    )


@for_trained_models(_for_trained_models, skips_training=True, path="eval_path")
def chat(
    path: str,
    tokenizer: str,
    eval_path: str | None = None,
    eval_share: float = 0.05,
    split_seed: int = 0,
    separator: str | None = None,
    messages: str = MESSAGES,
    tools: str | None = TOOLS,
    chat_template: str | None = None,
    learn: str = "answers",
    max_len: int = 1024,
    pack: bool = False,
    pad: str = "longest",
) -> DataSplits:
    """Returns conversations for a causal language model, with a loss on the answers only.

    A sample in the files has a list of messages, each with a `role` and a `content`, or one of the
    formats of `hybridtrain.datasets.chat_formats`. The tokenizer's chat template renders it as one
    text, with the sample's tools. An answer with `"weight": 0` is not learned.

    Items are `(inputs, labels)`: `input_ids` and `attention_mask`, int64 of shape (tokens,), and
    labels of the same length. The label at each position is the next token (labels are already
    shifted), or -100 if that token is not learned.

    With `pack`, a sample is a window of `max_len` tokens with several whole conversations that do
    not attend to each other: `position_ids` start at 0 in each, and the attention mask is float32
    of shape (1, max_len, max_len), 0 where a token attends to another and -inf elsewhere. So a
    window has the same loss as its conversations one by one, for models that accept a prepared mask
    (models of transformers with `attention` eager, sdpa or sdpa_masked, without sliding windows).

    Metadata: `task`, `vocab_size`, `max_len`, `pad_index`, `special_tokens`; `longest`, the number
    of tokens of the longest sample.

    Args:
        path: a file (.json, .jsonl, .parquet, .arrow, or .csv of texts in columns; also with .gz,
            except Parquet and Arrow), a pattern, a folder, or a name on the Hub; see `hf_datasets`.
        tokenizer: a tokenizer folder, a `tokenizer.json`, or a name on the Hub.
        eval_path: the path of the evaluation split, like `path`; None: a split of `path`, or a
            held-out share of it.
        eval_share: the share to hold out if there is no evaluation split, 0 to 1.
        split_seed: the seed for choosing held-out samples.
        separator: of CSV and TSV files with texts in columns, see `hf_datasets`.
        messages: the column of the messages; without a column `messages`, the other formats are
            tried.
        tools: the column of the tools that the model may call, as a list or as JSON text; the
            default column may be missing. None: render without tools.
        chat_template: a file with a chat template; None: the tokenizer's.
        learn: `answers`: the assistant's messages, including their end token; `all`: every token.
        max_len: the maximum number of tokens of a conversation, or the length of a window.
        pack: whether to fill windows with whole conversations; False: one conversation per sample.
        pad: `longest`, or `max_len` for batches of one shape; windows always have one shape.

    Raises:
        DataError: the data, the column or the tokenizer is missing or of the wrong kind, the
            template is missing or rejects a sample, or no token is left to learn. Also for files of
            preferences, and if the template does not render the tools.
    """
    check_named(path=path, tokenizer=tokenizer)
    check_choice("learn", learn, LEARNT)
    check_choice("pad", pad, ("longest", "max_len"))
    check_at_least_1(max_len=max_len)
    check_share(eval_share)
    tok = _chat_tokenizer(tokenizer, chat_template)
    files = SampleFiles(
        *(path, None, eval_path, "train", None, eval_share, split_seed), separator=separator
    )
    source = files.read({messages: "messages"}, blank_targets=True)
    render = _Renderer(tok, learn == "all", messages)
    chats, notes = {}, []
    for split, samples in source.samples.items():
        features = samples.features
        chat_format = format_of(features, messages, split)
        tools_column = check_tools(tools, features, split)
        coded = [render(sample, chat_format, tools_column,
                        f"sample {n + 1} of the {split} split, as divided here")
                 for n, sample in enumerate(samples)]  # fmt: skip
        chats[split], cut_notes = _cut(coded, max_len, split)
        notes += cut_notes
        if split == "train":
            notes += _format_notes(chat_format, features, tools_column, coded)
    learned_from = chain.from_iterable(chat.ids for chat in chats["train"])
    notes += unknown_tokens(tok, tokenizer, learned_from)
    pad_id = padding_token(tok)
    metadata: dict[str, Any] = {"task": "causal_lm", "vocab_size": len(tok), "max_len": max_len}
    metadata |= {"special_tokens": special_tokens(tok)}
    if pad_id is not None:
        metadata |= {"pad_index": pad_id}
    if pack:
        windows = {split: _packed(chats[split], max_len) for split in chats}
        notes += [
            f"{len(chats[split]):,} conversations in {len(windows[split]):,} windows to "
            f"{'train on' if split == 'train' else 'evaluate'}, "
            f"{_tokens(chats[split]) / (len(windows[split]) * max_len):.1%} full"
            for split in windows
        ]
        splits = {s: Windows(chats[s], windows[s], max_len, pad_id or 0) for s in chats}
        collate: Callable[[Any], Any] = stacked
        metadata |= {"longest": max_len}
    else:
        splits = {split: Conversations(chats[split]) for split in chats}  # type: ignore[misc]
        collate = Padded(pad_id or 0, max_len if pad == "max_len" else None)
        if pad == "longest":
            metadata |= {"longest": max(len(c.ids) - 1 for of in chats.values() for c in of)}
    return DataSplits(
        train=splits["train"],
        eval=splits["eval"],
        collate=collate,
        metadata=metadata,
        tokenizer=tok,
        vocabulary=vocabulary_digest(tok),
        held_out=source.held_out,
        digest=source.digest,
        notes=[*notes, *source.notes],
    )


def _chat_tokenizer(name: str, template: str | None) -> Any:
    """Returns a tokenizer with a chat template.

    Raises:
        DataError: it has no chat template, or does not report token positions in a text.
    """
    tok = load_tokenizer(name)
    if template is not None:
        try:
            tok.chat_template = Path(template).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {setting('chat_template', template)}: {error}") from error
    if not tok.chat_template:
        raise DataError(
            f"{setting('tokenizer', name)} has no chat template: use the tokenizer of a chat "
            f"model, or set {argument('chat_template')} to a file with a template"
        )
    if not tok.is_fast:
        raise DataError(
            f"{setting('tokenizer', name)} does not report token positions in a text: use a "
            f"tokenizer with a tokenizer.json"
        )
    return tok


@dataclass(frozen=True)
class Chat:
    """The tokens of a conversation.

    Attributes:
        ids: the ids of all tokens.
        learnt: for each token, whether it is learned; the first one never is.
        full: the number of tokens before truncation, and the number of learned ones among them.
        answers: the number of answers before truncation.
        without_end: the number of answers that do not end with a special token.
        empty: the number of answers without a text.
        has_tools: whether it was rendered with tools.
    """

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    full: tuple[int, int]
    answers: int = 0
    without_end: int = 0
    empty: int = 0
    has_tools: bool = False


class _Renderer:
    """Converts messages to tokens.

    Args:
        tokenizer: a tokenizer with a chat template.
        learns_all: True to learn every token.
        column: the column of the messages, for errors.
    """

    def __init__(self, tokenizer: Any, learns_all: bool, column: str) -> None:
        self._tokenizer = tokenizer
        self._learns_all = learns_all
        self._column = column
        template = tokenizer.chat_template
        templates = template if isinstance(template, dict) else {"default": template}
        of_default = templates.get("default", "")
        self._has_tag = _KEYWORD in of_default and "endgeneration" in of_default
        self._takes_tools = any("tools" in text for text in templates.values())
        self._takes_calls = any("tool_calls" in text for text in templates.values())
        added = tokenizer.added_tokens_decoder
        self._special = [id for id, token in added.items() if token.special]

    def __call__(
        self, sample: Mapping[str, Any], chat_format: ChatFormat, tools: str | None, where: str
    ) -> Chat:
        """Returns a conversation.

        Args:
            sample: the columns of a sample.
            chat_format: the format of its file.
            tools: the column of tools; None: there are none.
            where: names the sample in errors.
        """
        try:
            messages = plain_messages(chat_format.messages(sample))
            of_sample = tools_of(sample[tools]) if tools else None
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if messages is None:
            shown = {name: sample[name] for name in chat_format.columns}
            raise DataError(
                f"{setting('messages', self._column)}: {where} must have a list of messages such "
                f'as {{"role": "user", "content": "..."}}, but has {str(shown)[:80]}'
            )
        if of_sample and not self._takes_tools:
            raise DataError(
                f"{where} has tools, but the chat template does not render them: use a template "
                f"that does ({argument('chat_template')}), or train without them by "
                f"{setting('tools', None)}"
            )
        if not self._takes_calls and any(message.get("tool_calls") for message in messages):
            raise DataError(
                f"{where} has tool calls, but the chat template does not render tool_calls: "
                f"use a template that does ({argument('chat_template')})"
            )
        weights = [message.pop("weight", 1) for message in messages]
        try:
            if self._has_tag and not self._learns_all:
                coded = self._tokenizer.apply_chat_template(
                    messages, of_sample, return_dict=True, return_assistant_tokens_mask=True
                )
                ids, mask = coded["input_ids"], np.asarray(coded["assistant_masks"], dtype=bool)
                self._leave_out(mask, messages, weights, where)
            else:
                ids, mask = self._by_prefixes(messages, of_sample, weights, where)
        except DataError:
            raise
        except Exception as error:  # from a template, which may raise anything
            raise DataError(
                f"{setting('messages', self._column)}: the chat template rejects {where}: "
                f"{' '.join(str(error).split())}"
            ) from error
        mask[:1] = False
        ids = np.asarray(ids, dtype=np.int32)
        answers = [] if self._learns_all else _runs(mask)
        # a template may end an answer with a special token and a line break
        open_ = sum(not np.isin(ids[max(0, end - 2) : end], self._special).any()
                    for _, end in answers)  # fmt: skip
        full = (len(ids), int(mask.sum()))
        empty = sum(
            not (message.get("content") or "").strip() and not message.get("tool_calls")
            for message, weight in zip(messages, weights, strict=True)
            if message["role"] == "assistant" and weight
        )
        return Chat(ids, mask, full, len(answers), open_, empty, of_sample is not None)

    def _leave_out(
        self,
        mask: NDArray[np.bool_],
        messages: Sequence[Mapping[str, Any]],
        weights: Sequence[float],
        where: str,
    ) -> None:
        """Removes the answers with weight 0 from a mask that the template has made."""
        wanted = [w for m, w in zip(messages, weights, strict=True) if m["role"] == "assistant"]
        if all(wanted):
            return
        answers = _runs(mask)
        if len(answers) != len(wanted):
            raise DataError(
                f"{where} has messages with weight 0, but its {len(wanted)} answers cannot be told "
                f"apart: the chat template marks {len(answers)} parts as generated"
            )
        for (start, end), weight in zip(answers, wanted, strict=True):
            mask[start:end] &= bool(weight)

    def _by_prefixes(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        weights: Sequence[float],
        where: str,
    ) -> tuple[Any, NDArray[np.bool_]]:
        """Returns ids and which ones to learn, from the start and end of each answer in the text.

        An answer starts after the text of the messages before it, including the prompt for the
        assistant, and ends with its own text; trailing spaces belong to the template.
        """
        text = self._text(messages, tools)
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = coded["input_ids"], coded["offset_mapping"]
        if self._learns_all:
            return ids, np.ones(len(ids), dtype=bool)
        learnt = np.zeros(len(ids), dtype=bool)
        starts, ends = (np.asarray([place[k] for place in places]) for k in (0, 1))
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not weights[number]:
                continue
            before = (
                self._text(messages[:number], tools, add_generation_prompt=True) if number else ""
            )
            until = self._text(messages[: number + 1], tools)
            if not (text.startswith(until) and until.startswith(before)):
                raise DataError(
                    f"{setting('messages', self._column)}: in {where} the chat template renders "
                    f"message {number + 1} differently at the end of a conversation, so the "
                    f"answers cannot be located: put {{% {_KEYWORD} %}} ... "
                    f"{{% end{_KEYWORD} %}} around them in your template "
                    f"({argument('chat_template')}), or set {setting('learn', 'all')}"
                )
            learnt |= (starts >= len(before)) & (ends <= len(until.rstrip())) & (ends > starts)
        return ids, learnt

    def _text(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, **settings: Any
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tools, tokenize=False, **settings)
        return text


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns the start and the end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _format_notes(
    chat_format: ChatFormat, features: Mapping[str, Any], tools: str | None, chats: Sequence[Chat]
) -> list[str]:
    """Returns the parts of the data line about the columns and templates of the training split."""
    notes = []
    if chat_format.name:
        notes.append(f"{chat_format.name} ({', '.join(chat_format.columns)})")
    if tools is not None:
        having = sum(chat.has_tools for chat in chats)
        notes.append(f"{having:,} with tools, from the column {tools}")
    if unused := columns_not_used(features, chat_format, tools):
        notes.append(f"columns not used: {', '.join(unused[:8])}")
    answers = sum(chat.answers for chat in chats)
    if empty := sum(chat.empty for chat in chats):
        notes.append(f"{empty:,} {'answer is' if empty == 1 else 'answers are'} empty")
    if without_end := sum(chat.without_end for chat in chats):
        notes.append(
            f"{without_end:,} of {answers:,} answers do not end with a special token, so the model "
            "does not learn to stop: let the chat template end them with one"
        )
    return notes


def _cut(chats: Sequence[Chat], max_len: int, split: str) -> tuple[list[Chat], list[str]]:
    """Returns conversations truncated to `max_len` tokens plus one label, and a report.

    Raises:
        DataError: no token is left to learn.
    """
    remaining = []
    for chat in chats:
        cut = Chat(chat.ids[: max_len + 1], chat.learnt[: max_len + 1], chat.full)
        if cut.learnt.any():
            remaining.append(cut)
    purpose = "to train on" if split == "train" else "to evaluate"
    mute = sum(not chat.full[1] for chat in chats)
    too_late = len(chats) - len(remaining) - mute
    if not remaining:
        reason = (
            "has a message of the role assistant to learn"
            if not too_late
            else f"has an answer in its first {setting('max_len', max_len)} tokens"
        )
        raise DataError(f"none of the {len(chats):,} conversations {purpose} {reason}")
    lengths = [chat.full[0] for chat in chats]
    answers, learnt = (
        sum(chat.full[1] for chat in chats),
        sum(int(c.learnt.sum()) for c in remaining),
    )
    share = sum(length > max_len + 1 for length in lengths) / len(lengths)
    truncated = (
        f"{setting('max_len', max_len)} truncates {share:.1%} of them and removes "
        f"{1 - learnt / answers:.1%} of the "
        if share
        else ""
    )
    notes = [
        f"conversations {purpose} of {median(lengths):g} tokens (median), {max(lengths)} (longest);"
        f" {truncated}{answers:,} learned tokens"
    ]
    if mute:
        notes.append(f"{mute:,} {purpose} left out, because they contain no answer")
    if too_late:
        begin = "its answer begins" if too_late == 1 else "their answers begin"
        notes.append(
            f"{too_late:,} {purpose} left out, because {begin} after "
            f"{setting('max_len', max_len)} tokens"
        )
    return remaining, notes


class Conversations(Dataset[Any]):
    """Conversations, one per sample."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self._chats = chats

    def __len__(self) -> int:
        return len(self._chats)

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each conversation."""
        return [len(chat.ids) for chat in self._chats]

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = _shifted(self._chats[index])
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}, labels


class Windows(Dataset[Any]):
    """Windows of several conversations, which do not attend to each other."""

    def __init__(
        self, chats: Sequence[Chat], windows: Sequence[Sequence[int]], length: int, pad_id: int
    ) -> None:
        self._chats, self._windows = chats, windows
        self._length, self._pad_id = length, pad_id

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.full((self._length,), self._pad_id)
        labels = torch.full((self._length,), IGNORED)
        positions = torch.zeros(self._length, dtype=torch.int64)
        chat_of = torch.full((self._length,), -1)
        start = 0
        for number in self._windows[index]:
            inputs, targets = _shifted(self._chats[number])
            here = slice(start, start + len(inputs))
            ids[here], labels[here] = inputs, targets
            positions[here] = torch.arange(len(inputs))
            chat_of[here] = number
            start = here.stop
        positions[start:] = torch.arange(self._length - start)
        sees = (chat_of[:, None] == chat_of).tril()
        mask = torch.zeros(1, self._length, self._length).masked_fill_(~sees, float("-inf"))
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, labels


def stacked(items: Sequence[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a batch of samples of one shape."""
    inputs = {key: torch.stack([item[key] for item, _ in items]) for key in items[0][0]}
    return inputs, torch.stack([labels for _, labels in items])


def _shifted(chat: Chat) -> tuple[Tensor, Tensor]:
    """Returns the inputs, and for each the next token, or -100 if it is not learned."""
    ids = torch.from_numpy(chat.ids.astype(np.int64))
    learnt = torch.from_numpy(chat.learnt)
    return ids[:-1], ids[1:].masked_fill(~learnt[1:], IGNORED)


def _tokens(chats: Sequence[Chat]) -> int:
    return sum(len(chat.ids) - 1 for chat in chats)


def _packed(chats: Sequence[Chat], length: int) -> list[list[int]]:
    """Returns the conversations of each window, by best fit, longest first."""
    order = sorted(range(len(chats)), key=lambda number: -len(chats[number].ids))
    windows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # sorted: the free space and the index of each window
    for number in order:
        size = len(chats[number].ids) - 1
        place = bisect_left(free, (size, -1))
        if place == len(free):
            windows.append([number])
            left, window = length - size, len(windows) - 1
        else:
            left, window = free.pop(place)
            windows[window].append(number)
            left -= size
        insort(free, (left, window))
    return windows
