"""CIFAR-10, read by torchvision."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.data import (
    DataSplits,
    InMemoryDataset,
    for_trained_models,
    metadata_of_training,
)
from hybridtrain.datasets.images import normalised
from hybridtrain.errors import DataError, argument

_SIDE = 32

# Statistics of the training pixels, per color, scaled to 0..1.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_ARCHIVE = "cifar-10-python.tar.gz"
_FOLDER = "cifar-10-batches-py"


class Augmented(Dataset[Any]):
    """Images in memory, each transformed individually when it is read."""

    def __init__(
        self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor]
    ) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.transform(self.images[index]), self.labels[index]


@for_trained_models(skips_training=True)
def cifar10(root: str | Path = "data", download: bool = False, augment: bool = True) -> DataSplits:
    """Returns the 60,000 photographs of CIFAR-10, read by `torchvision.datasets.CIFAR10`.

    Items are `(image, label)`: float32 of shape (3, 32, 32), normalized per color with the mean and
    standard deviation of the training split, and int64 in 0..9. Training images are random 32 x 32
    crops with a padding of 4, randomly flipped. The pixels stay bytes in memory (154 MB for the
    training split).

    Metadata: `num_classes` 10, `image_size` 32, `channels` 3, `image_mean`, `image_std`.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

    Args:
        root: the folder that contains `cifar-10-batches-py/`, or the archive
            `cifar-10-python.tar.gz`, which is unpacked there.
        download: download the archive (170 MB) if neither exists.
        augment: random crops and flips in training; False: as in evaluation.

    Raises:
        DataError: files are missing or damaged, or the download fails.
    """
    root = Path(root)
    if not (root / _FOLDER).is_dir():
        _unpack(root, download)
    evaluation = _read(root, train=False)
    train = evaluation if metadata_of_training() is not None else _read(root, train=True)
    return DataSplits(
        train=Augmented(*train, _transform()) if augment else InMemoryDataset(*train, to_floats),
        eval=InMemoryDataset(*evaluation, to_floats),
        metadata={
            "num_classes": 10,
            "image_size": _SIDE,
            "channels": 3,
            "image_mean": _MEAN,
            "image_std": _STD,
        },
    )


def to_floats(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bytes of shape (N, 3, 32, 32) as the normalized float32 images of a model."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return pixels.float().div_(255).sub_(mean).div_(std), labels


def _transform() -> Any:
    from torchvision.transforms import v2

    crop = v2.RandomCrop(_SIDE, padding=4)
    return v2.Compose([crop, v2.RandomHorizontalFlip(), *normalised(_MEAN, _STD)])


def _unpack(root: Path, download: bool) -> None:
    """Unpacks the archive, after downloading it if necessary."""
    # The import takes a second.
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity, download_url, extract_archive

    archive = root / _ARCHIVE
    if not download and not archive.is_file():
        raise DataError(
            f"CIFAR-10: looked in {root.absolute()} for the folder {_FOLDER} and the archive "
            f"{_ARCHIVE}, and found neither.\n{_remedy(root)}"
        )
    try:
        if download:
            download_url(CIFAR10.url, str(root), _ARCHIVE, CIFAR10.tgz_md5)
        elif not check_integrity(str(archive), CIFAR10.tgz_md5):
            raise DataError(
                f"CIFAR-10: {archive.absolute()} is damaged or another file (wrong MD5 checksum). "
                f"Delete it.\n{_remedy(root)}"
            )
        with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=root) as scratch:
            extract_archive(str(archive), scratch)
            with suppress(OSError):  # another process may have been first
                (Path(scratch) / _FOLDER).rename(root / _FOLDER)
    except (OSError, RuntimeError) as error:
        did = "fetched" if download else "unpacked"
        raise DataError(
            f"CIFAR-10 could not be {did} into {root.absolute()}: {error}\n{_remedy(root)}"
        ) from error


def _read(root: Path, train: bool) -> tuple[Tensor, Tensor]:
    from torchvision.datasets import CIFAR10

    class Test(CIFAR10):  # type: ignore[misc]
        train_list: ClassVar[list[Any]] = []  # else it verifies these files, too

    try:
        data = (CIFAR10 if train else Test)(str(root), train=train)  # verifies the files' MD5
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"CIFAR-10: a file in {(root / _FOLDER).absolute()} is missing or damaged ({error}). "
            f"Delete the folder.\n{_remedy(root)}"
        ) from error
    pixels = torch.from_numpy(np.ascontiguousarray(data.data.transpose(0, 3, 1, 2)))
    return pixels, torch.tensor(data.targets)


def _remedy(root: Path) -> str:
    return (
        f"Download it with: hybridtrain recipe=cifar10_resnet18 data.download=true "
        f"data.root={root}\nOr manually: put {_ARCHIVE} (from {_URL}) into {root.absolute()}, or "
        f"set another folder with {argument('root')}"
    )
