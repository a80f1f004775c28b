"""Samples with several classes: a list for the whole text, or one for each word."""

import json

import pytest
import torch
from support.small_hub import write_llama

from hybridtrain.datasets import hf_datasets
from hybridtrain.errors import DataError

pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "llama"
    write_llama(folder)
    return str(folder)


def lines(path, *samples):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return str(path)


def test_a_sample_with_several_classes_has_a_one_for_each(tokenizer, tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        *[{"text": "good film", "label": ["new", "fun"]}] * 3,
        *[{"text": "bad plot", "label": ["old"]}, {"text": "fine", "label": []}] * 3,
    )
    data = hf_datasets(path, tokenizer, task="multilabel", eval_path=path)
    assert data.metadata["classes"] == ["fun", "new", "old"]
    assert data.metadata["task"] == "multilabel"
    assert [data.train[i][1].tolist() for i in (0, 3, 4)] == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert torch.equal(data.train.labels().sum(0), torch.tensor([3.0, 3, 3]))
    inputs, labels = data.collate([data.train[0], data.train[3]])
    assert labels.shape == (2, 3)
    assert inputs["input_ids"].shape[0] == 2


def test_the_first_token_of_a_word_has_its_class(tokenizer, tmp_path):
    sample = {"text": ["good", "film", "bad"], "label": ["O", "FILM", "O"]}
    path = lines(tmp_path / "a.jsonl", *[sample] * 4)
    data = hf_datasets(path, tokenizer, task="token_classification", eval_path=path)
    assert data.metadata["classes"] == ["FILM", "O"]
    inputs, labels = data.train[0]
    assert labels.tolist() == [1, 0, 1]
    assert len(inputs["input_ids"]) == 3
    assert data.train.labels().bincount().tolist() == [4, 8]


@pytest.mark.parametrize(
    ("task", "sample", "message"),
    [
        ("multilabel", {"text": "good", "label": "new"}, "target=label.* a list of classes"),
        ("classification", {"text": "good", "label": ["new"]}, "has lists: set task=multilabel"),
        ("token_classification", {"text": "good", "label": ["new"]}, "must have a list of words"),
        (
            *("token_classification", {"text": ["good"], "label": ["new", "old"]}),
            "1 words in text.* 2 classes",
        ),
    ],
)
def test_a_sample_of_another_kind_is_one_clear_error(task, sample, message, tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", *[sample] * 4)
    with pytest.raises(DataError, match=message):
        _ = hf_datasets(path, tokenizer, task=task, eval_path=path).train[0]
