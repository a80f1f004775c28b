"""MNIST, read by torchvision."""

from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError

from torch import Tensor

from hybridtrain.data import (
    DataSplits,
    InMemoryDataset,
    for_trained_models,
    metadata_of_training,
)
from hybridtrain.errors import DataError, argument

_SIDE = 28

# Statistics of the training pixels, scaled to 0..1, as in every MNIST tutorial.
_MEAN, _STD = 0.1307, 0.3081

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@for_trained_models(skips_training=True)
def mnist(root: str | Path = "data", download: bool = False) -> DataSplits:
    """Returns the 70,000 handwritten digits of MNIST, read by `torchvision.datasets.MNIST`.

    Items are `(image, label)`: float32 of shape (1, 28, 28), scaled to 0..1 and normalized with
    mean 0.1307 and standard deviation 0.3081, and int64 in 0..9. The pixels stay bytes in memory
    (47 MB for the training split instead of 188) and are normalized batch by batch.

    Metadata: `num_classes` 10, `image_size` 28, `channels` 1.

    Source: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits.

    Args:
        root: the folder that contains `MNIST/raw/` with the four IDX files.
        download: download the files to it if they do not exist.

    Raises:
        DataError: files are missing or damaged, or the download fails.
    """
    raw = Path(root) / "MNIST" / "raw"
    alone = metadata_of_training() is not None
    if not download:
        _check_present(raw, _FILES[2:] if alone else _FILES)
    evaluation = _read(root, raw, train=False, download=download)
    return DataSplits(
        train=evaluation if alone else _read(root, raw, train=True, download=False),
        eval=evaluation,
        metadata={"num_classes": 10, "image_size": _SIDE, "channels": 1},
    )


def normalised(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bytes of shape (N, 28, 28) as the float32 images (N, 1, 28, 28) of a model."""
    return pixels.unsqueeze(1).float().div_(255).sub_(_MEAN).div_(_STD), labels


def _read(root: str | Path, raw: Path, *, train: bool, download: bool) -> InMemoryDataset:
    # The import takes a second.
    from torchvision.datasets import MNIST
    from torchvision.datasets.mnist import read_image_file, read_label_file

    of_images, of_labels = _FILES[:2] if train else _FILES[2:]
    try:
        if download:
            MNIST(str(root), download=True)
        images, labels = (
            read_image_file(str(raw / of_images)),
            read_label_file(str(raw / of_labels)),
        )
    except (AssertionError, EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError) as e:
        # torchvision reports a failed download as a RuntimeError or a URLError, and a damaged file
        # as any error of its parser.
        if download and (isinstance(e, URLError) or _missing(raw, _FILES)):
            raise DataError(f"could not download MNIST to {raw}: {e}\n{_remedy(raw)}") from e
        raise DataError(_damaged(raw, f"{type(e).__name__}: {e}")) from e

    if images.shape != (len(labels), _SIDE, _SIDE) or len(labels) == 0:
        problem = f"images of shape {tuple(images.shape)} for {len(labels)} labels"
        raise DataError(_damaged(raw, problem))
    if not 0 <= int(labels.min()) <= int(labels.max()) <= 9:
        raise DataError(_damaged(raw, "a label outside 0..9"))
    return InMemoryDataset(images, labels, prepare=normalised)


def _missing(raw: Path, files: Sequence[str]) -> list[str]:
    return [name for name in files if not (raw / name).is_file()]


def _check_present(raw: Path, files: Sequence[str]) -> None:
    if not (missing := _missing(raw, files)):
        return
    if all((raw / f"{name}.gz").is_file() for name in missing):
        raise DataError(
            f"MNIST: the files {', '.join(missing)} in {raw.absolute()} must be unpacked first: "
            f"gunzip --keep {raw}/*.gz"
        )
    raise DataError(
        f"MNIST: looked in {raw.absolute()} and did not find {', '.join(missing)}.\n{_remedy(raw)}"
    )


def _remedy(raw: Path) -> str:
    return (
        f"Download it with: hybridtrain recipe=mnist_basicnet data.download=true "
        f"data.root={raw.parents[1]}\n"
        f"Or manually: put {', '.join(_FILES)} (unpacked, from "
        f"https://ossci-datasets.s3.amazonaws.com/mnist/) into {raw.absolute()}, "
        f"or set another folder with {argument('root')}"
    )


def _damaged(raw: Path, problem: str) -> str:
    folder = raw.absolute()
    return f"MNIST: a file in {folder} is damaged ({problem}). Delete the folder.\n{_remedy(raw)}"
