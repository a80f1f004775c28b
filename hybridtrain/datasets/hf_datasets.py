"""Text data sets for models of transformers, read by the Hugging Face library `datasets`.

    files, folder, name  --datasets-->  samples in a memory-mapped Arrow file
                         --tokenizer->  ids, of each sample on reading, or of all to pack them
                         --collate-->   a batch, padded to its longest sample

The library `datasets` (`pip install datasets`) is not this folder, `hybridtrain.datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hybridtrain.data import DataSplits, for_trained_models
from hybridtrain.datasets.held_out import check_share, note_without_held_out
from hybridtrain.datasets.label_vectors import IS_VECTOR, LabelVectors, label_vectors
from hybridtrain.datasets.sample_files import SampleFiles, Samples, check_columns, check_named
from hybridtrain.datasets.split_names import check_classes, class_numbers, listed
from hybridtrain.datasets.standard_input import STANDARD_INPUT, read_lines
from hybridtrain.datasets.tables import (
    Table,
    as_numbers,
    check_complete,
    check_finite,
    read_table,
    with_lists,
)
from hybridtrain.datasets.text_files import check_at_least_1
from hybridtrain.datasets.tokenizing import (
    decoder_start_of,
    end_of_text,
    load_tokenizer,
    padding_token,
    special_tokens,
    unknown_tokens,
    vocabulary_digest,
)
from hybridtrain.datasets.windows import window_splits
from hybridtrain.errors import DataError, argument, check_choice, setting
from hybridtrain.loss import IGNORED

TASKS = (
    "classification",
    "multilabel",
    "regression",
    "token_classification",
    "causal_lm",
    "masked_lm",
    "seq2seq",
)

# Tasks with classes, and the ones among them with a list of classes per sample.
_CLASSES = ("classification", "multilabel", "token_classification")
_LISTS = _CLASSES[1:]

# Words for a missing value.
_MISSING = ("nan", "na", "n/a", "null", "none")

# The number of texts to measure before a run.
_MEASURED_TEXTS = 2000

# The inputs padded with the tokenizer's padding token.
_IDS = ("input_ids", "decoder_input_ids")

# The number of texts to tokenize at once for packing.
_TEXTS_AT_A_TIME = 1000

Item = tuple[dict[str, Tensor], Tensor]


def _for_trained_models(
    metadata: Mapping[str, Any],
    tokenizer: str,
    task: str = "classification",
    name: str | None = None,
    classes: list[str] | None = None,
    text: str = "text",
    text_pair: str | None = None,
    separator: str | None = None,
    max_len: int = 128,
    pad: str = "longest",
    decoder_start: str | None = None,
    model_source: str | None = None,
    predict_path: str | None = None,
    **of_training: Any,
) -> DataSplits:
    """Returns only the texts of `predict_path`, and the tokenizer; see `for_trained_models`."""
    tok = load_tokenizer(tokenizer)
    tokenizer_facts: dict[str, Any] = {"vocab_size": len(tok), "max_len": max_len}
    if classes is not None:
        tokenizer_facts["classes"] = classes
    encode = _Encoder(tok, text, text_pair, max_len)
    start = -1
    if task == "seq2seq":  # as in training, also by an earlier release
        start = metadata["special_tokens"]["decoder_start_token_id"]
    to_predict = None
    if predict_path is not None:
        to_predict = _texts_to_predict(predict_path, name, separator, encode, task, start)
        if "longest" in metadata:
            lengths, complete = _lengths(
                to_predict.samples, tok, to_predict.texts, task != "causal_lm"
            )
            tokenizer_facts["longest"] = max([metadata["longest"], *lengths]) if complete else None
    return DataSplits(
        train=(),
        eval=None,
        predict=to_predict,
        predict_collate=_padded(tok, max_len, pad).of_inputs,
        metadata={**metadata, **tokenizer_facts},
        tokenizer=tok,
        vocabulary=vocabulary_digest(tok),
    )


def _padded(tokenizer: Any, max_len: int, pad: str) -> Padded:
    return Padded(padding_token(tokenizer) or 0, max_len if pad == "max_len" else None)


def _texts_to_predict(
    path: str, name: str | None, separator: str | None, encode: _Encoder, task: str, start: int
) -> Encoded:
    """Returns the texts of `predict_path`, or of standard input."""
    texts = [encode.text, *([encode.text_pair] if encode.text_pair is not None else [])]
    if path == STANDARD_INPUT:
        table = _of_standard_input(texts)
    else:
        table = read_table("predict_path", path, name, text=encode.text, separator=separator)
    check_complete(table, texts, "text")
    if task == "token_classification":
        table = with_lists(table, texts)
    alone = table.splits[next(s for s in ("test", *table.splits) if s in table.splits)]
    kind = None if task == "token_classification" else "text"
    check_columns({"predict": alone}, "text", [encode.text], kind)
    return _encoded(encode, task, alone, partial(_alone, encode, task, start), texts)


def _encoded(encode: _Encoder, task: str, *encoded: Any) -> Encoded:
    """Returns the samples of a task; see `Encoded` for the other arguments."""
    if task == "token_classification":
        return EncodedWords(encode.first_tokens, *encoded)
    return Encoded(*encoded)


@for_trained_models(_for_trained_models, skips_training=True, path="eval_path")
def hf_datasets(
    path: str,
    tokenizer: str,
    task: str = "classification",
    name: str | None = None,
    eval_path: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    eval_share: float = 0.1,
    split_seed: int = 0,
    stratify: bool | str = False,
    separator: str | None = None,
    drop_missing: bool = False,
    classes: list[str] | None = None,
    text: str = "text",
    text_pair: str | None = None,
    target: str | list[str] = "label",
    max_len: int = 128,
    pad: str = "longest",
    pack: bool = True,
    mask_share: float = 0.15,
    decoder_start: str | None = None,
    model_source: str | None = None,
    predict_path: str | None = None,
) -> DataSplits:
    """Returns texts for a model of transformers, from files, a folder or the Hugging Face Hub.

    Items are `(inputs, labels)`. The inputs are a dict with the argument names of the models'
    `forward`: `input_ids` and `attention_mask`, int64 of shape (tokens,), and any other output of
    the tokenizer. A batch is padded to its longest sample, with attention mask 0 at padding. The
    labels are for a plain loss over the model's logits:

    - `classification`: int64, 0-dim, for `cross_entropy`. Text classes are numbered in the order of
      their names.
    - `multilabel`: float32 of shape (classes,), 1 for each class in a sample's list, for `bce`. The
      list may also be the vector of 0 and 1, or there is a column of 0 and 1 for each label.
    - `token_classification`: int64 of shape (tokens,), for `cross_entropy`. The text is a list of
      words, and the target a list with a class for each; the first token of a word has its class,
      the others -100.
    - `regression`: float32 of shape (columns,), for `mse`.
    - `causal_lm`: int64 of shape (tokens,), for `cross_entropy`: the label at each position is the
      next token (labels are already shifted). With `pack`, all texts are joined, with the
      tokenizer's end-of-text token after each, and cut into windows of `max_len` tokens.
    - `masked_lm`: int64 of shape (tokens,): the original token at a share of the positions, -100
      elsewhere. 80% of these tokens become the mask, 10% another token. Every epoch draws new ones.
      Source: J. Devlin et al., BERT, 2019, section 3.1.
    - `seq2seq`: int64 of shape (tokens of `target`,); `decoder_input_ids` are the labels shifted
      right by a first token.

    Labels at padding are -100, which the losses ignore.

    Values are read as written: `NA` is a text, and a sample without a value raises an error that
    names its file and number. `ClassLabel` classes are matched by name in all splits.

    Metadata: `task`, `vocab_size`, `max_len`, `pad_index`, `special_tokens`; `num_classes` and
    `num_labels` for regression and tasks with classes, with the names `classes`, if there are any;
    `label_vectors` for multilabel; `seq_len` for packed texts; `longest`, the number of tokens of
    the longest text of all splits, if all texts were measured and batches are padded to their
    longest.

    Args:
        path: a file (.csv, .tsv, .json, .jsonl, .parquet, .arrow, .txt; the text formats also with
            .gz); several files by a pattern, `parts/*.jsonl`; a folder of such files named after
            their splits; a folder written by `save_to_disk`; or a name on the Hub.
        tokenizer: a `tokenizer.json`, a tokenizer folder, or a name on the Hub.
        task: classification, multilabel, regression, token_classification, causal_lm, masked_lm or
            seq2seq.
        name: the configuration, for a data set on the Hub with several.
        eval_path: the path of the evaluation split, like `path`; None: a split of `path`, or a
            held-out share of it.
        train_split: the split to train on.
        eval_split: the split to evaluate on; None: validation, test or another of the usual names.
        eval_share: the share to hold out if there is no evaluation split, 0 to 1.
        split_seed: the seed for choosing held-out samples.
        stratify: for classification, whether to hold out the share of each class; `auto`: if each
            class has enough samples.
        separator: the separator of CSV and TSV files, one character or `comma`, `semicolon`, `tab`
            or `pipe`; None: guess it from the header.
        drop_missing: whether to leave out samples without a text or a target, or with a blank one;
            False: a missing value is an error.
        classes: the class names in index order; None: sorted, or the order of a ClassLabel.
        text: the column of the text; in `.txt` files, each line is a text of this column.
        text_pair: the column of a second text, such as the sentence to compare with.
        target: the column of the class, of the list of classes (or a list with a column for each
            label), of the number (several: a list) or, for seq2seq, of the text.
        max_len: the maximum number of tokens of a sample, or the length of a window.
        pad: `longest`, or `max_len` for batches of one shape.
        pack: whether to join texts for causal_lm; False: each text is a sample.
        mask_share: the share of the tokens that masked_lm predicts, 0 to 1.
        decoder_start: the first token of a decoder; None: the model's, or the tokenizer's padding
            token if the model's files have none.
        model_source: the folder or the name of the model on the Hub; None: that of the tokenizer.
        predict_path: a path like `path` of texts without targets for the command `predict`; `-` for
            standard input, one text or JSON object per line.

    Raises:
        DataError: the data, a split, a column or the tokenizer is missing, damaged or of the wrong
            kind, a library is not installed, or an argument is out of range.
    """
    check_named(path=path, tokenizer=tokenizer)
    check_choice("task", task, TASKS)
    check_choice("pad", pad, ("longest", "max_len"))
    check_at_least_1(max_len=max_len)
    check_share(eval_share)
    if not 0 < mask_share < 1:
        raise DataError(f"{setting('mask_share', mask_share)} must be above 0 and below 1")
    tok = load_tokenizer(tokenizer)
    targets = [target] if isinstance(target, str) else list(target)
    if stratify is True and task != "classification":
        raise DataError(
            f"{setting('stratify', True)} needs one class per sample, but the task is "
            f"{setting('task', task)}: remove it"
        )
    files = SampleFiles(
        *(path, name, eval_path, train_split, eval_split, eval_share, split_seed),
        stratify=stratify,
        classes=targets[0] if task == "classification" else None,
        separator=separator,
        drop_missing=drop_missing,
        lists=[*(targets if task in _LISTS else ()), *([text] if task == _LISTS[1] else ())],
    )
    texts = [text, *([text_pair] if text_pair is not None else [])]
    needed = dict.fromkeys(texts, "text")
    if task in (*_CLASSES, "regression", "seq2seq"):
        needed |= dict.fromkeys(targets, "target")
    # a summary may be empty; a class or a number may not
    source = files.read(needed, blank_targets=task == "seq2seq")
    samples = source.samples
    words = task == "token_classification"
    check_columns(samples, "text", [text], None if words else "text")
    if text_pair is not None and words:
        raise DataError(
            f"{setting('text_pair', text_pair)} is a second text, but a sample of "
            f"{setting('task', task)} has one list of words: leave out {argument('text_pair')}"
        )
    if text_pair is not None:
        check_columns(samples, "text_pair", [text_pair], "text")
    pad_id = padding_token(tok)
    metadata: dict[str, Any] = {"task": task, "vocab_size": len(tok), "max_len": max_len}
    metadata |= {"special_tokens": special_tokens(tok)}
    if pad_id is not None:
        metadata |= {"pad_index": pad_id}
    encode = _Encoder(tok, text, text_pair, max_len)
    start = _start(tok, tokenizer, decoder_start, model_source) if task == "seq2seq" else -1
    if task == "seq2seq":
        metadata["special_tokens"] |= {"decoder_start_token_id": start}
    to_predict = None
    if predict_path is not None:
        to_predict = _texts_to_predict(predict_path, name, separator, encode, task, start)
    ids, _ = _measured(samples["train"], tok, texts, special=False)
    unknown = unknown_tokens(tok, tokenizer, chain.from_iterable(ids))
    others: dict[str, Any] = {
        "predict": to_predict,
        "predict_collate": _padded(tok, max_len, pad).of_inputs,
        "tokenizer": tok,
        "vocabulary": vocabulary_digest(tok),
        "held_out": source.held_out,
        "digest": source.digest,
    }
    if task == "causal_lm" and pack:
        others |= {"notes": [f"{len(samples['train']):,} texts", *unknown, *source.notes]}
        return replace(_packed(samples, tok, text, max_len, metadata), **others)
    if task == "seq2seq":
        check_columns(samples, "target", targets[:1], "text")
    special = task != "causal_lm"
    lengths, complete = _lengths(samples["train"], tok, texts, special)
    others |= {"notes": [_in_words(lengths, complete, max_len), *unknown, *source.notes]}
    # all columns that the model will read: it may have fewer positions than max_len
    others_read = [(samples["eval"], texts), *([(to_predict.samples, texts)] if to_predict else [])]
    if task == "seq2seq":
        others_read += [(of_split, targets[:1]) for of_split in samples.values()]
    for of_split, columns in others_read:
        split_lengths, is_complete = _lengths(of_split, tok, columns, special)
        lengths, complete = [*lengths, *split_lengths], complete and is_complete
    if complete and pad == "longest":
        metadata |= {"longest": max(lengths)}
    items: dict[str, Callable[[Mapping[str, Any]], Item]] = {}
    labels: Callable[[], Tensor] | None = None
    vectors = label_vectors(source, targets, classes) if task == "multilabel" else None
    if task == "multilabel":
        metadata |= {IS_VECTOR: vectors is not None}
    if vectors is not None:
        metadata |= {"num_classes": vectors.count, "num_labels": vectors.count}
        if vectors.names is not None:
            metadata |= {"classes": vectors.names}
        others |= {"without_samples": vectors.without_samples}
        others["notes"] = [vectors.note, *others["notes"]]
        items = dict.fromkeys(samples, partial(_in_vector, encode, vectors))
        labels = vectors.labels
    elif task in _CLASSES:
        numbering = number_classes(source, targets, classes, path, of_lists=task in _LISTS)
        metadata |= {"num_classes": numbering.count, "num_labels": numbering.count}
        if numbering.names is not None:
            metadata |= {"classes": numbering.names}
        others |= {"without_samples": numbering.without_samples}
        settings = {"multilabel": {"count": numbering.count}}.get(task, {})
        items = {
            split: partial(_OF_CLASSES[task], encode, targets[0], numbers, **settings)
            for split, numbers in numbering.numbers.items()
        }
        labels = partial(_labels_of, samples["train"], targets[0], numbering, task)
        if task == "classification" and source.held_out:
            missing = note_without_held_out(numbering.without_held_out(), stratify)
            others["notes"] = [*missing, *others["notes"]]
    elif task == "regression":
        _check_numbers(source, targets)
        metadata |= {"num_classes": len(targets), "num_labels": len(targets)}
        items = dict.fromkeys(samples, partial(_valued, encode, targets))
    elif task == "causal_lm":
        items = dict.fromkeys(samples, partial(_continued, encode))
    elif task == "masked_lm":
        items = dict.fromkeys(samples, partial(_masked, encode, _masks(tok, tokenizer, mask_share)))
    else:
        items = dict.fromkeys(samples, partial(_translated, encode, targets[0], start))
    return DataSplits(
        train=_encoded(encode, task, samples["train"], items["train"], texts, labels),
        eval=_encoded(encode, task, samples["eval"], items["eval"], texts),
        collate=_padded(tok, max_len, pad),
        metadata=metadata,
        **others,
    )


def _lengths(
    samples: Any, tokenizer: Any, columns: Sequence[str], special: bool
) -> tuple[list[int], bool]:
    """Returns the token counts of texts, with or without special tokens; True if all are
    measured."""
    ids, complete = _measured(samples, tokenizer, columns, special)
    return [*map(len, ids)], complete


def _measured(
    samples: Any, tokenizer: Any, columns: Sequence[str], special: bool
) -> tuple[list[list[int]], bool]:
    """Returns the tokens of texts, evenly spaced if there are many; True if of all texts."""
    if not len(samples):
        return [], True
    step = -(-len(samples) // _MEASURED_TEXTS)
    chosen = samples.select(range(0, len(samples), step), keep_in_memory=True)
    words = isinstance(chosen[0][columns[0]], list)
    texts = [[s[c] if words else _text(s, c) for s in chosen] for c in columns]
    settings = {"add_special_tokens": special, "is_split_into_words": words, "verbose": False}
    return tokenizer(*texts, **settings)["input_ids"], step == 1


def _in_words(lengths: Sequence[int], complete: bool, max_len: int) -> str:
    cut = sum(length > max_len for length in lengths) / len(lengths)
    of_how_many = "" if complete else f", in {len(lengths):,} texts"
    return (
        f"texts of {median(lengths):g} tokens (median), {max(lengths)} (longest), {cut:.0%} "
        f"truncated by "
        f"{setting('max_len', max_len)}{of_how_many}"
    )


class Encoded(Dataset[Any]):
    """Samples that are encoded when they are read.

    Args:
        samples: a `datasets.Dataset`.
        item: converts a sample to an item.
        texts: the columns of its texts.
        labels: returns the labels of all samples, see `DataSplits`; None: the task has no classes.
    """

    def __init__(
        self,
        samples: Any,
        item: Callable[[Mapping[str, Any]], Any],
        texts: Sequence[str] = (),
        labels: Callable[[], Tensor] | None = None,
    ) -> None:
        self.samples = samples
        self.item = item
        self.texts = texts
        # of the file's own
        self._ids = [name for name in samples.features if name.lower() == "id"][:1]
        if labels is not None:
            self.labels = labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.item(self.samples[index])

    def lengths(self) -> Tensor:
        """Returns the number of characters of each sample's texts, or of its words."""
        columns = [[len(text or ()) for text in self.samples[column]] for column in self.texts]
        return torch.tensor(columns, dtype=torch.int64).sum(0)

    def describe(self, index: int) -> dict[str, Any]:
        """Returns the id and the texts of a sample; `predict` writes them next to the result."""
        sample = self.samples[index]
        ids = {column: sample[column] for column in self._ids}
        # such as a date or bytes
        ids = {key: x if isinstance(x, str | int | None) else str(x) for key, x in ids.items()}
        return ids | {column: sample[column] for column in self.texts}


