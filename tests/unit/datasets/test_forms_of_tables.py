"""Tables of text as other programs write them, and what is said about those that cannot be read."""

import gzip
import re
import subprocess

import pytest
from support.cases import installed
from support.small_data import write_tokenizer

from hybridtrain.datasets import hf_datasets
from hybridtrain.errors import DataError

installed("transformers")
installed("datasets")
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.fixture
def read(tmp_path):
    """Writes a table and reads it."""
    write_tokenizer(tmp_path / "tokenizer.json")

    def reading(text, name="a.csv", **settings):
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(content)
        return hf_datasets(str(tmp_path / name), str(tmp_path / "tokenizer.json"), **settings)

    return reading


def test_a_separator_that_is_not_guessed_is_asked_for(read):
    table = "text^label\n" + "the plot^x\n" * 4
    with pytest.raises(DataError, match="if that is several columns, separator= divides them"):
        read(table)
    assert read(table, separator="^").metadata["classes"] == ["x"]


def test_a_single_column_with_a_similar_name_is_not_several_columns(read):
    with pytest.raises(DataError, match=r"did you mean 'texts'\?"):
        read('{"texts": "a"}\n' * 4, "a.jsonl", task="causal_lm")


@pytest.mark.parametrize("header", ["text, label", "text,Label", "text,labels"])
def test_a_missing_column_is_told_from_one_with_a_similar_name(header, read):
    with pytest.raises(DataError, match=rf"did you mean '{header.partition(',')[2]}'\?"):
        read(f"{header}\n" + "a,x\n" * 4)


def test_classes_that_differ_only_in_case_or_spaces_are_named(read):
    data = read("text,label\n" + "a,x\nb,X \nc,y\n" * 8)
    assert "classes that differ only in case or spaces: 'X ' and 'x'" in str(data)
    assert "differ only" not in str(read("text,label\n" + "a,x\nb,y\n" * 8))


def test_a_number_that_is_the_name_of_a_class_stays_it_in_samples_without_other_names(read):
    table = "text,label\n" + "a,1\nb,2\n" * 4
    data = read(table, classes=["1", "2", "other"])
    assert data.metadata["classes"] == ["1", "2", "other"]
    assert {int(data.train[n][1]) for n in range(len(data.train))} == {0, 1}
    data = read(table.replace("2", "0"), classes=["no", "yes"])  # names of numbers
    assert {int(data.train[n][1]) for n in range(len(data.train))} == {0, 1}


@pytest.mark.parametrize(
    ("encoding", "name"), [("cp1252", "a.csv"), ("utf-16", "a b.csv"), ("utf-16", "a.csv.gz")]
)
def test_a_file_in_another_encoding_is_converted_by_the_command_of_the_error(
    encoding, name, read, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    table = "text,label\n" + "\u00e4 plot,x\nthe plot,y\n" * 4
    content = table.encode(encoding)
    with pytest.raises(DataError, match="it is not UTF-8") as raised:
        read(gzip.compress(content) if name.endswith(".gz") else content, name)
    subprocess.run(re.search(r"`(.*iconv .*)`", str(raised.value))[1], shell=True, check=True)
    converted = (tmp_path / "new.csv").read_bytes()
    assert converted.decode("utf-8-sig") == table
    assert read(converted, "new.csv").metadata["classes"] == ["x", "y"]


@pytest.mark.parametrize(
    "content",
    [
        '{"data": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]}',
        '{"text": {"0": "a", "1": "b"}, "label": {"0": "x", "1": "y"}}',  # pandas' default
    ],
)
def test_a_file_that_is_one_object_says_what_a_sample_is(content, read):
    with pytest.raises(DataError, match=r"a\.json is one object with all samples, but must have"):
        read(content, "a.json")
