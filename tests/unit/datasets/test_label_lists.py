"""Samples with several classes: a list for the whole text, or one for each word."""

import json

import pytest
import torch
from support.cases import installed
from support.small_hub import write_llama

from hybridtrain.datasets import hf_datasets
from hybridtrain.errors import DataError

installed("transformers")
installed("datasets")


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


@pytest.mark.parametrize("quote", ["'", '"'])
def test_lists_that_are_texts_in_a_csv_are_lists(quote, tokenizer, tmp_path):
    path = tmp_path / "a.csv"
    rows = [["new", "fun"], ["old"], []] * 2
    texts = [str(row).replace("'", quote) for row in rows]
    path.write_text("text;label\n" + "".join(f"good film;{text}\n" for text in texts).replace(
        '"', '""').replace(";[", ';"[').replace("]\n", ']"\n'))  # fmt: skip
    data = hf_datasets(str(path), tokenizer, task="multilabel", eval_path=str(path))
    assert data.metadata["classes"] == ["fun", "new", "old"]
    assert data.train[0][1].tolist() == [1, 1, 0]
    path.write_text("text;label\n" + "good;['new' 'fun']\n" * 2)  # as NumPy writes it
    with pytest.raises(DataError, match=r"a list of classes, such as \[\"a\", \"b\"\], but"):
        hf_datasets(str(path), tokenizer, task="multilabel", eval_path=str(path))
    path.write_text("text;label\n" + "good;['new', ' ']\ngood;[1]\n")
    with pytest.raises(DataError, match="column label of the train split has lists of texts and"):
        hf_datasets(str(path), tokenizer, task="multilabel", eval_path=str(path))
    path.write_text("text;label\n" + "good;[0, 1, 1]\ngood;[1, 0, 0]\n")
    data = hf_datasets(str(path), tokenizer, task="multilabel", eval_path=str(path))
    assert data.train[0][1].tolist() == [0, 1, 1]
    path.write_text("text;label\n" + "['good', 'film'];['O', 'P']\n" * 2)
    data = hf_datasets(str(path), tokenizer, task="token_classification", eval_path=str(path))
    assert data.metadata["classes"] == ["O", "P"]


@pytest.mark.parametrize("form", ["vector", "floats", "two", "columns", "csv"])
def test_labels_of_0_and_1_are_vectors_and_the_data_line_says_so(form, tokenizer, tmp_path):
    rows = [[0, 1, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]]
    rows = [row[:2] for row in rows] if form == "two" else rows
    names = ["old", "new", "fun"][: len(rows[0])]
    target, path = ["label"], tmp_path / "a.jsonl"
    if form in ("vector", "two"):
        lines(path, *({"text": "good", "label": row} for row in rows))
    elif form == "floats":
        lines(path, *({"text": "good", "label": [*map(float, row)]} for row in rows))
    elif form == "columns":
        target = names
        lines(path, *({"text": "good", **dict(zip(names, row, strict=True))} for row in rows))
    else:
        target, path = names, tmp_path / "a.csv"
        table = ["text;old;new;fun", *("good;" + ";".join(map(str, row)) for row in rows)]
        path.write_text("\n".join(table))
    settings = {"task": "multilabel", "eval_path": str(path), "target": target}
    data = hf_datasets(str(path), tokenizer, classes=names, **settings)
    assert [data.train[i][1].tolist() for i in range(4)] == rows
    assert data.train.labels().tolist() == rows
    line = str(data)
    assert "labels as " in line
    assert " of 0 and 1" in line
    assert f"{len(names)} classes: old (1), new (2)" in line
    with pytest.raises(DataError, match=f"has 1 names, but each sample has {len(names)} labels"):
        hf_datasets(str(path), tokenizer, classes=["old"], **settings)


@pytest.mark.parametrize("are_vectors", [True, False])
def test_the_training_samples_decide_whether_lists_of_0_and_1_are_vectors(
    are_vectors, tokenizer, tmp_path
):
    rows = [[0, 1], [1, 0]] if are_vectors else [[0, 1], [1]]
    path = lines(tmp_path / "a.jsonl", *({"text": "good", "label": row} for row in rows * 3))
    new = lines(tmp_path / "b.jsonl", *[{"text": "good", "label": [1, 0]}] * 2)
    settings = {"tokenizer": tokenizer, "task": "multilabel", "eval_path": new}
    data = hf_datasets(path, **settings)
    alone = hf_datasets.evaluated_alone(data.metadata, path=path, **settings)
    expected = [1, 0] if are_vectors else [1, 1]
    assert data.eval[0][1].tolist() == alone.eval[0][1].tolist() == expected
    lines(tmp_path / "b.jsonl", {"text": "good", "label": []})
    if are_vectors:
        with pytest.raises(DataError, match=r"of the eval split has \[\], but .* of 2 values"):
            hf_datasets.evaluated_alone(data.metadata, path=path, **settings)
    else:
        alone = hf_datasets.evaluated_alone(data.metadata, path=path, **settings)
        assert alone.eval[0][1].tolist() == [0, 0]


def test_several_columns_of_labels_have_0_or_1(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", *[{"text": "good", "old": 1, "new": 2}] * 4)
    with pytest.raises(DataError, match=r"target=new: sample 1 of the train split has 2"):
        hf_datasets(path, tokenizer, task="multilabel", target=["old", "new"], eval_path=path)


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
        ("multilabel", {"text": "good", "label": 3}, "target=label.* a list of classes"),
        ("multilabel", {"text": "good", "label": []}, "target=label: no training sample has a"),
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