class EncodedWords(Encoded):
    """Samples that are lists of words, with a class for each.

    Args:
        first_tokens: returns, for the words of a sample, the position of the first token of each;
            None for a word without a token.
        encoded: the other arguments, see `Encoded`.
    """

    def __init__(
        self,
        first_tokens: Callable[[Sequence[str]], list[int | None]],
        *encoded: Any,
    ) -> None:
        super().__init__(*encoded)
        self._first_tokens = first_tokens

    def first_tokens(self, index: int) -> list[int | None]:
        """Returns the position of the first token of each word; None: the word has no token."""
        return self._first_tokens(self.samples[index][self.texts[0]])


def _of_standard_input(texts: Sequence[str]) -> Table:
    """Returns the samples on standard input: JSON objects, or texts for a single column.

    Raises:
        DataError: a line lacks a required column.
    """
    import datasets

    lines = read_lines("predict_path", "a text or a JSON object")
    if not all(line.lstrip().startswith("{") for line in lines):
        if len(texts) > 1:
            raise DataError(
                f"{argument('predict_path')}-: each sample has several texts ({', '.join(texts)}): "
                "write one JSON object per line"
            )
        return Table({"test": datasets.Dataset.from_dict({texts[0]: lines})})
    samples = []
    for number, line in enumerate(lines):
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{argument('predict_path')}-, line {number + 1}: not JSON ({error})"
            ) from error
        for column in texts:
            if not isinstance(sample.get(column), str):
                raise DataError(
                    f"{argument('predict_path')}-, line {number + 1}: no text in {column!r}, the "
                    f"column that the model was trained on"
                )
        ids = [key for key in sample if key.lower() == "id"]
        samples.append({column: sample[column] for column in (*ids, *texts)})
    return Table({"test": datasets.Dataset.from_list(samples)})


