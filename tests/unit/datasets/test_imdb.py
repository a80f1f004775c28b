"""IMDB: reviews are read, tokenised, kept and fetched; and the errors when that fails."""

import hashlib
import importlib
import io
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from support.small_data import write_imdb
from torch.utils._pytree import tree_leaves

from hybridtrain.datasets import imdb
from hybridtrain.errors import DataError

torchtext = pytest.importorskip("torchtext")

# As an attribute of the package, `imdb` is the function.
imdb_module = importlib.import_module("hybridtrain.datasets.imdb")


def same(one, other):
    return all(map(torch.equal, tree_leaves(one), tree_leaves(other)))


def everything(split):
    return split.__getitems__(range(len(split)))


def words_of(folder, split):
    """Returns label and basic_english tokens of the reviews, read without code of the library."""
    text = torchtext.data.get_tokenizer("basic_english")
    return sorted(
        (label, text(path.read_text(encoding="utf-8")))
        for label, name in enumerate(("neg", "pos"))
        for path in (folder / split / name).iterdir()
    )


def test_samples_are_the_reviews_numbered_by_frequency_cut_and_padded(tmp_path):
    folder = write_imdb(tmp_path, 20)
    splits = imdb(tmp_path, max_len=24, min_freq=1)
    expected = {split: words_of(folder, split) for split in ("train", "test")}
    counts = {}
    for _, words in expected["train"]:
        for word in words[:24]:
            counts[word] = counts.get(word, 0) + 1
    order = sorted(counts, key=lambda word: (-counts[word], word))
    number = {word: i for i, word in enumerate(["<unk>", "<pad>", *order])}
    for name, split in (("train", splits.train), ("test", splits.eval)):
        reviews = sorted((label, words[:24]) for label, words in expected[name])
        assert len(split) == len(reviews)
        for ((tokens, mask), label), (true_label, words) in zip(split, reviews, strict=True):
            ids = [number.get(word, 0) for word in words]
            assert tokens.tolist() == ids + [1] * (24 - len(ids))
            assert mask.tolist() == [False] * len(ids) + [True] * (24 - len(ids))
            assert label.item() == true_label
            assert (tokens.dtype, mask.dtype, label.dtype) == (torch.int64, torch.bool, torch.int64)
    metadata = {"num_classes": 2, "vocab_size": len(number), "max_len": 24, "pad_index": 1}
    metadata |= {"classes": ["neg", "pos"]}
    assert splits.metadata == metadata


def test_the_vocabulary_is_bounded_by_size_and_frequency(tmp_path):
    write_imdb(tmp_path, 20)
    assert imdb(tmp_path, max_vocab=5).metadata["vocab_size"] == 7
    everything_once = imdb(tmp_path, max_vocab=None, min_freq=1).metadata["vocab_size"]
    assert 7 < imdb(tmp_path, max_vocab=None, min_freq=30).metadata["vocab_size"] < everything_once


def test_the_archive_and_the_folder_give_the_same_samples(tmp_path):
    for name in ("packed", "folder"):
        (tmp_path / name).mkdir()
    write_imdb(tmp_path / "packed", 20, archive=True)
    write_imdb(tmp_path / "folder", 20)
    packed, folder = imdb(tmp_path / "packed"), imdb(tmp_path / "folder")
    assert same(everything(packed.train), everything(folder.train))
    assert same(everything(packed.eval), everything(folder.eval))
    assert {path.suffix for path in (tmp_path / "packed").iterdir()} == {"", ".gz", ".pt"}
    assert sum(1 for _ in (tmp_path / "packed/aclImdb").rglob("*.txt")) == 40  # none of unsup


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    write_imdb(tmp_path, 20)
    first = imdb(tmp_path)
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    forwards = torchtext.datasets.imdb.glob.iglob
    monkeypatch.setattr(
        torchtext.datasets.imdb.glob,
        "iglob",
        lambda pattern: sorted(forwards(pattern), reverse=True),
    )
    assert same(everything(imdb(tmp_path).train), everything(first.train))


