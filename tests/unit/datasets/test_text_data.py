"""Text files and token files as windows for a language model."""

import gzip
import pickle

import numpy as np
import pytest
import torch
from support.loaders import world_of
from support.small_data import write_texts, write_tokenizer

from hybridtrain.data import EvalLoader
from hybridtrain.datasets import text_files, token_files
from hybridtrain.errors import DataError, UserError


def text_of(split):
    """Returns the ids that the windows of a split have, joined, and the last target."""
    x, y = split.__getitems__(range(len(split)))
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    return [*x.flatten().tolist(), int(y[-1, -1])]


def test_the_bytes_of_a_folders_files_are_cut_into_windows_and_the_end_is_held_out(tmp_path):
    root = write_texts(tmp_path)
    files = sorted(root.rglob("*.txt"), key=lambda path: path.as_posix())
    (tmp_path / "notes.md").write_text("left out")
    whole = b"".join(path.read_bytes() for path in files)
    splits = text_files(root, seq_len=16, eval_share=0.25)
    cut = len(whole) - round(len(whole) * 0.25)
    for split, expected in ((splits.train, whole[:cut]), (splits.eval, whole[cut:])):
        found = bytes(text_of(split))
        assert expected.startswith(found)
        assert len(expected) - len(found) < 16
    assert splits.metadata == {"vocab_size": 256, "seq_len": 16}


def test_a_pattern_and_an_evaluation_path_name_files(tmp_path):
    root = write_texts(tmp_path)
    splits = text_files(f"{root}/**/[02].txt", root / "more/1.txt", seq_len=16)
    assert bytes(text_of(splits.train)).startswith((root / "0.txt").read_bytes())
    assert (root / "more/1.txt").read_bytes().startswith(bytes(text_of(splits.eval)))


def test_a_tokenizers_ids_are_packed_with_its_end_of_text_after_each_file(tmp_path):
    root = write_texts(tmp_path / "texts", files=2, words=60)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    splits = text_files(root, root, tokenizer=str(tokenizer), seq_len=8)
    found = text_of(splits.train)
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(tokenizer))
    expected = []
    for path in (root / "0.txt", root / "more/1.txt"):
        expected += [*plain.encode(path.read_text(), add_special_tokens=False).ids, 3]  # [SEP]
    assert found == expected[: len(found)]
    assert splits.metadata["vocab_size"] == plain.get_vocab_size()
    assert expected.count(3) == 2


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_a_compressed_text_is_the_text(tmp_path, with_tokenizer):
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"the film\r\nwas superb \xc3\xa9 " * 40)
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(plain.read_bytes())
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json")) if with_tokenizer else None
    one, other = (
        text_files(tmp_path / name, tokenizer=tokenizer, seq_len=8)
        for name in ("a.txt", "a.txt.gz")
    )
    assert text_of(one.train) == text_of(other.train)
    assert text_of(one.eval) == text_of(other.eval)
    packed = (tmp_path / "a.txt.gz").read_bytes()
    for content in (packed[:-20], b"plain", packed[:30] + b"\xff" * 20 + packed[50:]):
        (tmp_path / "b.txt.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"b\.txt\.gz cannot be read"):
            text_files(tmp_path / "b.txt.gz", tokenizer=tokenizer, seq_len=8)


def test_a_byte_order_mark_is_no_token(tmp_path):
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "a.txt").write_text("the film was superb " * 40, encoding=encoding)
        splits = text_files(tmp_path / "a.txt", tokenizer=tokenizer, seq_len=4)
        found.append(text_of(splits.train))
    assert found[0] == found[1]


def test_the_first_line_of_a_run_counts_tokens_and_files_and_a_changed_file_is_noticed(tmp_path):
    root = write_texts(tmp_path / "texts")
    before = text_files(root, seq_len=16)
    sizes = [path.stat().st_size for path in root.rglob("*.txt")]
    counts = f"held out; {sum(sizes)} tokens from {len(sizes)} files, {root}"
    assert counts in str(before)
    with (root / "0.txt").open("a") as file:
        file.write("x")
    after = text_files(root, seq_len=16)
    assert (len(after.train), len(after.eval)) == (len(before.train), len(before.eval))
    assert after.digest != before.digest
    for count in (101, 102):
        np.arange(count, dtype=np.uint16).tofile(tmp_path / "train.bin")
        splits = token_files(tmp_path, eval=None, seq_len=16)
        assert f"6 windows; {count} tokens from 1 file in {tmp_path}" in str(splits)
        assert splits.digest not in (before.digest, after.digest)