@dataclass(frozen=True)
class Padded:
    """A `collate_fn` that pads the tensors of samples at the end and stacks them.

    Attributes:
        pad_id: the padding token of `input_ids` and `decoder_input_ids`. Other inputs are padded
            with 0, and labels with -100.
        length: the length of the padded tensors; None: the length of the longest in the batch.
    """

    pad_id: int
    length: int | None = None

    def __call__(self, items: Sequence[Item]) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the batch `(inputs, labels)` of samples."""
        inputs = self.of_inputs([input_ for input_, _ in items])
        return inputs, self._joined([labels for _, labels in items], IGNORED)

    def of_inputs(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the batch of inputs without labels."""
        return {
            key: self._joined([item[key] for item in items], self.pad_id if key in _IDS else 0)
            for key in items[0]
        }

    def _joined(self, parts: Sequence[Tensor], padding: int) -> Tensor:
        if parts[0].dim() == 0 or parts[0].is_floating_point():
            return torch.stack([*parts])
        joined = pad_sequence([*parts], batch_first=True, padding_value=padding)
        missing = 0 if self.length is None else self.length - joined.shape[1]
        return F.pad(joined, (0, missing), value=padding) if missing > 0 else joined


@dataclass(frozen=True)
class _Encoder:
    """Encodes a sample's texts as model inputs."""

    tokenizer: Any
    text: str
    text_pair: str | None
    max_len: int

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        pair = None if self.text_pair is None else _text(sample, self.text_pair)
        return self.of(_text(sample, self.text), pair)

    def of_words(self, words: Sequence[str]) -> Any:
        """Returns the tokenizer's encoding of a list of words, truncated to `max_len` tokens.

        Raises:
            DataError: `words` is not a list.
        """
        if not isinstance(words, list):
            raise DataError(f"column {self.text} must have a list of words, but has {words!r} here")
        return self.tokenizer(
            words, is_split_into_words=True, truncation=True, max_length=self.max_len
        )

    def first_tokens(self, words: Sequence[str]) -> list[int | None]:
        """Returns the position of the first token of each word; None: dropped, or truncated."""
        positions: dict[int, int] = {}
        for position, word in enumerate(self.of_words(words).word_ids()):
            if word is not None:
                positions.setdefault(word, position)
        return [positions.get(word) for word in range(len(words))]

    def of(self, text: str, pair: str | None = None, **settings: Any) -> dict[str, Tensor]:
        """Returns the tensors of one or two texts, truncated to `max_len` tokens; at least one."""
        encoded = self.tokenizer(text, pair, truncation=True, max_length=self.max_len, **settings)
        tensors = {key: torch.tensor(value, dtype=torch.int64) for key, value in encoded.items()}
        if len(tensors["input_ids"]):
            return tensors
        # A sample of padding only would have a softmax over nothing.
        empty = {key: torch.zeros(1, dtype=torch.int64) for key in tensors}
        return {**empty, "attention_mask": torch.ones(1, dtype=torch.int64)}


