"""Images as a model takes them."""

from collections.abc import Sequence
from typing import Any

import torch

# Of the images of ImageNet, per colour: the figures of torchvision's models.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalised(mean: Sequence[float], std: Sequence[float]) -> list[Any]:
    """Returns transforms of a PIL image, or of bytes (..., height, width), to normalised floats."""
    # Takes a second to import.
    from torchvision.transforms import v2

    to_float = v2.ToDtype(torch.float32, scale=True)
    return [v2.ToImage(), to_float, v2.Normalize(mean, std), v2.ToPureTensor()]
