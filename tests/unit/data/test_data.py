"""The data sets: their items, the same on every machine, and the errors of missing data."""

import hashlib
import importlib
import inspect
import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import get_method as locate
from omegaconf import OmegaConf
from support.small_data import write_cifar10, write_imdb, write_mnist, write_texts
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset, default_collate

from hybridtrain.data import InMemoryDataset, already_batched
from hybridtrain.datasets import (
    cifar10,
    digits,
    imdb,
    mnist,
    python_source,
    text_files,
    token_files,
)
from hybridtrain.errors import DataError

CONFIGS = Path(__file__).parents[3] / "configs"


def same(one, other):
    leaves, others = tree_leaves(one), tree_leaves(other)
    return len(leaves) == len(others) and all(map(torch.equal, leaves, others))


def everything(split):
    return split.__getitems__(range(len(split)))


IN_MEMORY = ["digits", "mnist", "imdb", "python_source", "cifar10", "text_files", "token_files"]


def splits_of(name, tmp_path):
    """Returns a data set with a little data; the text ones with shorter samples than by default."""
    if name == "cifar10":
        with pytest.MonkeyPatch.context() as patch:
            write_cifar10(tmp_path, patch)
            return cifar10(tmp_path, augment=False)
    if name == "text_files":
        return text_files(write_texts(tmp_path), seq_len=32)
    if name == "token_files":
        for split, count in (("train", 3000), ("val", 1000)):
            np.arange(count, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
        return token_files(tmp_path, seq_len=32)
    if name == "mnist":
        write_mnist(tmp_path, 60, 20)
        return mnist(tmp_path)
    if name == "imdb":
        pytest.importorskip("torchtext")
        write_imdb(tmp_path, 20)
        return imdb(tmp_path, max_len=16)
    if name == "python_source":
        return python_source(seq_len=32, max_bytes=3000, eval_bytes=1000)
    return digits()


# Samples and batches


@pytest.mark.parametrize("name", IN_MEMORY)
@pytest.mark.quick_cases(1)
def test_a_batch_is_its_items_stacked_also_through_a_subset_and_workers(name, tmp_path):
    splits = splits_of(name, tmp_path)
    indices = [7, 0, 3, 3, 11]
    expected = default_collate([splits.train[i] for i in indices])
    assert same(splits.train.__getitems__(indices), expected)
    for workers in (0, 2):
        subset = Subset(splits.train, indices)
        (batch,) = DataLoader(subset, 5, collate_fn=splits.collate, num_workers=workers)
        assert same(batch, expected)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_data_set_can_be_sent_to_a_worker_process(name, tmp_path):
    splits = splits_of(name, tmp_path)
    again = pickle.loads(pickle.dumps(splits))
    assert len(again.eval) == len(splits.eval)
    assert same(again.train[5], splits.train[5])
    assert again.metadata == splits.metadata


@pytest.mark.parametrize("name", IN_MEMORY)
def test_iteration_ends_after_the_last_sample(name, tmp_path):
    split = splits_of(name, tmp_path).eval
    assert sum(1 for _ in split) == len(split)
    assert same(split[-1], split[len(split) - 1])
    with pytest.raises(IndexError):
        split[-len(split) - 1]


def test_samples_of_a_pytree_are_prepared_batch_by_batch():
    dataset = InMemoryDataset(
        {"a": torch.arange(6)}, torch.arange(6) * 10, prepare=lambda x, y: ((x["a"], 1), y)
    )
    inputs, targets = dataset.__getitems__([4, 2])
    assert same(inputs[0], torch.tensor([4, 2]))
    assert same(targets, torch.tensor([40, 20]))


def test_inputs_and_targets_of_different_lengths_are_refused():
    with pytest.raises(DataError, match=r"samples, found \[3, 4\]"):
        InMemoryDataset(torch.zeros(3), torch.zeros(4))


def test_a_wrapper_that_knows_only_single_items_still_gives_batches():
    dataset = InMemoryDataset(torch.arange(4), torch.arange(4))

    class Wrapper(torch.utils.data.Dataset):
        def __len__(self):
            return len(dataset)

        def __getitem__(self, index):
            return dataset[index]

    (batch,) = DataLoader(Wrapper(), 4, collate_fn=already_batched)
    assert same(batch, [torch.arange(4), torch.arange(4)])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("data/*.yaml")), ids=lambda path: path.stem)
def test_a_data_sets_config_has_the_parameters_of_its_function_and_the_batch_size(path):
    config = OmegaConf.load(path)
    function = locate(config.pop("_target_"))
    assert list(config) == [*inspect.signature(function).parameters, "batch_size"]


# Digits


def test_digits_are_the_1797_normalised_images_of_the_uci_set():
    splits = digits()
    images, labels = default_collate([*splits.train, *splits.eval])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3
    assert images.unique().numel() == 17  # 0..16 dots set in a block of 4x4
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert splits.metadata == {"num_classes": 10, "image_size": 8, "channels": 1}


def test_the_held_out_fifth_of_digits_is_disjoint_and_independent_of_seeds():
    torch.manual_seed(1)
    first = digits()
    torch.manual_seed(2)
    second = digits()
    assert same(everything(first.train), everything(second.train))
    assert same(everything(first.eval), everything(second.eval))
    # The 1,797 images all differ, so an image identifies its digit.
    train = {image.numpy().tobytes() for image, _ in first.train}
    held_out = {image.numpy().tobytes() for image, _ in first.eval}
    assert len(train) == 1442
    assert len(held_out) == 355
    assert not train & held_out