# Items


def _classified(
    encode: _Encoder, column: str, classes: Mapping[Any, int], sample: Mapping[str, Any]
) -> Item:
    return encode(sample), torch.tensor(classes[sample[column]])


def _several(
    encode: _Encoder,
    column: str,
    classes: Mapping[Any, int],
    sample: Mapping[str, Any],
    count: int,
) -> Item:
    labels = torch.zeros(count)
    labels[[classes[value] for value in sample[column]]] = 1
    return encode(sample), labels


def _in_vector(encode: _Encoder, vectors: LabelVectors, sample: Mapping[str, Any]) -> Item:
    return encode(sample), vectors.of(sample)


def _by_word(
    encode: _Encoder, column: str, classes: Mapping[Any, int], sample: Mapping[str, Any]
) -> Item:
    words, values = sample[encode.text], sample[column]
    encoded = encode.of_words(words)
    if len(words) != len(values):
        raise DataError(
            f"a sample has {len(words)} words in {encode.text}, but {len(values)} classes in "
            f"{column}: {' '.join(map(str, words))[:80]}"
        )
    of_word = encoded.word_ids()
    labels = [
        IGNORED if word is None or word == before else classes[values[word]]
        for word, before in zip(of_word, [None, *of_word], strict=False)
    ]
    tensors = {key: torch.tensor(value, dtype=torch.int64) for key, value in encoded.items()}
    return tensors, torch.tensor(labels)


