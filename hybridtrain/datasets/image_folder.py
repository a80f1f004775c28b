"""A folder of images, with one subfolder per class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.data import (
    DataSplits,
    HeldOutError,
    digest_of_files,
    for_trained_models,
    metadata_of_training,
)
from hybridtrain.datasets.held_out import held_out, note_without_held_out, strata_of
from hybridtrain.datasets.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SUFFIXES,
    counted_by_type,
    image_files,
    normalised,
    note_other_files,
    read_image,
)
from hybridtrain.datasets.mixup import MixedUp
from hybridtrain.datasets.split_names import check_classes, class_numbers, listed, split_of
from hybridtrain.datasets.standard_input import STANDARD_INPUT, read_lines
from hybridtrain.errors import DataError, argument, setting
from hybridtrain.models.image_processors import (
    Processed,
    normalisation,
    processor_of,
    sized,
)

# The size to resize to before the center crop in evaluation: 256 for a crop of 224.
_RESIZED = 256 / 224

# Pixels per side, unless the model's image processor says otherwise.
_DEFAULT_SIZE = 224


class Images(Dataset[Any]):
    """Image files and their classes: `(image, label)`, transformed by `transform`.

    Args:
        files: the path and class of each image.
        transform: takes an RGB PIL image.
    """

    def __init__(
        self, files: Sequence[tuple[str, int]], transform: Callable[[Any], Tensor]
    ) -> None:
        self.files = files
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, label = self.files[index]
        return self.transform(read_image(path)), torch.tensor(label)

    def labels(self) -> Tensor:
        """Returns the classes of all images."""
        return torch.tensor([label for _, label in self.files])

    def describe(self, index: int) -> dict[str, str]:
        """Returns the path of an image; `predict` writes it next to the result."""
        return {"file": self.files[index][0]}


class UnlabelledImages(Dataset[Any]):
    """Image files without classes, transformed by `transform`.

    Args:
        files: the paths of the images.
        transform: takes an RGB PIL image.
    """

    def __init__(self, files: Sequence[str], transform: Callable[[Any], Tensor]) -> None:
        self.files = files
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(read_image(self.files[index]))

    def describe(self, index: int) -> dict[str, str]:
        """Returns the path of an image; `predict` writes it next to the result."""
        return {"file": self.files[index]}


def only_to_predict(
    metadata: Mapping[str, Any],
    image_size: int | None = None,
    classes: list[str] | None = None,
    predict_path: str | None = None,
    model_source: str | None = None,
    **of_training: Any,
) -> DataSplits:
    """Returns only the images of `predict_path`; see `for_trained_models`."""
    to_predict = None
    notes: list[str] = []
    facts: dict[str, Any] = {}
    if "image_mean" not in metadata or image_size not in (None, metadata["image_size"]):
        facts = image_metadata(image_size, model_source)
    if classes is not None:
        facts |= {"classes": classes}
    metadata = {**metadata, **facts}
    if predict_path is not None:
        files, notes = _files_to_predict(predict_path)
        to_predict = UnlabelledImages(files, image_transform(metadata))
    return DataSplits(train=(), eval=None, predict=to_predict, metadata=metadata, notes=notes)


@for_trained_models(only_to_predict, skips_training=True)
def image_folder(
    root: str | Path = "data",
    image_size: int | None = None,
    augment: bool = True,
    rand_augment: int | None = None,
    mixup: float = 0.0,
    eval_share: float = 0.1,
    split_seed: int = 0,
    stratify: bool | str = False,
    classes: list[str] | None = None,
    predict_path: str | None = None,
    model_source: str | None = None,
) -> DataSplits:
    """Returns the images of a folder with one subfolder per class, in ImageNet's layout.

    Classes are numbered in the order of their names. If `root` contains a folder `train`, the
    evaluation split is the folder `val` or `test` next to it (or another usual name, such as
    `Valid`, `dev` or `testing`, in any case) with the same classes; without such a folder there is
    no evaluation split. If there is no folder `train`, `root` contains the class folders, and a
    share of the images is held out.

    Items are `(image, label)`: float32 of shape (3, image_size, image_size), normalized with the
    mean and standard deviation of ImageNet, and int64. Training images are random crops
    (`RandomResizedCrop`), randomly flipped; for evaluation, the smaller side is resized to 256/224
    of `image_size` and the center is cropped, as in torchvision's reference training.
    `hybridtrain.datasets.images` describes how files are read: orientation, 16 bits, transparency.

    If the model has an image processor, it prepares the images for evaluation, and training images
    are normalized with its mean and standard deviation.

    Metadata: `num_classes`, `classes` (their names), `image_size`, `channels` 3, and the
    preprocessing for evaluation: `image_resize`, `image_mean`, `image_std`, or the settings of the
    model's `image_processor`.

    Args:
        root: the folder.
        image_size: pixels per side; None: that of the model's image processor, or 224.
        augment: random crops and flips in training; False: as in evaluation.
        rand_augment: the magnitude of `torchvision.transforms.v2.RandAugment`, 0 to 30, with two
            operations per image; None: off.
        mixup: alpha of mixup, which mixes each training image with another one, see
            `hybridtrain.datasets.mixup`; 0: off. Doubles the loading time per image.
        eval_share: the share of the images to hold out if there is no folder `train`.
        split_seed: the seed for choosing held-out images.
        stratify: whether to hold out the share of each class; `auto`: if each class has
            enough samples.
        classes: the class names in index order; None: the folder names, sorted.
        predict_path: images without classes, for the command `predict`: a folder, at any depth; a
            file; or `-` for paths on standard input, one per line. They are transformed as in
            evaluation.
        model_source: the folder or name of a model of transformers, with `preprocessor_config.json`
            perhaps; None: the model has no image processor.

    Raises:
        DataError: there are no images or classes, the splits have different classes, or a number is
            out of range. Reading a damaged image also raises it, with the path.
    """
    prepared = image_metadata(image_size, model_source)
    root = Path(root)
    splits, others = _splits_in(root)
    notes: list[str] = []
    not_read: list[str] = []
    of_eval: list[tuple[str, int]] = []
    evaluated = next((split for split in ("validation", "test") if split in splits), None)
    if metadata_of_training() is not None:
        if evaluated is None:
            raise HeldOutError
        splits["train"] = splits[evaluated]
    if not splits:
        images, others_of_train = _images_by_class(root, root)
        names = class_numbers(list(images), classes, "classes", f"{setting('root', root)}")
        files = _numbered(images, names)
        strata, why_not = strata_of([label for _, label in files], eval_share, stratify)
        notes += why_not
        train, evaluation = held_out(len(files), eval_share, split_seed, strata)
        of_train, of_eval = ([files[i] for i in part] for part in (train, evaluation))
        notes += note_without_held_out(_without_samples(names, of_eval), stratify)
        folders = [root]
    elif "train" not in splits:
        raise DataError(
            f"{setting('root', root)} contains {next(iter(splits.values())).name}/, but no train/: "
            "add it, or pass a folder that contains only the class folders"
        )
    else:
        images, others_of_train = _images_by_class(root, splits["train"])
        names = class_numbers(list(images), classes, "classes", str(splits["train"]))
        of_train = _numbered(images, names)
        folders = [splits.pop("train")]
        if evaluated is not None:
            folders.append(splits.pop(evaluated))
            of_val, others_of_val = _images_by_class(root, folders[1])
            not_read += others_of_val
            different = {*of_val} ^ {*images} if classes is None else set()
            if different:
                raise DataError(
                    f"{setting('root', root)}: {folders[0].name}/ and {folders[1].name}/ must "
                    f"have the same classes, but only one of them has {listed(sorted(different))}"
                )
            check_classes(
                list(of_val), names, str(folders[1]), f"the classes of {folders[0].name}/,"
            )
            of_eval = _numbered(of_val, names)
        unused_folders = [*(folder.name for folder in splits.values()), *others]
        if unused_folders:
            notes.append(f"not used: {', '.join(f'{name}/' for name in sorted(unused_folders))}")
    # once each, also if the evaluation split stands for both
    notes += note_other_files([*dict.fromkeys([*not_read, *others_of_train])])
    notes.append(counted_by_type([path for path, _ in dict.fromkeys([*of_train, *of_eval])]))
    folders_text = " and ".join(str(folder) for folder in dict.fromkeys(folders))
    notes[-1] += f" from {folders_text}"
    notes += image_notes(prepared, model_source)
    plain = image_transform(prepared)
    to_predict = None
    if predict_path is not None:
        to_predict = UnlabelledImages(_files_to_predict(predict_path)[0], plain)
    return DataSplits(
        predict=to_predict,
        train=training_images(of_train, prepared, augment, rand_augment, mixup, len(names)),
        eval=Images(of_eval, plain) if of_eval else None,
        metadata={
            "num_classes": len(names),
            "classes": names,
            **prepared,
        },
        held_out=len(folders) == 1 and bool(of_eval),
        notes=notes,
        digest=digest_of_files([path for path, _ in [*of_train, *of_eval]], every_size=False),
        without_samples=_without_samples(names, of_train),
    )


def training_images(
    files: Sequence[tuple[str, int]],
    prepared: Mapping[str, Any],
    augment: bool,
    rand_augment: int | None,
    mixup: float,
    classes: int,
) -> Dataset[Any]:
    """Returns the training split of images; see `image_folder`.

    Raises:
        DataError: a number is out of range.
    """
    if rand_augment is not None and not 0 <= rand_augment <= 30:
        raise DataError(f"{setting('rand_augment', rand_augment)} must be between 0 and 30")
    if mixup < 0:
        raise DataError(f"{setting('mixup', mixup)} must be at least 0")
    images = Images(files, image_transform(prepared, augment, rand_augment))
    return MixedUp(images, mixup, classes) if mixup else images


def image_metadata(image_size: int | None, model_source: str | None = None) -> dict[str, Any]:
    """Returns the metadata of the preprocessing for evaluation; see `image_folder`.

    Raises:
        DataError: the size is not a number of pixels, or the model's processor makes no squares.
    """
    if image_size is not None and image_size < 1:
        raise DataError(f"{setting('image_size', image_size)} must be at least 1")
    processor = processor_of(model_source)
    if processor is not None:
        processor, side = sized(processor, image_size)
        mean, std = normalisation(processor)
        facts = {"image_size": side, "channels": 3, "image_mean": mean, "image_std": std}
        return {**facts, "image_processor": processor}
    side = image_size or _DEFAULT_SIZE
    return {
        "image_size": side,
        "channels": 3,
        "image_resize": round(side * _RESIZED),  # of the smaller side, before the center crop
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }


def image_notes(prepared: Mapping[str, Any], model_source: str | None) -> list[str]:
    """Returns a part of the data line about the model's image processor; [] without one."""
    if "image_processor" not in prepared:
        return []
    side = prepared["image_size"]
    return [f"{side} x {side} pixels by the image processor of {model_source}"]