def test_the_length_of_the_texts_can_be_limited(tmp_path):
    splits = text_files(write_texts(tmp_path), seq_len=16, max_tokens=100, eval_tokens=40)
    assert (len(splits.train), len(splits.eval)) == (99 // 16, 39 // 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere"}, "path=nowhere: no such file or folder"),
        ({"pattern": "*.md"}, r"no files \*\.md: set pattern="),
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"eval_share": 0.0}, "eval_share=0.0 must be above 0 and below 1"),
        ({"seq_len": 100_000}, r"tokens to train on, from path=.* too few .* seq_len=100000"),
        ({"eval_share": 0.001, "seq_len": 64}, r"evaluate on, from path=.*eval_share=0.001 "),
        ({"tokenizer": "./none.json"}, "tokenizer=./none.json: no such file"),
    ],
    ids=str,
)
def test_text_that_is_missing_or_too_short_is_refused_by_its_key(tmp_path, settings, message):
    path = settings.pop("path", write_texts(tmp_path))
    with pytest.raises(DataError, match=message):
        text_files(path, **settings)


def test_a_file_that_is_not_utf8_is_named_where_a_tokenizer_needs_text(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "bad.txt").write_bytes("caf\xe9".encode("latin-1") * 100)
    with pytest.raises(DataError, match=r"bad\.txt cannot be read: .*utf-8"):
        text_files(tmp_path, tokenizer=str(tokenizer))
    assert len(text_files(tmp_path, seq_len=8).train)


# Token files


def write_tokens(root, dtype="uint16", head=b"", **counts):
    for name, count in counts.items():
        ids = (np.arange(count) % 300).astype(dtype)
        (root / f"{name}.bin").write_bytes(head + ids.tobytes())


@pytest.mark.parametrize(("dtype", "head"), [("uint16", b""), ("int32", b"x" * 1024)], ids=str)
def test_token_files_are_windows_of_their_ids(tmp_path, dtype, head):
    write_tokens(tmp_path, dtype, head, train=1000, val=500)
    splits = token_files(tmp_path, dtype=dtype, header_bytes=len(head), seq_len=16)
    assert splits.metadata == {"vocab_size": 300, "seq_len": 16}
    assert text_of(splits.train) == [i % 300 for i in range(999 // 16 * 16 + 1)]
    assert text_of(splits.eval) == [i % 300 for i in range(499 // 16 * 16 + 1)]


def test_arrays_of_numpy_and_several_files_are_read_without_windows_across_files(tmp_path):
    for number, count in enumerate((100, 50)):
        np.save(tmp_path / f"part_{number}.npy", np.arange(count, dtype=np.int32) + 100 * number)
    splits = token_files(tmp_path, train="part_*.npy", eval=None, seq_len=16)
    assert splits.eval is None
    starts = [int(x[0]) for x, _ in splits.train]
    assert starts == [0, 16, 32, 48, 64, 80, 100, 116, 132]
    assert all(torch.equal(x + 1, y) for x, y in splits.train)
    assert splits.metadata["vocab_size"] == 150


def test_token_files_stay_on_the_disk_also_on_their_way_to_a_worker_process(tmp_path):
    write_tokens(tmp_path, train=100_000, val=500)
    split = token_files(tmp_path, seq_len=16).train
    packed = pickle.dumps(split)
    assert len(packed) < 2000
    assert isinstance(split.tokens, np.memmap)
    again = pickle.loads(packed)
    assert isinstance(again.tokens, np.memmap)
    assert torch.equal(again[77][0], split[77][0])


def test_every_window_of_the_evaluation_comes_once(tmp_path):
    write_tokens(tmp_path, train=1000, val=500)
    split = token_files(tmp_path, seq_len=16).eval
    starts = [
        int(row[0])
        for replica in range(3)
        for x, _ in EvalLoader(split, 6, world_of(replica, 3))
        for row in x
    ]
    assert starts == [16 * i % 300 for i in range(len(split))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"root": "nowhere"}, r"train=train\.bin: .*nowhere has no such file; it is empty or"),
        ({"train": "trian.bin"}, r"train=trian\.bin: .*it has train\.bin, val\.bin"),
        ({"dtype": "float32"}, "dtype=float32 is unknown"),
        ({"dtype": "int64"}, r"val\.bin .*int64"),
        ({"header_bytes": 5000}, r"bytes after header_bytes=5000 are not"),
        ({"seq_len": 2000}, "train: 1000 tokens in 1 files .* too few for one window"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    ],
    ids=str,
)
def test_token_files_that_are_missing_or_damaged_are_refused(tmp_path, settings, message):
    write_tokens(tmp_path, train=1000, val=502)
    root = settings.pop("root", tmp_path)
    with pytest.raises(UserError, match=message):
        token_files(root, **settings)


def test_arrays_of_other_things_than_ids_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4)))
    with pytest.raises(DataError, match=r"a\.npy .*it has float64 of shape \(4, 4\)"):
        token_files(tmp_path, train="a.npy", eval=None)
    np.save(tmp_path / "b.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"b\.npy is damaged"):
        token_files(tmp_path, train="b.npy", eval=None)


def test_an_id_outside_of_the_vocabulary_is_an_error_with_its_number(tmp_path):
    write_tokens(tmp_path, train=1000, val=500)
    split = token_files(tmp_path, vocab_size=299, seq_len=16).train
    with pytest.raises(DataError, match=r"token ids from \d+ to 299, .*vocab_size=299"):
        split.__getitems__(range(len(split)))