_OF_CLASSES: dict[str, Callable[..., Item]] = {
    "classification": _classified,
    "multilabel": _several,
    "token_classification": _by_word,
}


def _labels_of(samples: Any, column: str, numbering: Numbering, task: str) -> Tensor:
    """Returns the labels of all training samples; see `DataSplits`."""
    numbers = numbering.numbers["train"]
    if task == "classification":
        return torch.tensor([numbers[value] for value in samples[column]])
    lists = [[numbers[value] for value in values] for values in samples[column]]
    if task == "token_classification":
        return torch.tensor([number for of_sample in lists for number in of_sample])
    labels = torch.zeros(len(lists), numbering.count)
    for number, of_sample in enumerate(lists):
        labels[number, of_sample] = 1
    return labels


def _valued(encode: _Encoder, columns: Sequence[str], sample: Mapping[str, Any]) -> Item:
    values = [float(sample[column]) for column in columns]
    return encode(sample), torch.tensor(values, dtype=torch.float32)


def _continued(encode: _Encoder, sample: Mapping[str, Any]) -> Item:
    # one token more than the inputs: the last label of a truncated text is its next token
    longer = replace(encode, max_len=encode.max_len + 1)
    ids = longer.of(_text(sample, encode.text), add_special_tokens=False)["input_ids"]
    if len(ids) <= encode.max_len:
        ids = torch.cat([ids, torch.tensor(end_of_text(encode.tokenizer) or [IGNORED])])
    return {"input_ids": ids[:-1], "attention_mask": torch.ones_like(ids[:-1])}, ids[1:]


