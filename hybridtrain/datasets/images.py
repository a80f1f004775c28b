"""Reading image files: as a person sees them, and as a model takes them.

One rule for training, evaluation and prediction: EXIF orientation is applied; 16-bit gray values
are scaled to 8 bits; transparent images are composited on white; CMYK, palettes and other modes are
converted; for an animation, the first frame is read.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridtrain._base.text_table import counted
from hybridtrain.errors import DataError

# Statistics of ImageNet per color, as used by torchvision's models.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
"""The suffixes of image files, in upper or lower case."""


def read_image(path: str | Path) -> Any:
    """Returns the image in a file as an RGB PIL image; see the module docstring.

    Raises:
        DataError: the file is missing, damaged, too large or of a kind without a known value range;
            the message names the file.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            return _as_seen(ImageOps.exif_transpose(file))
    except DataError as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path} cannot be read as an image: it exceeds PIL's size limit ({error}). Make a "
            f"smaller copy of it"
        ) from error
    # errors of PIL for damaged files
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error


def _as_seen(image: Any) -> Any:
    from PIL import Image

    if image.mode == "F":
        raise DataError("its values are floats without a known range: save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits; Pillow opens some of them as 32
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise DataError("its values need more than 16 bits: save it with 8 or 16 bits")
        return Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def image_files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the image files in a folder and its subfolders, sorted, and all other files.

    Skips hidden files and folders.
    """
    images: list[str] = []
    other_files: list[str] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                is_image = name.lower().endswith(SUFFIXES)
                (images if is_image else other_files).append(os.path.join(place, name))
    return images, other_files


def counted_by_type(files: Sequence[str]) -> str:
    """Returns how many files have each suffix, such as `40 jpg, 2 png`."""
    kinds = Counter(Path(file).suffix.lower()[1:] or "without a suffix" for file in files)
    shown = [f"{count:,} {kind}" for kind, count in kinds.most_common(8)]
    return ", ".join([*shown, "..."] if len(kinds) > 8 else shown)


def note_other_files(files: Sequence[str]) -> list[str]:
    """Returns a part of the data line that counts files that are not read; [] if there are none."""
    if not files:
        return []
    return [f"{counted(len(files), 'file')} of other types not read: {counted_by_type(files)}"]


def normalised(mean: Sequence[float], std: Sequence[float]) -> list[Any]:
    """Returns transforms of a PIL image, or of bytes (..., height, width), to normalized floats."""
    # The import takes a second.
    from torchvision.transforms import v2

    to_float = v2.ToDtype(torch.float32, scale=True)
    return [v2.ToImage(), to_float, v2.Normalize(mean, std), v2.ToPureTensor()]
