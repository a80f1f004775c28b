"""Conversations for a causal language model: messages through the tokenizer's chat template.

    messages  --chat template-->  one text, and the places of the answers in it
              --tokenizer-->      ids, and which of them are learnt
              --max_len, pack-->  samples

All conversations are tokenised at the start, so that every number is known: how many are cut, what
is left out, and how full the windows are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.data import DataSplits, for_trained_models
from hybridtrain.datasets.held_out import check_share
from hybridtrain.datasets.hf_datasets import Padded
from hybridtrain.datasets.sample_files import SampleFiles, check_columns, check_named
from hybridtrain.datasets.text_files import check_at_least_1
from hybridtrain.datasets.tokenizing import (
    load_tokenizer,
    padding_token,
    special_tokens,
    vocabulary_digest,
)
from hybridtrain.errors import DataError, argument, check_choice, setting
from hybridtrain.loss import IGNORED

LEARNT = ("answers", "all")

_KEYWORD = "generation"  # the tag of a template around what the assistant says


def _for_trained_models(
    metadata: Mapping[str, Any],
    tokenizer: str,
    chat_template: str | None = None,
    **of_training: Any,
) -> DataSplits:
    """Returns the tokenizer alone; see `for_trained_models`."""
    tok = _chat_tokenizer(tokenizer, chat_template)
    return DataSplits(
        train=(),
        eval=None,
        metadata=metadata,
        tokenizer=tok,
        vocabulary=vocabulary_digest(tok),
    )


@for_trained_models(_for_trained_models)
def chat(
    path: str,
    tokenizer: str,
    eval_path: str | None = None,
    eval_share: float = 0.05,
    split_seed: int = 0,
    messages: str = "messages",
    chat_template: str | None = None,
    learn: str = "answers",
    max_len: int = 1024,
    pack: bool = False,
    pad: str = "longest",
) -> DataSplits:
    """Returns conversations for a causal language model, with a loss on the answers alone.

    A sample of the files has a list of messages, each with a `role` and a `content`, which the
    tokenizer's chat template turns into one text. Items are `(inputs, labels)`: `input_ids` and
    `attention_mask`, int64 of shape (tokens,), and labels as long. The label of a place is the
    token after it, so nothing is shifted any more; it is -100 where that token is not learnt.

    With `pack`, a sample is a window of `max_len` tokens with several whole conversations. None of
    them sees another: `position_ids` begin at 0 in each, and the attention mask is float32 of shape
    (1, max_len, max_len), 0 where a token looks at another and -inf elsewhere. So a window gives
    the same loss as its conversations one by one, for models that take a prepared mask (those of
    transformers with `attention` eager, sdpa or sdpa_masked, and without sliding windows).

    Metadata: `task`, `vocab_size`, `max_len`, `pad_index`, `special_tokens`; `longest`, the tokens
    of the longest sample.

    Args:
        path: a file (.json, .jsonl, .parquet, .arrow; the texts among them also with .gz), a
            pattern, a folder, or a name on the Hub, as of `hf_datasets`.
        tokenizer: a folder of a tokenizer, a `tokenizer.json`, or a name on the Hub.
        eval_path: a path like `path` with the evaluation split; None: a split of `path`, or a
            held-out part of it.
        eval_share: the share that is held out if there is no such split, 0 to 1.
        split_seed: the seed of the choice of held-out samples.
        messages: the column of the messages.
        chat_template: a file with a chat template; None: the tokenizer's.
        learn: `answers`: what the assistant says, with the token that ends it; `all`: every token.
        max_len: the number of tokens after which a conversation is cut, or of a window.
        pack: whether to fill windows with whole conversations; False: each is a sample.
        pad: `longest`, or `max_len` for batches of one shape; windows have one.

    Raises:
        DataError: the data, the column or the tokenizer is missing or of another kind, the template
            is missing or refuses a sample, or nothing is left to learn.
    """
    check_named(path=path, tokenizer=tokenizer)
    check_choice("learn", learn, LEARNT)
    check_choice("pad", pad, ("longest", "max_len"))
    check_at_least_1(max_len=max_len)
    check_share(eval_share)
    tok = _chat_tokenizer(tokenizer, chat_template)
    files = SampleFiles(path, None, eval_path, "train", None, eval_share, split_seed)
    source = files.read({messages: "messages"}, blank_targets=True)
    check_columns(source.samples, "messages", [messages])
    render = _Renderer(tok, learn == "all", messages)
    chats, notes = {}, []
    for split, samples in source.samples.items():
        coded = [render(sample[messages], f"sample {n + 1} of the {split} split, as divided here")
                 for n, sample in enumerate(samples)]  # fmt: skip
        chats[split], said = _cut(coded, max_len, split)
        notes += said
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
    """Returns a tokenizer that has a chat template.

    Raises:
        DataError: it has none, or cannot say where a token is in a text.
    """
    tok = load_tokenizer(name)
    if template is not None:
        try:
            tok.chat_template = Path(template).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{setting('chat_template', template)} cannot be read: {error}"
            ) from error
    if not tok.chat_template:
        raise DataError(
            f"{setting('tokenizer', name)} has no chat template: take the tokenizer of a model for "
            f"chats, or set {argument('chat_template')} to a file with one"
        )
    if not tok.is_fast:
        raise DataError(
            f"{setting('tokenizer', name)} cannot say where a token is in a text: use one with a "
            f"tokenizer.json"
        )
    return tok


@dataclass(frozen=True)
class Chat:
    """The tokens of a conversation.

    Attributes:
        ids: of all tokens.
        learnt: for each of them, whether it is learnt; the first one never is.
        full: the number of tokens before a cut, and of those that are learnt.
    """

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    full: tuple[int, int]


class _Renderer:
    """Turns messages into tokens.

    Args:
        tokenizer: with a chat template.
        learns_all: every token is learnt.
        column: of the messages, for errors.
    """

    def __init__(self, tokenizer: Any, learns_all: bool, column: str) -> None:
        self._tokenizer = tokenizer
        self._learns_all = learns_all
        self._column = column
        template = tokenizer.chat_template
        of_default = template.get("default", "") if isinstance(template, dict) else template
        self._has_tag = _KEYWORD in of_default and "endgeneration" in of_default

    def __call__(self, messages: Any, where: str) -> Chat:
        """Returns a conversation; `where` it is, for errors."""
        messages = self._checked(messages, where)
        try:
            if self._has_tag and not self._learns_all:
                coded = self._tokenizer.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True
                )
                ids, learnt = coded["input_ids"], coded["assistant_masks"]
            else:
                ids, learnt = self._by_prefixes(messages, where)
        except DataError:
            raise
        except Exception as error:  # of a template, which may raise what it likes
            raise DataError(
                f"{setting('messages', self._column)}: the chat template refuses {where}: "
                f"{' '.join(str(error).split())}"
            ) from error
        mask = np.asarray(learnt, dtype=bool)
        mask[:1] = False
        return Chat(np.asarray(ids, dtype=np.int32), mask, (len(ids), int(mask.sum())))

    def _checked(self, messages: Any, where: str) -> list[dict[str, Any]]:
        """Returns messages without the keys that the sample does not have."""
        good = isinstance(messages, list) and messages
        plain = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages or []
            if isinstance(message, dict)
        ]
        if not good or len(plain) < len(messages) or not all("role" in turn for turn in plain):
            raise DataError(
                f"{setting('messages', self._column)}: {where} must have a list of messages such "
                f'as {{"role": "user", "content": "..."}}, and has {str(messages)[:80]}'
            )
        return plain

    def _by_prefixes(self, messages: list[dict[str, Any]], where: str) -> tuple[Any, Any]:
        """Returns ids and what is learnt, by where each answer begins and ends in the text.

        An answer begins after the text of the messages before it, with the prompt for the
        assistant, and ends with its own text; spaces at the end are the template's.
        """
        text = self._text(messages)
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = coded["input_ids"], coded["offset_mapping"]
        if self._learns_all:
            return ids, np.ones(len(ids), dtype=bool)
        learnt = np.zeros(len(ids), dtype=bool)
        starts, ends = (np.asarray([place[k] for place in places]) for k in (0, 1))
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], add_generation_prompt=True) if number else ""
            until = self._text(messages[: number + 1])
            if not (text.startswith(until) and until.startswith(before)):
                raise DataError(
                    f"{setting('messages', self._column)}: in {where} the chat template writes "
                    f"message {number + 1} otherwise than at the end of a conversation, so that "
                    f"the answers cannot be found: put {{% {_KEYWORD} %}} ... "
                    f"{{% end{_KEYWORD} %}} around them in your template "
                    f"({argument('chat_template')}), or set {setting('learn', 'all')}"
                )
            learnt |= (starts >= len(before)) & (ends <= len(until.rstrip())) & (ends > starts)
        return ids, learnt

    def _text(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        return text


def _cut(chats: Sequence[Chat], max_len: int, split: str) -> tuple[list[Chat], list[str]]:
    """Returns conversations of `max_len` tokens and a last label, and what was cut, in words.

    Raises:
        DataError: nothing is left to learn.
    """
    kept = []
    for chat in chats:
        cut = Chat(chat.ids[: max_len + 1], chat.learnt[: max_len + 1], chat.full)
        if cut.learnt.any():
            kept.append(cut)
    purpose = "to train on" if split == "train" else "to evaluate"
    if not kept:
        raise DataError(
            f"none of the {len(chats):,} conversations {purpose} has an answer in its first "
            f"{setting('max_len', max_len)} tokens"
        )
    lengths = [chat.full[0] for chat in chats]
    answers, learnt = sum(chat.full[1] for chat in chats), sum(int(c.learnt.sum()) for c in kept)
    share = sum(length > max_len + 1 for length in lengths) / len(lengths)
    notes = [
        f"conversations {purpose} of {median(lengths):g} tokens (median), {max(lengths)} (longest);"
        f" {setting('max_len', max_len)} cuts {share:.1%} of them, and {1 - learnt / answers:.1%}"
        f" of the {answers:,} tokens that are learnt"
        if answers
        else ""
    ]
    if left_out := len(chats) - len(kept):
        notes.append(f"{left_out:,} {purpose} left out, without an answer in them")
    return kept, notes


class Conversations(Dataset[Any]):
    """Conversations, each a sample."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self._chats = chats

    def __len__(self) -> int:
        return len(self._chats)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = _shifted(self._chats[index])
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}, labels


class Windows(Dataset[Any]):
    """Windows of several conversations, which do not see one another."""

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
    """Returns the inputs, and for each the next token, or -100 where it is not learnt."""
    ids = torch.from_numpy(chat.ids.astype(np.int64))
    learnt = torch.from_numpy(chat.learnt)
    return ids[:-1], ids[1:].masked_fill(~learnt[1:], IGNORED)


def _tokens(chats: Sequence[Chat]) -> int:
    return sum(len(chat.ids) - 1 for chat in chats)


def _packed(chats: Sequence[Chat], length: int) -> list[list[int]]:
    """Returns the conversations of each window: the longest first, each where it fits best."""
    order = sorted(range(len(chats)), key=lambda number: -len(chats[number].ids))
    windows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # the free places of each window, in order, and its number
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