def _files_to_predict(path: str) -> tuple[list[str], list[str]]:
    """Returns the image files of `predict_path`, and a part of the data line about other files.

    Raises:
        DataError: there are none.
    """
    place = Path(path)
    if path == STANDARD_INPUT:
        files = read_lines("predict_path", "the path of an image")
        if missing := [file for file in files if not Path(file).is_file()]:
            raise DataError(f"{argument('predict_path')}-: no such file: {missing[0]}")
        return files, []
    if place.is_file():
        return [path], []
    if not place.is_dir():
        raise DataError(
            f"{setting('predict_path', path)}: no such file or folder ({place.absolute()})"
        )
    files, other_files = image_files(place)
    if not files:
        raise DataError(
            f"{setting('predict_path', path)} contains no image: image files end in "
            f"{', '.join(SUFFIXES)}"
        )
    return files, note_other_files(other_files)


def _splits_in(root: Path) -> tuple[dict[str, Path], list[str]]:
    """Returns the folders in `root` that are splits, and the names of the others.

    A split contains folders: a class may be called train as well.

    Raises:
        DataError: two folders are the same split.
    """
    splits: dict[str, Path] = {}
    other_folders = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        split = split_of(folder.name)
        if split is None or not any(entry.is_dir() for entry in folder.iterdir()):
            other_folders.append(folder.name)
        elif split in splits:
            raise DataError(
                f"{setting('root', root)}: {splits[split].name}/ and {folder.name}/ are both a "
                f"{split} split: rename one of them"
            )
        else:
            splits[split] = folder
    return splits, other_folders


