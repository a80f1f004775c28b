"""The image processor of a base model, as a transform of the images to train on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridtrain.errors import DataError

_FILE = "preprocessor_config.json"


def processor_of(source: str | None) -> dict[str, Any] | None:
    """Returns the settings of a model's image processor; None: it has none.

    Args:
        source: the folder or name of a model of transformers; None: another model.
    """
    if source is None or (Path(source).is_dir() and not (Path(source) / _FILE).is_file()):
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):  # a model of texts, or a wrong name, which the model reports
        return None
    return {key: value for key, value in processor.to_dict().items() if value is not None}


def processor_from(settings: Mapping[str, Any]) -> Any:
    """Returns the image processor of transformers with these settings.

    Raises:
        DataError: transformers has no such processor.
    """
    import transformers

    name = str(settings.get("image_processor_type"))
    kind: Any = getattr(transformers, name, None)
    is_known = isinstance(kind, type) and issubclass(kind, transformers.ImageProcessingMixin)
    if not is_known:
        raise DataError(f"transformers has no image processor {name}")
    processor, _ = kind.from_dict(dict(settings), return_unused_kwargs=True)
    return processor


class Processed:
    """A transform of a PIL image to a tensor (3, side, side) by an image processor.

    Args:
        settings: see `processor_of`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._processor = processor_from(settings)

    def __call__(self, image: Any) -> Tensor:
        """Returns the pixels of an RGB image."""
        pixels: Tensor = self._processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def sized(settings: Mapping[str, Any], image_size: int | None) -> tuple[dict[str, Any], int]:
    """Returns the settings for images of a different size, and the number of pixels per side.

    Args:
        settings: see `processor_of`.
        image_size: pixels per side; None: as the processor makes them.

    Raises:
        DataError: the processor does not make square images of one size.
    """
    side = _side(settings)
    if image_size in (None, side):
        return dict(settings), side
    scaled = {
        name: {key: round(value * image_size / side) for key, value in settings[name].items()}
        for name in ("size", "crop_size")
        if isinstance(settings.get(name), Mapping)
    }
    changed = {**settings, **scaled}
    return changed, _side(changed)


def _side(settings: Mapping[str, Any]) -> int:
    from PIL import Image

    shape = tuple(Processed(settings)(Image.new("RGB", (300, 500))).shape)
    if len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        raise DataError(
            f"the image processor {settings.get('image_processor_type')} of the model makes images "
            f"of shape {shape}, and only squares of 3 colors are supported"
        )
    return shape[1]


def normalisation(settings: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Returns the mean and standard deviation of each color, of values from 0 to 1."""
    if not settings.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    return [*settings["image_mean"]], [*settings["image_std"]]