def test_reviews_are_tokenised_once_and_again_after_a_change(tmp_path, monkeypatch):
    folder = write_imdb(tmp_path, 20)
    first = imdb(tmp_path)
    calls = []
    encode = imdb_module.encode_reviews
    monkeypatch.setattr(imdb_module, "encode_reviews", lambda *a: calls.append(1) or encode(*a))
    assert same(everything(imdb(tmp_path).train), everything(first.train))
    assert imdb(tmp_path).metadata == first.metadata
    assert calls == []
    imdb(tmp_path, max_len=8)
    assert len(calls) == 1
    imdb(tmp_path, min_freq=3)
    assert len(calls) == 2
    (folder / "train/pos/extra_9.txt").write_text("One more.")
    assert len(imdb(tmp_path).train) == 21
    assert len(calls) == 3


def test_a_damaged_cache_is_made_again(tmp_path):
    write_imdb(tmp_path, 20)
    first = everything(imdb(tmp_path).train)
    (cache,) = tmp_path.glob("*.pt")
    whole = cache.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"not a checkpoint"):
        cache.write_bytes(damaged)
        assert same(everything(imdb(tmp_path).train), first)
        assert len(cache.read_bytes()) == len(whole)


@pytest.mark.parametrize("archive", [False, True])
def test_a_read_only_folder_works_and_stays_unchanged(tmp_path, monkeypatch, archive):
    write_imdb(tmp_path, 20, archive=archive)
    before = sorted(tmp_path.rglob("*"))

    def refuse(path):
        raise PermissionError(f"read-only: {path}")

    # Permissions do not stop a superuser, and the tests may well be run by one.
    monkeypatch.setattr(imdb_module.os, "access", lambda folder, mode: False)
    monkeypatch.setattr(imdb_module, "atomic_file", refuse)
    assert len(imdb(tmp_path).train) == 20
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupted_unpacking_leaves_no_partial_folder(tmp_path, monkeypatch):
    write_imdb(tmp_path, 20, archive=True)
    write = Path.write_bytes

    def interrupted(path, content):
        if len(list(path.parent.iterdir())) == 7:
            raise KeyboardInterrupt
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        imdb(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["aclImdb_v1.tar.gz"]


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    packed = write_imdb(root, 20, archive=True)
    with tarfile.open(packed) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar if m.isfile()]
    with tarfile.open(packed, "w:gz") as tar:
        for name in (
            "../outside.txt",
            "/outside.txt",
            "aclImdb/train/pos/../../../../outside.txt",
            "aclImdb/train/pos/20_9.txt~",
        ):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"gone"))
        link = tarfile.TarInfo("aclImdb/train/pos/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    assert len(imdb(root).train) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]
    assert not any(path.is_symlink() for path in root.rglob("*"))


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_damaged_archive_is_an_error_and_leaves_nothing(tmp_path, part):
    packed = write_imdb(tmp_path, 20, archive=True)
    content = packed.read_bytes()
    packed.write_bytes(content[: int(len(content) * part)] or b"<html>")
    with pytest.raises(DataError, match=r"aclImdb_v1\.tar\.gz is damaged"):
        imdb(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [packed.name]


def test_another_archive_of_that_name_is_an_error_that_says_what_is_missing(tmp_path):
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("README"))
    with pytest.raises(DataError, match="has no aclImdb/train/pos"):
        imdb(tmp_path)


def test_missing_reviews_are_an_error_with_the_command_that_fetches_them(tmp_path):
    with pytest.raises(DataError) as caught:
        imdb(tmp_path / "nowhere")
    message = str(caught.value)
    assert f"looked in {tmp_path / 'nowhere'} for the folder aclImdb" in message
    command = f"hybridtrain recipe=imdb_transformer data.download=true data.root={tmp_path}/nowhere"
    assert f": {command}\n" in message
    assert "ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz" in message


def test_a_folder_without_reviews_is_named(tmp_path):
    folder = write_imdb(tmp_path, 20)
    for path in (folder / "test/neg").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"aclImdb/test/neg .*is empty"):
        imdb(tmp_path)
    (folder / "test/neg").rmdir()
    with pytest.raises(DataError, match=r"aclImdb/test/neg .*does not exist"):
        imdb(tmp_path)