def _images_by_class(root: Path, folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the image files of each class, a folder in `folder`, in the order of the names.

    Also returns the other files in these folders.
    """
    expectation = (
        f"{setting('root', root)}: {folder.absolute()} must contain a folder of images for each "
        "class"
    )
    if not folder.is_dir():
        raise DataError(f"{expectation}, but it does not exist")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    images = {}
    not_read: list[str] = []
    for name in names:
        if name.startswith("."):
            continue
        images[name], other_files = image_files(folder / name)
        not_read += other_files
        if not images[name]:
            other_text = f"it contains {Path(other_files[0]).name}, but " if other_files else ""
            raise DataError(
                f"{expectation}, but {name}/ has none: {other_text}image files end in "
                f"{', '.join(SUFFIXES)}"
            )
    if not images:
        raise DataError(f"{expectation}, but it contains no folder")
    return images, not_read


def _numbered(images: dict[str, list[str]], names: Sequence[str]) -> list[tuple[str, int]]:
    number = {name: i for i, name in enumerate(names)}
    return [(path, number[name]) for name, paths in images.items() for path in paths]


def _without_samples(names: Sequence[str], files: Sequence[tuple[str, int]]) -> list[str]:
    used = {label for _, label in files}
    return [name for number, name in enumerate(names) if number not in used]


def image_transform(
    prepared: Mapping[str, Any], augment: bool = False, rand_augment: int | None = None
) -> Any:
    """Returns the preset of torchvision's reference training, or of its evaluation.

    Args:
        prepared: the metadata of `image_metadata`; the model's image processor replaces the preset
            of the evaluation.
        augment: whether to crop and flip at random.
        rand_augment: the magnitude of RandAugment.
    """
    from torchvision.transforms import v2

    side = prepared["image_size"]
    first: list[Any] = []
    if augment:
        first = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip()]
    elif (processor := prepared.get("image_processor")) is not None:
        as_base = Processed(processor)
        if rand_augment is None:
            return as_base
        return v2.Compose([v2.RandAugment(magnitude=rand_augment), as_base])
    else:
        first = [v2.Resize(prepared["image_resize"]), v2.CenterCrop(side)]
    if rand_augment is not None:
        first.append(v2.RandAugment(magnitude=rand_augment))
    return v2.Compose([*first, *normalised(prepared["image_mean"], prepared["image_std"])])
