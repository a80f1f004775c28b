"""Image models of timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridtrain.errors import ConfigError, did_you_mean, setting
from hybridtrain.models.check import check_dropout, check_sizes


def timm_model(
    name: str,
    num_classes: int,
    image_size: int | None = None,
    channels: int = 3,
    dropout: float | None = None,
) -> nn.Module:
    """Returns a model of timm with random weights and timm's parameter names.

    It takes float images of shape (N, channels, image_size, image_size) and returns logits of
    shape (N, num_classes). `init_from` loads weights from a file saved by timm.

    Args:
        name: as in `timm.list_models()`.
        num_classes: the number of classes.
        image_size: pixels per side, for models with a fixed size; None: the default.
        channels: color channels.
        dropout: dropout probability of features before the classifier; None: the model's default.

    Raises:
        ConfigError: timm is not installed or does not have this model, or the model does not accept
            an argument.
    """
    try:
        import timm
    except ImportError as error:
        raise ConfigError("timm models require pip install 'hybridtrain[timm]'") from error
    if not timm.is_model(name):
        available = timm.list_models()
        raise ConfigError(
            f"{setting('name', name)}: timm has no such model; {did_you_mean(name, available)}"
        )
    check_sizes(num_classes=num_classes, channels=channels)
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    if dropout is not None:
        check_dropout(dropout)
        options |= {"drop_rate": dropout}
    if image_size is not None:
        try:
            return _made(timm, name, img_size=image_size, **options)
        except TypeError:  # a convolutional network takes any size and has no such argument
            pass
    try:
        return _made(timm, name, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{setting('name', name)}: {str(error).partition(chr(10))[0]}") from error


def _made(timm: Any, name: str, **options: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **options)
    return model
