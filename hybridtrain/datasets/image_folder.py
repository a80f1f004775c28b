"""A folder of images, with a folder for each class, read by torchvision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.data import DataSplits
from hybridtrain.datasets.held_out import held_out
from hybridtrain.datasets.images import IMAGENET_MEAN, IMAGENET_STD, normalised
from hybridtrain.errors import DataError

_TRAIN = ("train", "training")
_EVAL = ("val", "valid", "validation", "eval", "test")

# The side that an evaluation resizes to, of which the middle is cut: 256 for 224.
_RESIZED = 256 / 224


class Images(Dataset[Any]):
    """Image files and their classes: `(image, label)` as `transform` makes it.

    Args:
        files: path and class of each.
        transform: of a PIL image in three colours.
    """

    def __init__(
        self, files: Sequence[tuple[str, int]], transform: Callable[[Any], Tensor]
    ) -> None:
        self.files = files
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from torchvision.datasets.folder import default_loader

        path, label = self.files[index]
        try:
            image = default_loader(path)
        except (OSError, SyntaxError, ValueError) as error:  # what PIL finds in damaged files
            raise DataError(f"{path} cannot be read as an image: {error}") from error
        return self.transform(image), torch.tensor(label)


def image_folder(
    root: str | Path = "data",
    image_size: int = 224,
    augment: bool = True,
    eval_share: float = 0.1,
    split_seed: int = 0,
) -> DataSplits:
    """Returns the images of a folder with a folder for each class, as ImageNet is laid out.

    The classes are numbered in the order of their names. With a folder `train` in `root`, the
    evaluation split is the folder `val`, `valid`, `validation`, `eval` or `test` beside it, with
    the same classes, or there is none; otherwise the classes' folders are in `root` itself, and a
    part of the images is held out.

    Items are `(image, label)`: float32 of shape (3, image_size, image_size), normalised with the
    mean and standard deviation of ImageNet, and int64. In training an image is a random part
    of the file's (`RandomResizedCrop`), mirrored or not; in evaluation the smaller side is resized
    to 256/224 of `image_size` and the middle is taken, as in torchvision's reference training.

    Metadata: `num_classes`, `image_size`, `channels` 3.

    Args:
        root: the folder.
        image_size: pixels per side.
        augment: draw random parts in training; False: as in evaluation.
        eval_share: the part of the images that is held out where there is no folder `train`.
        split_seed: which images that are is drawn from it.

    Raises:
        DataError: there are no images or classes, the splits have other classes, or a number is
            out of its range. A damaged image is one when it is read, with its path.
    """
    if image_size < 1:
        raise DataError(f"image_size={image_size} must be at least 1")
    root = Path(root)
    train, evaluation = _first_of(root, _TRAIN), _first_of(root, _EVAL)
    if train is None:
        if evaluation is not None:
            raise DataError(
                f"root={root}: {evaluation.name}/ is there, and no train/ beside it: add one, or "
                f"name a folder that has the classes' folders alone"
            )
        classes, files = _found(root, root)
        of_train, of_eval = (
            [files[i] for i in part] for part in held_out(len(files), eval_share, split_seed)
        )
    else:
        classes, of_train = _found(root, train)
        of_eval = []
        if evaluation is not None:
            others, of_eval = _found(root, evaluation)
            if different := sorted({*classes} ^ {*others}):
                raise DataError(
                    f"root={root}: {train.name}/ and {evaluation.name}/ must have the same "
                    f"classes; only one of them has: {', '.join(different[:8])}"
                )
    plain = _transform(image_size, augment=False)
    return DataSplits(
        train=Images(of_train, _transform(image_size, augment=True) if augment else plain),
        eval=Images(of_eval, plain) if of_eval else None,
        metadata={"num_classes": len(classes), "image_size": image_size, "channels": 3},
    )


def _first_of(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _found(root: Path, folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Returns the names of the classes in a folder, and path and class of each image."""
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(str(folder))
    except OSError as error:  # no such folder, none in it, or one without images
        raise DataError(
            f"root={root}: {folder.absolute()} should have a folder of images for each class, "
            f"but: {error}"
        ) from error
    return found.classes, found.samples


def _transform(image_size: int, augment: bool) -> Any:
    """Returns the preset of torchvision's reference training, or of its evaluation."""
    from torchvision.transforms import v2

    first = [v2.Resize(round(image_size * _RESIZED)), v2.CenterCrop(image_size)]
    if augment:
        first = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
    return v2.Compose([*first, *normalised(IMAGENET_MEAN, IMAGENET_STD)])