def test_the_held_out_fifth_of_digits_has_every_class_in_proportion():
    splits = digits()
    held_out = torch.bincount(everything(splits.eval)[1])
    total = held_out + torch.bincount(everything(splits.train)[1])
    assert torch.equal(held_out, total // 5)


def test_the_digits_file_is_the_one_that_its_attribution_describes():
    folder = Path(importlib.import_module("hybridtrain.datasets").__file__).parent
    digest = hashlib.sha256((folder / "digits.csv.gz").read_bytes()).hexdigest()
    assert digest in (folder / "digits.md").read_text()


# MNIST


def test_mnist_is_what_torchvision_reads_with_the_tutorials_transform(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    write_mnist(tmp_path, 60, 20)
    steps = torchvision.transforms
    transform = steps.Compose([steps.ToTensor(), steps.Normalize((0.1307,), (0.3081,))])
    splits = mnist(str(tmp_path))
    for train, split in ((True, splits.train), (False, splits.eval)):
        reference = torchvision.datasets.MNIST(tmp_path, train=train, transform=transform)
        assert len(split) == len(reference)
        for (image, label), (expected, expected_label) in zip(split, reference, strict=True):
            torch.testing.assert_close(image, expected)
            assert label.item() == expected_label
    assert splits.metadata == {"num_classes": 10, "image_size": 28, "channels": 1}


@pytest.mark.parametrize("name", ["mnist", "python_source"])
def test_pixels_and_text_stay_bytes_in_memory(name, tmp_path):
    train = splits_of(name, tmp_path).train
    assert str(train.inputs.dtype if name == "mnist" else train.tokens.dtype).endswith("uint8")


def test_missing_mnist_files_are_named_with_the_command_that_fetches_them(tmp_path):
    raw = write_mnist(tmp_path, 10, 10)
    (raw / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        mnist(tmp_path)
    message = str(caught.value)
    assert str(raw) in message
    assert "did not find t10k-labels-idx1-ubyte.\n" in message
    assert f"hybridtrain recipe=mnist_basicnet data.download=true data.root={tmp_path}\n" in message
    assert "root=" in message


def test_packed_mnist_files_are_an_error_that_says_to_unpack_them(tmp_path):
    raw = write_mnist(tmp_path, 10, 10)
    for path in list(raw.iterdir()):
        path.rename(f"{path}.gz")
    with pytest.raises(DataError, match="gunzip"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", None),  # cut short
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", b"<html>not found</html>"),
        ("t10k-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 1, 7])),  # one label for ten images
        ("t10k-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 10, *[77] * 10])),
    ],
)
def test_damaged_mnist_files_are_an_error_that_says_so(tmp_path, name, content):
    path = write_mnist(tmp_path, 10, 10) / name
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(DataError, match=r"damaged.*\n?.*data.download=true"):
        mnist(tmp_path)


def test_a_failed_download_of_mnist_says_how_to_fetch_it_by_hand(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(DataError, match=r"(?s)MNIST .*127\.0\.0\.1.*https://ossci-datasets"):
        mnist(tmp_path, download=True)


# Python source


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 60 files, the i-th of them 50 times the i-th letter."""
    files = {f"m{i:02}.py": bytes([64 + i]) * 50 for i in range(60)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("site-packages/a.py", "test/a.py", "json/__pycache__/a.py", "lib.so", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x00" * 500)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return files


def test_windows_tile_the_text_and_targets_are_shifted_by_one_byte(library):
    splits = python_source(seq_len=7, max_bytes=None, eval_bytes=None)
    text = b"".join(content for i, content in enumerate(library.values()) if i % 20 != 19)
    assert len(splits.train) == (len(text) - 1) // 7
    x, y = everything(splits.train)
    assert bytes(x.flatten().tolist()) == text[: x.numel()]
    assert bytes(y.flatten().tolist()) == text[1 : y.numel() + 1]
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert splits.metadata == {"vocab_size": 256, "seq_len": 7}


def test_held_out_files_are_never_trained_on(library):
    splits = python_source(seq_len=7, max_bytes=None, eval_bytes=None)
    held_out = {64 + i for i in (19, 39, 59)}
    assert set(everything(splits.eval)[0].flatten().tolist()) == held_out
    assert not set(everything(splits.train)[0].flatten().tolist()) & held_out


def test_the_text_is_as_long_as_asked_at_most(library):
    splits = python_source(seq_len=10, max_bytes=111, eval_bytes=60)
    assert len(splits.train) == 11  # of 111 bytes; the last one is a target only
    assert len(splits.eval) == 5


def test_the_running_interpreter_has_enough_text():
    splits = python_source(max_bytes=1_000_000)
    assert len(splits.train) == 999_999 // 256
    assert len(splits.eval) > 100
    assert b"import " in bytes(splits.train.tokens)


def test_a_library_without_sources_is_an_error_that_says_so(tmp_path, monkeypatch):
    zipped = str(tmp_path / "python311.zip")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": zipped})
    with pytest.raises(DataError, match=r"0 bytes to train on, from 0 \.py files in .*\.zip"):
        python_source()


def test_too_few_bytes_for_a_window_are_an_error_that_names_the_arguments(library):
    with pytest.raises(DataError, match=r"to evaluate on.*seq_len=100.*eval_bytes="):
        python_source(seq_len=100, eval_bytes=100)
    with pytest.raises(DataError, match=r"^seq_len=0 must be at least 1"):
        python_source(seq_len=0)
