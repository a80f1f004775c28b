"""Texts of Hugging Face's data sets for models of transformers, read without a network."""

import csv
import gzip
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.cases import installed
from support.loaders import world_of
from support.small_data import rows_of_texts, write_tokenizer

from hybridtrain.data import EvalLoader, TrainLoader, example_batch
from hybridtrain.datasets import hf_datasets
from hybridtrain.datasets.tables import read_table
from hybridtrain.errors import ConfigError, DataError, UserError
from hybridtrain.loss import cross_entropy
from hybridtrain.models import transformers_model
from hybridtrain.options import LoaderOptions

datasets = installed("datasets")
transformers = installed("transformers")

ROWS = rows_of_texts(40)


@pytest.fixture(autouse=True)
def _kept_apart(tmp_path, monkeypatch):
    """The library's cache is in the test's folder, and it does not look for a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def tokenizer(tmp_path):
    return str(write_tokenizer(tmp_path / "tokenizer.json"))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


def write(tmp_path, kind):
    """Writes the rows in a format, and returns the path."""
    path = tmp_path / f"texts.{kind}"
    whole = datasets.Dataset.from_list(ROWS)
    if kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "jsonl":
        whole.to_json(path)
    elif kind == "parquet":
        whole.to_parquet(path)
    else:
        whole.save_to_disk(path)
    return str(path)


def batches(splits, replica=0, replicas=1, skip=0, count=5, **options):
    options = LoaderOptions(collate=splits.collate, **options)
    loader = TrainLoader(splits.train, 8, world_of(replica, replicas), seed=1, options=options)
    loader.seek(0, 8 * skip)
    stream = loader.stream()
    try:
        return [(batch.inputs, batch.targets) for batch in itertools.islice(stream, count)]
    finally:
        stream.close()


def samples_of(of_batches):
    """Returns the samples of batches, each without its padding, which depends on the others."""
    found = []
    for inputs, labels in of_batches:
        for i, mask in enumerate(inputs["attention_mask"].bool()):
            label = labels[i][mask] if labels.shape[1:] == mask.shape else labels[i]
            found.append((inputs["input_ids"][i][mask].tolist(), label.tolist()))
    return found


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "arrow folder"])
def test_every_format_gives_the_same_samples(tmp_path, tokenizer, kind):
    splits = hf_datasets(write(tmp_path, kind), tokenizer, eval_share=0.25)
    assert (len(splits.train), len(splits.eval)) == (30, 10)
    plain = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer)
    expected = {
        (tuple(plain(row["text"])["input_ids"]), int(row["label"] == "pos")) for row in ROWS
    }
    found = [
        (tuple(inputs["input_ids"].tolist()), int(label))
        for inputs, label in [*splits.train, *splits.eval]
    ]
    assert len(found) == 40
    assert set(found) == expected
    assert splits.metadata | {"vocab_size": 0} == {
        **{"vocab_size": 0, "max_len": 128, "pad_index": 0, "num_classes": 2, "num_labels": 2},
        **{"task": "classification", "classes": ["neg", "pos"], "longest": 23},
        "special_tokens": {"pad_token_id": 0, "sep_token_id": 3},
    }


def test_files_named_after_their_splits_are_these_splits(tmp_path, tokenizer):
    for name, part in (("train", ROWS[:30]), ("validation", ROWS[30:34]), ("test", ROWS[34:])):
        file = tmp_path / "folder" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(map(json.dumps, part)))
    folder = str(file.parent)
    splits = hf_datasets(folder, tokenizer)
    assert (len(splits.train), len(splits.eval)) == (30, 4)
    assert len(hf_datasets(folder, tokenizer, eval_split="test").eval) == 6
    other = hf_datasets(f"{folder}/train.jsonl", tokenizer, eval_path=f"{folder}/test.jsonl")
    assert (len(other.train), len(other.eval)) == (30, 6)


def test_a_batch_is_padded_to_its_longest_sample_and_its_mask_says_where(tokenizer, table):
    splits = hf_datasets(table, tokenizer, max_len=12)
    for inputs, labels in batches(splits):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert [*inputs] == ["input_ids", "attention_mask"]
        assert ids.shape == mask.shape
        assert ids.shape[1] == mask.sum(1).max() <= 12
        assert torch.equal(mask.bool(), ids != 0)
        assert (mask.sort(1, descending=True).values == mask).all()  # at the end
        assert labels.shape == ids.shape[:1]
    padded = hf_datasets(table, tokenizer, max_len=12, pad="max_len")
    assert {inputs["input_ids"].shape[1] for inputs, _ in batches(padded)} == {12}
    assert samples_of(batches(padded)) == samples_of(batches(splits))


def test_two_texts_are_tokenised_as_a_pair(tokenizer, table):
    splits = hf_datasets(table, tokenizer, text_pair="other")
    inputs, _ = splits.train[0]
    assert (inputs["input_ids"] == 3).sum() == 2  # [SEP]


def test_regression_has_a_column_for_each_number(tokenizer, table):
    splits = hf_datasets(table, tokenizer, task="regression", target="score")
    _, targets = batches(splits, count=1)[0]
    assert (targets.dtype, targets.shape) == (torch.float32, (8, 1))
    scores = {round(row["score"], 5) for row in ROWS}
    assert {round(float(value), 5) for value in targets.flatten()} <= scores
    assert splits.metadata["num_labels"] == 1


@pytest.mark.parametrize("pack", [True, False])
def test_the_labels_of_a_causal_model_are_the_next_tokens(tokenizer, table, pack):
    splits = hf_datasets(table, tokenizer, task="causal_lm", pack=pack, max_len=16)
    for inputs, labels in batches(splits, count=3):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert ids.shape == mask.shape == labels.shape
        for row, of_row, length in zip(ids, labels, mask.sum(1).tolist(), strict=True):
            assert torch.equal(row[1:length], of_row[: length - 1])
            assert (of_row[length:] == -100).all()
            assert of_row[length - 1] != -100
    if pack:
        x, y = splits.train.__getitems__(range(len(splits.train)))
        assert bool(x["attention_mask"].all())
        joined = x["input_ids"].flatten()
        assert torch.equal(joined[1:], y.flatten()[:-1])
        assert (joined == 3).sum() > 20  # [SEP] after each text


def test_a_text_that_is_cut_has_its_next_token_as_the_last_label(tokenizer, table):
    cut = hf_datasets(table, tokenizer, task="causal_lm", pack=False, max_len=2)
    whole = hf_datasets(table, tokenizer, task="causal_lm", pack=False, max_len=512)
    shortened = 0
    for (inputs, labels), (all_inputs, all_labels) in zip(cut.train, whole.train, strict=True):
        assert torch.equal(inputs["input_ids"], all_inputs["input_ids"][:2])
        assert torch.equal(labels, all_labels[:2])
        shortened += len(all_labels) > 2
    assert shortened > 10


def test_the_loss_of_shifted_labels_is_that_of_the_model_itself(tokenizer, table):
    splits = hf_datasets(table, tokenizer, task="causal_lm", pack=False, max_len=16)
    size = splits.metadata["vocab_size"]
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    inputs, labels = batches(splits, count=1)[0]
    # the text with its end: what a model shifts itself
    lengths = inputs["attention_mask"].sum(1)
    own = F.pad(inputs["input_ids"], (0, 1), value=-100)
    own[torch.arange(8), lengths] = labels[torch.arange(8), lengths - 1]
    own = own.masked_fill(torch.arange(own.shape[1]) > lengths[:, None], -100)
    with torch.no_grad():
        loss = cross_entropy(model(**inputs), labels)
        mask = F.pad(inputs["attention_mask"], (1, 0), value=1)
        expected = model(own.clamp_min(0), attention_mask=mask, labels=own).loss
    assert torch.allclose(loss, expected, atol=1e-6)  # attention over another length


def test_a_padded_sample_has_the_logits_it_has_alone(tokenizer, table):
    splits = hf_datasets(table, tokenizer)
    size = splits.metadata["vocab_size"]
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    inputs, _ = batches(splits, count=1)[0]
    with torch.no_grad():
        together = model(**inputs).logits
        for i, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
            alone = model(**{key: value[i : i + 1, :length] for key, value in inputs.items()})
            # sums over a longer row round differently
            assert torch.allclose(alone.logits[0], together[i], atol=1e-6)


def test_masked_tokens_are_the_labels_and_special_ones_are_never_masked(tokenizer, table):
    splits = hf_datasets(table, tokenizer, task="masked_lm", mask_share=0.5)
    plain = hf_datasets(table, tokenizer, task="classification")
    mask, replaced = 4, 0
    for i in range(len(splits.train)):
        inputs, labels = splits.train[i]
        original = plain.train[i][0]["input_ids"]
        chosen = labels != -100
        assert torch.equal(labels[chosen], original[chosen])
        assert torch.equal(inputs["input_ids"][~chosen], original[~chosen])
        assert not chosen[original < 4].any()
        replaced += int((inputs["input_ids"] == mask).sum())
    assert replaced > 50


@pytest.mark.parametrize("task", ["classification", "masked_lm", "causal_lm"])
@pytest.mark.quick_cases(1)
def test_a_resume_inside_an_epoch_with_other_processes_has_the_same_samples(tokenizer, table, task):
    splits = hf_datasets(table, tokenizer, task=task, max_len=16)
    whole = batches(splits, count=4)
    resumed = batches(splits, skip=2, count=2, workers=2)
    for (x, y), (other, of_other) in zip(whole[2:], resumed, strict=True):
        assert all(torch.equal(x[key], other[key]) for key in x)
        assert torch.equal(y, of_other)
    parts = [batches(splits, replica=i, replicas=2, skip=2, count=2) for i in (0, 1)]
    for number, batch in enumerate(whole[2:]):
        found = samples_of([part[number] for part in parts])
        assert found == samples_of([batch])
    if task == "masked_lm":
        assert samples_of(batches(splits, skip=5, count=5)) != samples_of(batches(splits, count=5))


def test_every_row_is_evaluated_once_with_the_same_masks_each_time(tokenizer, table):
    splits = hf_datasets(table, tokenizer, task="masked_lm", eval_share=0.25)
    options = LoaderOptions(collate=splits.collate)
    one, other = (
        samples_of(
            pair
            for replica in range(replicas)
            for pair in EvalLoader(splits.eval, 4, world_of(replica, replicas), options=options)
        )
        for replicas in (1, 2)
    )
    assert len(one) == 10
    assert one == other


def test_the_decoder_reads_the_labels_after_a_first_token(tokenizer, table):
    splits = hf_datasets(table, tokenizer, task="seq2seq", target="other")
    for inputs, labels in batches(splits, count=2):
        decoder = inputs["decoder_input_ids"]
        assert decoder.shape == labels.shape
        assert (decoder[:, 0] == 0).all()
        kept = labels[:, 1:] != -100
        assert torch.equal(decoder[:, 1:][kept], labels[:, :-1][kept])
    first, _ = hf_datasets(
        table, tokenizer, task="seq2seq", target="other", decoder_start="[CLS]"
    ).train[0]
    assert int(first["decoder_input_ids"][0]) == 2


def test_an_empty_text_still_has_a_token(tmp_path, tokenizer):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n".join(json.dumps({"text": "", "label": i % 2}) for i in range(8)))
    splits = hf_datasets(str(path), tokenizer, task="causal_lm", pack=False)
    inputs, labels = example_batch(splits.train, 4, splits.collate)
    assert (inputs["attention_mask"].sum(1) >= 1).all()
    assert labels.shape == inputs["input_ids"].shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "none.csv"}, r"path=none\.csv: no such file or folder"),
        ({"path": None}, "path= is not set"),
        ({"path": "some/name"}, "path=some/name .* the Hub"),
        ({"tokenizer": "./none.json"}, r"tokenizer=\./none\.json: no such file"),
        ({"text": "txt"}, r"text=txt: the train split has no such column; it has text \(string"),
        ({"text": "score"}, r"text=score must have texts.* float64"),
        ({"text_pair": "score"}, "text_pair=score must have texts"),
        ({"target": "score"}, r"target=score has values of type float.*task=regression"),
        ({"target": ["label", "text"]}, "target=.*label.*text"),
        ({"task": "regression"}, r"target=label must have numbers.* string"),
        ({"task": "seq2seq", "target": "score"}, "target=score must have texts"),
        ({"task": "translate"}, "task=translate is unknown: the choices are: classification"),
        ({"pad": "left"}, "pad=left is unknown"),
        ({"eval_split": "test"}, r"eval_split=test: .* has no such split; it has train"),
        ({"train_split": "all"}, r"train_split=all: .* has no such split; it has train"),
        ({"max_len": 0}, "max_len=0 must be at least 1"),
        ({"mask_share": 1.0}, r"mask_share=1\.0 must be above 0 and below 1"),
        ({"task": "causal_lm", "max_len": 5000}, "too few for one window of max_len=5000"),
        ({"task": "seq2seq", "target": "other", "decoder_start": "<x>"}, "decoder_start=<x> is no"),
        ({"task": "seq2seq", "target": "other", "decoder_start": ["x"]}, "must be a text: quote"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_its_key(tokenizer, table, settings, message):
    with pytest.raises(UserError, match=message):
        hf_datasets(**{"path": table, "tokenizer": tokenizer, **settings})


@pytest.mark.parametrize("name", ["broken.jsonl", "broken.json", "broken.parquet", "broken.docx"])
def test_a_damaged_file_is_named(tmp_path, tokenizer, name):
    path = tmp_path / name
    path.write_text('{"text": "a", "lab')
    found = r" cannot be read \(|, line 1 is not JSON: Unterminated.* column 15|: .*formats are"
    with pytest.raises(DataError, match=rf"{name}({found})"):
        hf_datasets(str(path), tokenizer)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz"])
def test_a_line_that_is_not_json_is_named_among_several_files(tmp_path, tokenizer, suffix, capfd):
    lines = [json.dumps(row) for row in ROWS]
    opened = gzip.open if suffix.endswith("gz") else open
    for name, content in (("a", lines), ("b", [*lines[:5], '{"text": "a", "lab', *lines[5:]])):
        with opened(tmp_path / f"{name}.{suffix}", "wt") as file:
            file.write("\n".join(content))
    with pytest.raises(
        DataError, match=rf"b\.{suffix}, line 6 is not JSON: Unterminated.*column 15"
    ):
        hf_datasets(str(tmp_path / f"*.{suffix}"), tokenizer)
    assert "Failed to load" not in "".join(capfd.readouterr())


def test_tables_with_commas_and_with_tabs_are_not_read_as_one(tmp_path, tokenizer):
    for kind in ("csv", "tsv"):
        write(tmp_path, kind)
    with pytest.raises(DataError, match=r"several formats \(\.csv, \.tsv\): keep one"):
        hf_datasets(str(tmp_path / "texts.*sv"), tokenizer)


def write_targets(tmp_path, kind, values):
    """Writes a sample with each of these targets, and returns the path."""
    path = tmp_path / f"targets.{kind}"
    rows = [{"text": f"film {i}", "label": value} for i, value in enumerate(values)]
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        between = "," if kind == "csv" else "\t"
        lines = [between.join(map(str, row.values())) for row in rows]
        path.write_text("\n".join([f"text{between}label", *lines]))
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("nothing", ["", "  "])
@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_sample_without_a_class_is_named(tmp_path, tokenizer, kind, nothing, at):
    path = write_targets(tmp_path, kind, [nothing if i == at else "ab"[i % 2] for i in range(20)])
    with pytest.raises(DataError, match=rf"target=label: sample {at + 1} of .*{kind} has no value"):
        hf_datasets(path, tokenizer)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("csv", value) for value in ("nan", "inf", "1e999", "n/a")),
        *((kind, float(value)) for kind in ("jsonl", "parquet") for value in ("nan", "-inf")),
    ],
)
def test_a_target_that_is_not_a_finite_number_is_named(tmp_path, tokenizer, kind, value):
    path = write_targets(tmp_path, kind, [value if i == 7 else i / 4 for i in range(20)])
    with pytest.raises(DataError, match=r"target=label: sample 8 of .* not a finite number"):
        hf_datasets(path, tokenizer, task="regression")


@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        ("jsonl", float("nan"), r"sample 8 of .* has nan, .* or set drop_missing=True"),
        ("csv", "NaN", "target=label has NaN among numbers: remove such samples"),
    ],
)
def test_a_missing_number_is_no_class(tmp_path, tokenizer, kind, missing, message):
    numbers = [float(i % 2) for i in range(20)] if kind == "jsonl" else [i % 2 for i in range(20)]
    numbers[7] = missing
    path = write_targets(tmp_path, kind, numbers)
    with pytest.raises(DataError, match=message):
        hf_datasets(path, tokenizer)
    if kind == "jsonl":
        data = hf_datasets(path, tokenizer, drop_missing=True)
        assert data.metadata["num_classes"] == 2
        assert sorted(data.train.labels().bincount().tolist()) == [8, 9]
    else:
        data = hf_datasets(path, tokenizer, classes=["0", "1", "NaN"])
        assert data.metadata["classes"] == ["0", "1", "NaN"]


@pytest.mark.parametrize(("targets", "said"), [("score", "1 number"), (["score"] * 2, "2 numbers")])
def test_the_first_line_counts_the_numbers_of_a_regression(tokenizer, table, targets, said):
    line = str(hf_datasets(table, tokenizer, task="regression", target=targets))
    assert f"held out; {said} per sample; texts of" in line


def test_an_image_model_from_a_config_takes_the_size_of_the_data():
    images, other = torch.zeros(2, 1, 32, 32), torch.zeros(2, 1, 64, 64)
    config = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 16}
    of_data = {"num_classes": 3, "image_size": 32, "channels": 1}
    made = transformers_model(config=config, task="image_classification", **of_data)
    assert made(images).logits.shape == (2, 3)
    config |= {"image_size": 64}
    made = transformers_model(config=config, task="image_classification", num_classes=3, channels=1)
    assert made(other).logits.shape == (2, 3)
    with pytest.raises(ConfigError, match="images of the data set, 32 x 32"):
        transformers_model(config=config, task="image_classification", **of_data)


def test_a_target_that_is_left_out_of_a_regression_is_named(tmp_path, tokenizer):
    path = write_targets(tmp_path, "csv", ["" if i == 7 else i / 4 for i in range(20)])
    with pytest.raises(DataError, match=r"target=label: sample 8 of .*csv has no value"):
        hf_datasets(path, tokenizer, task="regression")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_class_that_is_held_out_as_a_whole_is_a_class_of_the_data(tmp_path, tokenizer, kind):
    values = ["rare" if i == 7 else "ab"[i % 2] for i in range(20)]
    path = write_targets(tmp_path, kind, values)
    found = [hf_datasets(path, tokenizer, split_seed=seed, eval_share=0.4) for seed in range(8)]
    assert {tuple(splits.metadata["classes"]) for splits in found} == {("a", "b", "rare")}
    without = {tuple(splits.without_samples) for splits in found}
    assert without == {(), ("rare",)}  # it is drawn for both splits


@pytest.mark.parametrize("where", ["train", "eval", "predict", "target of train", "target of eval"])
def test_the_longest_text_is_that_of_all_that_a_model_reads(tmp_path, tokenizer, where):
    paths = {}
    for name in ("train", "eval", "predict"):
        rows = [{"text": "film", "label": "film"} for _ in range(4)]
        if name in where:
            rows[2]["label" if "target" in where else "text"] = "film " * 38
        paths[name] = str(tmp_path / f"{name}.jsonl")
        Path(paths[name]).write_text("\n".join(map(json.dumps, rows)))
    splits = hf_datasets(
        *(paths["train"], tokenizer, "seq2seq"),
        eval_path=paths["eval"],
        predict_path=paths["predict"],
    )
    assert splits.metadata["longest"] == 40
    fixed = hf_datasets(paths["train"], tokenizer, pad="max_len")
    assert "longest" not in fixed.metadata  # all are as long as max_len


def test_a_sample_without_a_text_is_named_before_training(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "text": None if i == 3 else row["text"]} for i, row in enumerate(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"sample 4 of .*rows.jsonl has no value"):
        hf_datasets(str(path), tokenizer)


def test_a_saved_data_set_is_read_without_writing_next_to_it(tmp_path, tokenizer):
    rows = [{"text": f"film {i}", "label": "ab"[i % 2]} for i in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    before = sorted(tmp_path.rglob("*"))
    data = hf_datasets(str(tmp_path / "saved"), tokenizer)
    assert data.metadata["classes"] == ["a", "b"]
    assert len(data.train) == 18
    assert sorted(tmp_path.rglob("*")) == before


def test_labels_that_only_the_evaluation_has_are_refused(tmp_path, tokenizer, table):
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({**ROWS[0], "label": "odd"}))
    with pytest.raises(DataError, match="target=label: the train split has no class odd"):
        hf_datasets(table, tokenizer, eval_path=str(path))


def test_a_tokenizer_without_a_mask_cannot_mask(tmp_path, table):
    path = write_tokenizer(tmp_path / "other.json", mask=False)
    with pytest.raises(DataError, match=r"task=masked_lm .*mask token.* tokenizer=.*other\.json"):
        hf_datasets(table, str(path), task="masked_lm")


@pytest.mark.parametrize(("library", "extra"), [("datasets", "datasets"), ("transformers", "tr")])
def test_without_the_library_the_error_names_the_extra(
    tokenizer, table, monkeypatch, library, extra
):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf'pip install "hybridtrain\[{extra}'):
        hf_datasets(table, tokenizer)


@pytest.mark.parametrize("named", ["{outside}", "../secret.csv", "part/own.csv"])
def test_a_folder_of_data_reads_nothing_outside_of_itself(named, tmp_path):
    secret, folder = tmp_path / "secret.csv", tmp_path / "data"
    own = folder / "part" / "own.csv"
    own.parent.mkdir(parents=True)
    for file in (secret, own):
        file.write_text("text,label\na,b\n")
    path = named.format(outside=secret)
    files = f"data_files: [{{split: train, path: '{path}'}}]"
    (folder / "README.md").write_text(f"---\nconfigs: [{{config_name: default, {files}}}]\n---\n")
    if path == "part/own.csv":
        assert len(read_table("path", str(folder), None).splits["train"]) == 1
        return
    with pytest.raises(DataError, match=r"README\.md names .*secret\.csv, which is outside"):
        read_table("path", str(folder), None)
    assert len(read_table("path", str(secret), None).splits["train"]) == 1


@pytest.mark.parametrize("has_splits", [True, False])
def test_a_folder_of_save_to_disk_reads_nothing_outside_of_itself(has_splits, tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    saved.save_to_disk(str(tmp_path / "secret"))
    mine = datasets.DatasetDict(train=saved) if has_splits else saved
    mine.save_to_disk(str(tmp_path / "data"))
    assert len(read_table("path", str(tmp_path / "data"), None).splits["train"]) == 1
    file = tmp_path / "data" / ("dataset_dict.json" if has_splits else "state.json")
    content = json.loads(file.read_text())
    if has_splits:
        content["splits"] = ["../secret"]
    else:
        content["_data_files"][0]["filename"] = "../secret/data-00000-of-00001.arrow"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"save_to_disk names .*secret.*, which is outside"):
        read_table("path", str(tmp_path / "data"), None)