def test_a_review_that_is_not_utf8_is_named(tmp_path):
    bad = write_imdb(tmp_path, 20) / "test/pos/3_9.txt"
    bad.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"test/pos/3_9\.txt is not UTF-8"):
        imdb(tmp_path)


def test_an_empty_review_still_has_a_token(tmp_path):
    folder = write_imdb(tmp_path, 20)
    for path in (folder / "train/neg").iterdir():
        path.write_text("  \n")
    (_, mask), labels = everything(imdb(tmp_path, max_len=8).train)
    assert mask[labels == 0].sum(1).tolist() == [7] * 10


def test_the_word_pad_in_a_review_is_not_masked(tmp_path):
    folder = write_imdb(tmp_path, 20)
    for path in (folder / "test/neg").iterdir():
        path.write_text("one <pad> two")
    (_, mask), labels = everything(imdb(tmp_path, max_len=8).eval)
    assert mask[labels == 0].sum(1).tolist() == [5] * 10


def test_a_download_is_checked_and_kept(tmp_path, monkeypatch):
    for name in ("server", "root"):
        (tmp_path / name).mkdir()
    served = write_imdb(tmp_path / "server", 20, archive=True)
    monkeypatch.setattr(imdb_module, "_URL", served.as_uri())
    root = tmp_path / "new" / "root"
    with pytest.raises(DataError, match="did not send the archive"):
        imdb(root, download=True)
    assert list(root.iterdir()) == []

    digest = hashlib.md5(served.read_bytes()).hexdigest()
    monkeypatch.setattr(imdb_module, "_MD5", digest)
    assert len(imdb(root, download=True).train) == 20
    served.unlink()
    assert len(imdb(root, download=True).train) == 20  # nothing is fetched twice


def test_a_failed_download_says_how_to_fetch_the_archive_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(imdb_module, "_URL", "http://127.0.0.1:9/aclImdb_v1.tar.gz")
    with pytest.raises(
        DataError, match=r"(?s)IMDB: .*http://127\.0\.0\.1:9/.*recipe=imdb_transformer"
    ):
        imdb(tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []


def split_on_letters(text):
    return list(text.replace(" ", ""))


def not_a_tokenizer(text):
    return text.upper()


@pytest.mark.parametrize("path", ["{}:split_on_letters", "{}.split_on_letters"])
def test_any_function_can_be_the_tokenizer(tmp_path, path):
    write_imdb(tmp_path, 20)
    splits = imdb(tmp_path, tokenizer=path.format(__name__), max_len=32)
    assert splits.metadata["vocab_size"] < 40  # letters, not words
    assert not everything(splits.train)[0][1].any()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("basic_german", "basic_english, spacy"),
        ("moses", "sacremoses|SacreMoses|basic_english"),
        ("no.such.module:f", "cannot be imported"),
        ("os:nothing", "cannot be imported"),
        ("os:sep", "must be a function"),
        (f"{__name__}:not_a_tokenizer", "list of strings"),
    ],
)
def test_an_unusable_tokenizer_is_refused_by_name(tmp_path, tokenizer, message):
    write_imdb(tmp_path, 20)
    with pytest.raises(DataError, match=rf"^tokenizer={tokenizer}.*({message})"):
        imdb(tmp_path, tokenizer=tokenizer)


def test_without_torchtext_the_error_names_the_extra_to_install(tmp_path, monkeypatch):
    write_imdb(tmp_path, 20)
    monkeypatch.setitem(sys.modules, "torchtext", None)
    with pytest.raises(DataError, match=r'pip install "hybridtrain\[text\]"'):
        imdb(tmp_path)


def test_sizes_below_one_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"^max_len=0 must be at least 1"):
        imdb(tmp_path, max_len=0)
