"""Images in folders, and CIFAR-10: what samples are, what is drawn, and the errors."""

import itertools
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from support.loaders import world_of
from support.small_data import write_cifar10, write_images
from torch.utils._pytree import tree_leaves
from torchvision.transforms import v2

from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.datasets import cifar10, image_folder
from hybridtrain.datasets.images import IMAGENET_MEAN, IMAGENET_STD
from hybridtrain.errors import DataError
from hybridtrain.options import LoaderOptions

COUNTS = {"train": 8, "val": 3}


def batches(split, replica=0, replicas=1, skip=0, count=6, **options):
    loader = TrainLoader(
        split, 6, world_of(replica, replicas), seed=1, options=LoaderOptions(**options)
    )
    loader.seek(0, 6 * skip)
    stream = loader.stream()
    try:
        return [(batch.inputs, batch.targets) for batch in itertools.islice(stream, count)]
    finally:
        stream.close()


def same(one, other):
    leaves, others = tree_leaves(one), tree_leaves(other)
    return len(leaves) == len(others) and all(map(torch.equal, leaves, others))


def assert_drawn_exactly(split):
    """Asserts that a resume inside an epoch, by other processes, has the same batches."""
    whole = batches(split)
    assert same(batches(split, skip=2, count=4, workers=2), whole[2:])
    parts = [batches(split, replica=i, replicas=2, skip=2, count=4, workers=i) for i in (0, 1)]
    joined = [
        [torch.cat(pair) for pair in zip(*two, strict=True)] for two in zip(*parts, strict=True)
    ]
    assert same(joined, whole[2:])


# Folders