def _masked(encode: _Encoder, collator: Any, sample: Mapping[str, Any]) -> Item:
    inputs = encode.of(_text(sample, encode.text), return_special_tokens_mask=True)
    special = inputs.pop("special_tokens_mask")
    # draws with PyTorch, so the loader can seed it per sample
    ids, labels = collator.torch_mask_tokens(inputs["input_ids"][None], special[None])
    return {**inputs, "input_ids": ids[0]}, labels[0]


def _translated(encode: _Encoder, target: str, start: int, sample: Mapping[str, Any]) -> Item:
    encoded = encode.tokenizer(
        text_target=_text(sample, target), truncation=True, max_length=encode.max_len
    )
    labels = torch.tensor(encoded["input_ids"] or [start], dtype=torch.int64)
    first = torch.tensor([start])
    return {**encode(sample), "decoder_input_ids": torch.cat([first, labels[:-1]])}, labels


def _alone(encode: _Encoder, task: str, start: int, sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the inputs of a sample without a target; a decoder gets its first token."""
    if task == "causal_lm":
        inputs, _ = _continued(encode, sample)
        return inputs
    if task == "token_classification":
        encoded = encode.of_words(sample[encode.text])
        return {key: torch.tensor(value, dtype=torch.int64) for key, value in encoded.items()}
    first = {"decoder_input_ids": torch.tensor([start])} if task == "seq2seq" else {}
    return {**encode(sample), **first}


def _text(sample: Mapping[str, Any], column: str) -> str:
    value = sample[column]
    if not isinstance(value, str):
        raise DataError(f"column {column} must have a text, but has {value!r} here")
    return value


def _masks(tokenizer: Any, name: str, share: float) -> Any:
    from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token is None:
        raise DataError(
            f"{setting('task', 'masked_lm')} needs a mask token, but {setting('tokenizer', name)} "
            "has none: use the tokenizer of a masked language model, such as BERT, or set "
            f"{setting('task', 'causal_lm')}"
        )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)


def _start(tokenizer: Any, name: str, token: str | None, model: str | None) -> int:
    """Returns the id of the decoder's first token."""
    if token is None:
        if (start := decoder_start_of(model or name)) is not None:
            return start
        if tokenizer.pad_token_id is not None:
            return int(tokenizer.pad_token_id)
        raise DataError(
            f"{setting('tokenizer', name)} has no padding token: set {argument('decoder_start')}"
        )
    if not isinstance(token, str):  # a token in brackets is read as a list
        raise DataError(
            f"{setting('decoder_start', token)} must be a text: quote the token, as in "
            f"'{argument('decoder_start')}\"[CLS]\"'"
        )
    if token not in tokenizer.get_vocab():
        raise DataError(
            f"{setting('decoder_start', token)} is not a token of {setting('tokenizer', name)}"
        )
    return int(tokenizer.convert_tokens_to_ids(token))


# Packed texts


def _packed(
    samples: Mapping[str, Any], tokenizer: Any, column: str, length: int, metadata: dict[str, Any]
) -> DataSplits:
    def too_few(split: str, tokens: int) -> str:
        return (
            f"{tokens} tokens in the column {column} of the {split} split are too few for one "
            f"window of {setting('max_len', length)} and the next token: set a smaller "
            f"{argument('max_len')}, or {setting('pack', False)}"
        )

    texts = [_joined_ids(samples[split], tokenizer, column) for split in ("train", "eval")]
    splits = window_splits(texts, length, len(tokenizer), too_few, prepare=as_inputs)
    return replace(splits, metadata={**splits.metadata, **metadata})


def as_inputs(x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns windows without padding as the inputs of a transformers model."""
    return {"input_ids": x, "attention_mask": torch.ones_like(x)}, y


def _joined_ids(samples: Any, tokenizer: Any, column: str) -> NDArray[Any]:
    end = end_of_text(tokenizer)
    parts = [np.zeros(0, dtype=np.int32)]
    for batch in samples.select_columns([column]).iter(_TEXTS_AT_A_TIME):
        texts = [text for text in batch[column] if text]
        if texts:
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(np.fromiter((i for ids in encoded for i in [*ids, *end]), dtype=np.int32))
    return np.concatenate(parts)


# Samples


def _check_numbers(source: Samples, columns: Sequence[str]) -> None:
    """Refuses columns with values that are not finite numbers; CSV stores numbers as text."""
    check_columns(source.samples, "target", columns, None if source.numbers_are_texts else "number")
    for table in source.tables:
        check_finite(table, columns, "target")


@dataclass(frozen=True)
class Numbering:
    """The numbering of classes.

    Attributes:
        count: the number of classes.
        names: the class names in index order; None: the data has only numbers.
        numbers: by split, the class index of each value in the data.
        without_samples: the classes without a training sample.
    """

    count: int
    names: list[str] | None
    numbers: dict[str, dict[Any, int]]
    without_samples: list[str]

    def without_held_out(self) -> list[str]:
        """Returns the names of the classes without an evaluation sample."""
        names = self.names or [*map(str, range(self.count))]
        of_eval = {*self.numbers["eval"].values()}
        return [name for number, name in enumerate(names) if number not in of_eval]


def number_classes(
    source: Samples,
    targets: Sequence[str],
    classes: Sequence[str] | None,
    path: str,
    of_lists: bool = False,
) -> Numbering:
    """Returns the numbering of the classes; splits are matched by class names, if there are any.

    Args:
        source: the samples.
        targets: the column of the classes.
        classes: the class names in index order; None: sorted.
        path: the path of the data, for messages.
        of_lists: True if each sample has a list of classes.
    """
    if len(targets) != 1:
        raise DataError(f"{setting('target', targets)}: classification needs a single column")
    (column,) = targets
    samples = source.samples
    check_columns(samples, "target", [column])
    values = {split: _values(of_split, column, of_lists) for split, of_split in samples.items()}
    # by split, the name or the number that each value represents
    meaning: dict[str, dict[Any, Any]] = {}
    order: list[str] | None = None
    for split, split_values in values.items():
        feature = samples[split].features[column]
        # a ClassLabel, or a list of them
        names = getattr(getattr(feature, "feature", feature), "names", None)
        if names and all(
            isinstance(value, int) and 0 <= value < len(names) for value in split_values
        ):
            meaning[split] = {value: names[value] for value in split_values}
            order = list(names) if split == "train" else order
        else:
            meaning[split] = {value: value for value in split_values}
    every = [*values["train"], *values["eval"]]
    if classes is None and not (every if source.held_out else values["train"]):
        raise DataError(f"{setting('target', column)}: no training sample has a class")
    if floats := [value for value in every if isinstance(value, float)]:
        for table in () if of_lists else source.tables:
            check_finite(table, [column], "target")
        # as in a file of pandas with a missing value
        if all(map(float.is_integer, floats)):
            meaning = {
                split: {v: int(m) if isinstance(m, float) else m for v, m in of_split.items()}
                for split, of_split in meaning.items()
            }
    # of the classes 1, 2 and other, "1" is the first one, also in samples without the last one
    are_names = classes is not None and as_numbers(classes) is None and {*every} <= {*classes}
    if classes is None and source.numbers_are_texts:
        _check_no_nan(every, column)
    numbers = as_numbers(every) if source.numbers_are_texts and not are_names else None
    if numbers is not None:
        as_number = dict(zip(every, numbers, strict=True))
        meaning = {
            split: {v: as_number[v] for v in split_values} for split, split_values in values.items()
        }
    kinds = {
        split: {type(value) for value in names_of_split.values()}
        for split, names_of_split in meaning.items()
    }
    together = kinds["train"] | kinds["eval"]
    if together <= {int, bool}:
        return _numbered(column, meaning, classes)
    if together != {str}:
        if together <= {int, bool, str} and all(len(kind) == 1 for kind in kinds.values()):
            raise DataError(
                f"{setting('target', column)}: one split has class names and the other has "
                "numbers, so they cannot be matched: use names in both"
            )
        shown = ", ".join(sorted(kind.__name__ for kind in together))
        raise DataError(
            f"{setting('target', column)} has values of type {shown}, but classes must be text or "
            f"whole numbers (for other numbers, set {setting('task', 'regression')})"
        )
    used = {
        split: sorted(set(names_of_split.values())) for split, names_of_split in meaning.items()
    }
    data_classes = used["train"]
    if source.held_out:  # a class may occur only in the held-out samples
        data_classes = sorted({*used["train"], *used["eval"]})
    class_names = class_numbers(
        order or data_classes, classes, "classes", f"{setting('target', column)} of {path}"
    )
    if unknown := [name for name in used["eval"] if name not in class_names]:
        raise DataError(
            f"{setting('target', column)}: the train split has no class {listed(unknown)}; it has "
            f"{listed(class_names)}"
        )
    check_classes(used["train"], class_names, f"{setting('target', column)}", argument("classes"))
    number = {name: i for i, name in enumerate(class_names)}
    return Numbering(
        len(class_names),
        class_names,
        {
            split: {v: number[name] for v, name in names_of_split.items()}
            for split, names_of_split in meaning.items()
        },
        [name for name in class_names if name not in used["train"]],
    )


def _check_no_nan(values: Sequence[Any], column: str) -> None:
    """Refuses a word for a missing value among numbers in a CSV file; it would be a class."""
    words = sorted({value for value in values if str(value).strip().casefold() in _MISSING})
    others = [value for value in values if value not in words]
    if words and others and as_numbers(others) is not None:
        raise DataError(
            f"{setting('target', column)} has {listed(words)} among numbers: remove such samples, "
            "or give this class another name"
        )


def _values(samples: Any, column: str, of_lists: bool) -> set[Any]:
    """Returns the values in a column, or in its lists.

    Raises:
        DataError: a value is not a list where one is required, or is a list elsewhere.
    """
    if of_lists:
        values: set[Any] = set()
        for number, classes in enumerate(samples[column], 1):
            if not isinstance(classes, list):
                raise DataError(
                    f"{setting('target', column)}: every sample must have a list of classes, such "
                    f'as ["a", "b"], but sample {number} has {classes!r}'
                )
            values.update(classes)
        return values
    if not hasattr(samples.features[column], "dtype") or "list" in str(samples.features[column]):
        raise DataError(
            f"{setting('target', column)} has lists: set {setting('task', 'multilabel')} or, for "
            f"classes of words, {setting('task', 'token_classification')}"
        )
    # `unique` of chosen samples would write a file next to those of the data set
    chosen = samples.select_columns([column]).with_format("arrow")[:]
    return set(chosen.column(column).unique().to_pylist())


def _numbered(
    column: str, meaning: Mapping[str, Mapping[Any, int]], classes: Sequence[str] | None
) -> Numbering:
    """Returns the classes of numeric data; `classes` may name them."""
    values = {number for numbers in meaning.values() for number in numbers.values()}
    count = len(classes) if classes is not None else max(values) + 1
    # without values, no sample to evaluate on has a class
    if values and (min(values) < 0 or max(values) >= count or count > 10 * len(values)):
        raise DataError(
            f"{setting('target', column)} has {len(values)} values, from {min(values)} to "
            f"{max(values)}, but classes must be numbered from 0"
            + (f" to {count - 1}, by {setting('classes', listed(classes))}" if classes else "")
            + f" (for other numbers, set {setting('task', 'regression')})"
        )
    unused = sorted({*range(count)} - {int(number) for number in meaning["train"].values()})
    return Numbering(
        count,
        None if classes is None else list(classes),
        {
            split: {v: int(number) for v, number in numbers.items()}
            for split, numbers in meaning.items()
        },
        [str(classes[number]) if classes else str(number) for number in unused],
    )
