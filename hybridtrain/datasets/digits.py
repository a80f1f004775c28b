"""The handwritten digits included in the package. See digits.md for their source."""

import gzip
from importlib.resources import files

import numpy as np
import torch

from hybridtrain.data import DataSplits, InMemoryDataset
from hybridtrain.errors import DataError

_FILE = "digits.csv.gz"
_SAMPLES = 1797
_SIDE = 8
_WHITE = 16  # a pixel counts the dots set in a 4x4 block

# Mean and standard deviation of the 1,797 x 64 pixels after scaling to 0..1.
_MEAN, _STD = 0.3053, 0.3760


def digits() -> DataSplits:
    """Returns the 1,797 digits of the UCI Optical Recognition set (its test split), 8x8 pixels.

    Items are `(image, label)`: float32 of shape (1, 8, 8), scaled from 0..16 to 0..1 and then
    normalized to mean 0 and standard deviation 1 over the set, and int64 in 0..9.

    The evaluation split is every fifth digit of each class in file order, 355 in all; the other
    1,442 are for training. No random numbers are involved, so the split does not depend on a seed
    or a torch version, and both splits have the same class proportions.

    Metadata: `num_classes` 10, `image_size` 8, `channels` 1.

    Source: E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, DOI 10.24432/C50P49,
    CC BY 4.0.

    Raises:
        DataError: the file in the installed package is missing or damaged.
    """
    resource = files("hybridtrain.datasets") / _FILE
    try:
        with resource.open("rb") as packed, gzip.open(packed) as file:
            table = np.loadtxt(file, dtype=np.int64, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(_broken(str(resource), str(error))) from error
    if table.shape != (_SAMPLES, _SIDE * _SIDE + 1):
        raise DataError(_broken(str(resource), f"a table of shape {table.shape}"))

    values = torch.from_numpy(table)
    pixels = values[:, :-1].reshape(-1, 1, _SIDE, _SIDE).float()
    images = (pixels / _WHITE - _MEAN) / _STD
    labels = values[:, -1].contiguous()

    held_out = torch.zeros(_SAMPLES, dtype=torch.bool)
    for label in range(10):
        of_class = (labels == label).nonzero().flatten()
        held_out[of_class[4::5]] = True

    return DataSplits(
        train=InMemoryDataset(images[~held_out], labels[~held_out]),
        eval=InMemoryDataset(images[held_out], labels[held_out]),
        metadata={"num_classes": 10, "image_size": _SIDE, "channels": 1},
    )


def _broken(path: str, problem: str) -> str:
    return (
        f"{path} must contain {_SAMPLES} lines of {_SIDE * _SIDE} pixels and a label, but: "
        f"{problem}. The file belongs to the package: reinstall hybridtrain"
    )