def test_an_evaluation_image_is_the_normalised_middle_of_its_file(tmp_path):
    write_images(tmp_path, COUNTS)
    splits = image_folder(tmp_path, image_size=28)
    assert splits.metadata == {
        **{"num_classes": 3, "image_size": 28, "channels": 3, "image_resize": 32},
        **{"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD},
        "classes": ["blue", "green", "red"],
    }
    assert (len(splits.train), len(splits.eval)) == (24, 9)
    image, label = splits.eval[4]  # the second of the greens
    assert (image.dtype, image.shape, label.dtype, int(label)) == (
        *(torch.float32, (3, 28, 28), torch.int64),
        1,
    )
    resized = v2.functional.resize(Image.open(tmp_path / "val/green/1.png"), [32])
    pixels = np.asarray(v2.functional.center_crop(resized, [28])) / 255
    expected = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.allclose(image.permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_augmented_training_images_differ_by_epoch_and_plain_ones_do_not(tmp_path):
    write_images(tmp_path, COUNTS)
    for augment in (True, False):
        split = image_folder(tmp_path, image_size=16, augment=augment).train
        world = world_of(0, 1)
        loader = TrainLoader(split, 24, world, shuffle=False)
        stream = loader.stream()
        first, second = next(stream).inputs, next(stream).inputs
        stream.close()
        assert torch.equal(first, second) is not augment


def test_random_images_are_exact_after_a_resume_with_other_processes(tmp_path):
    write_images(tmp_path, COUNTS)
    assert_drawn_exactly(image_folder(tmp_path, image_size=16).train)


def test_a_folder_of_classes_is_divided_by_the_seed(tmp_path):
    write_images(tmp_path, per_class=10)
    splits = image_folder(tmp_path, image_size=16, eval_share=0.2)
    train, held_out = ({path for path, _ in half.files} for half in (splits.train, splits.eval))
    assert (len(train), len(held_out)) == (24, 6)
    assert not train & held_out
    assert splits.metadata["num_classes"] == 3
    again = image_folder(tmp_path, image_size=16, eval_share=0.2)
    other = image_folder(tmp_path, image_size=16, eval_share=0.2, split_seed=1)
    assert again.eval.files == splits.eval.files != other.eval.files


def test_every_evaluation_image_comes_once(tmp_path):
    write_images(tmp_path, COUNTS)
    split = image_folder(tmp_path, image_size=8).eval
    labels = [
        label
        for replica in range(2)
        for _, targets in EvalLoader(split, 4, world_of(replica, 2))
        for label in targets.tolist()
    ]
    assert labels == [0] * 3 + [1] * 3 + [2] * 3


def test_a_folder_without_an_evaluation_split_has_none(tmp_path):
    write_images(tmp_path, {"train": 2})
    assert image_folder(tmp_path).eval is None


@pytest.mark.parametrize(
    ("counts", "settings", "message"),
    [
        ({}, {}, "root=.* must contain a folder of images for each class"),
        ({"val": 2}, {}, "root=.*val/.* train/"),
        ({"train": 2}, {"image_size": 0}, "image_size=0 must be at least 1"),
        ({".": 2}, {"eval_share": 1.0}, r"eval_share=1\.0 must be above 0 and below 1"),
    ],
    ids=str,
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, counts, settings, message):
    if counts:
        write_images(tmp_path, counts)
    with pytest.raises(DataError, match=message):
        image_folder(tmp_path, **settings)


def test_splits_of_other_classes_are_refused_by_the_names_of_these(tmp_path):
    write_images(tmp_path, COUNTS)
    (tmp_path / "val/red").rename(tmp_path / "val/rot")
    with pytest.raises(DataError, match=r"train/ and val/ .*red, rot"):
        image_folder(tmp_path)


def test_a_changed_image_changes_the_digest_and_a_copy_of_the_folder_does_not(tmp_path):
    root = write_images(tmp_path / "one", COUNTS)
    before = image_folder(root).digest
    copy = shutil.copytree(root, tmp_path / "two", copy_function=shutil.copyfile)  # new times
    assert image_folder(copy).digest == before
    image = next(copy.rglob("*.png"))
    content = image.read_bytes()
    image.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert image_folder(copy).digest != before


def test_a_damaged_image_is_named_when_it_is_read(tmp_path):
    write_images(tmp_path, COUNTS)
    path = tmp_path / "train/green/3.png"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"green/3\.png cannot be read as an image"):
        batches(image_folder(tmp_path, image_size=8).train)


# CIFAR-10


def test_cifar10_is_its_archives_images_normalised(tmp_path, monkeypatch):
    write_cifar10(tmp_path, monkeypatch, archive=True)
    splits = cifar10(tmp_path, augment=False)
    assert {"num_classes": 10, "image_size": 32, "channels": 3}.items() <= splits.metadata.items()
    content = pickle.loads((tmp_path / "cifar-10-batches-py/data_batch_2").read_bytes())
    image, label = splits.train[23]  # the fourth of the second file
    expected = torch.from_numpy(content["data"][3].reshape(3, 32, 32)) / 255
    mean, std = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])[..., None, None]
    assert torch.allclose(image, (expected - mean) / std, atol=1e-5)
    assert int(label) == content["labels"][3]
    assert (len(splits.train), len(splits.eval)) == (100, 20)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"cifar-10-python.tar.gz", "cifar-10-batches-py"}


def test_the_crops_and_mirrors_of_cifar10_are_exact_after_a_resume_with_other_processes(
    tmp_path, monkeypatch
):
    write_cifar10(tmp_path, monkeypatch)
    splits = cifar10(tmp_path)
    assert_drawn_exactly(splits.train)
    drawn = torch.cat([x for x, _ in batches(splits.train, count=17)])
    plain = torch.cat([x for x, _ in batches(cifar10(tmp_path, augment=False).train, count=17)])
    assert drawn.shape == plain.shape
    assert not torch.equal(drawn, plain)


def test_missing_files_of_cifar10_are_an_error_with_the_command_that_fetches_them(tmp_path):
    command = f"hybridtrain recipe=cifar10_resnet18 data.download=true data.root={tmp_path}"
    with pytest.raises(DataError, match=f"(?s)found neither.*: {command}"):
        cifar10(tmp_path)


def test_another_archive_of_that_name_is_refused_and_stays_packed(tmp_path, monkeypatch):
    packed = write_cifar10(tmp_path, monkeypatch, archive=True)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz is damaged"):
        cifar10(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [packed.name]


def test_a_damaged_file_of_cifar10_is_not_unpickled(tmp_path, monkeypatch):
    folder = write_cifar10(tmp_path, monkeypatch)
    (folder / "test_batch").write_bytes(pickle.dumps({}))
    with pytest.raises(DataError, match=r"missing or damaged"):
        cifar10(tmp_path)
