"""torchvision's classification models, for the images of any data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map

from hybridtrain.errors import ConfigError, argument, did_you_mean, setting
from hybridtrain.models.check import check_dropout, check_sizes, returns

# Usual pixels per side: MNIST 28, CIFAR 32, Tiny ImageNet 64, ImageNet 224, Inception v3 299.
USUAL_SIZES = (16, 28, 32, 64, 96, 128, 224, 299, 384, 448, 512)


@returns("log_probabilities")
def torchvision_model(
    name: str,
    num_classes: int,
    image_size: int | None = None,
    channels: int = 3,
    resize: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """Returns a torchvision classification model, untrained, with its parameter names.

    It takes float images of shape (N, channels, image_size, image_size) and returns
    log-probabilities of shape (N, num_classes); their cross-entropy equals their negative
    log-likelihood. A gray image is copied to three equal colors. In training, GoogLeNet and
    Inception v3 return torchvision's named tuples, with log-probabilities of the auxiliary heads.
    The initial weights are the ones drawn by `torchvision.models.get_model(name)`.

    Args:
        name: as in `torchvision.models.list_models(module=torchvision.models)`.
        num_classes: the number of classes.
        image_size: pixels per side; may be None if `resize` is given.
        channels: color channels, 1 or 3.
        resize: pixels per side to resize images to (bilinear). None: images keep their size if the
            model takes it, else they get the next larger of `USUAL_SIZES` that it takes.
        dropout: dropout probability of features; None: the model's default.

    Raises:
        ConfigError: the name is unknown, or the model does not accept an argument or the image
            size.
    """
    from torchvision import models  # takes seconds to import

    available = models.list_models(module=models)
    if name not in available:
        raise ConfigError(
            f"{setting('name', name)}: torchvision has no such classification model; "
            f"{did_you_mean(str(name), available, 'models')}"
        )
    first = image_size if resize is None else resize
    key = "image_size" if resize is None else "resize"
    check_sizes(num_classes=num_classes, channels=channels, **{key: first})
    assert first is not None
    if channels not in (1, 3):
        raise ConfigError(
            f"{setting('channels', channels)}: torchvision's models take 3 color channels, or 1"
        )
    builder = models.get_model_builder(name)
    accepted = inspect.signature(inspect.signature(builder).return_annotation).parameters
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if dropout is not None:
        if "dropout" not in accepted:
            raise ConfigError(
                f"{setting('dropout', dropout)}: {name} has no such argument, leave it at None"
            )
        check_dropout(dropout)
        options["dropout"] = dropout
    if "init_weights" in accepted and accepted["init_weights"].default is None:
        options["init_weights"] = True  # the effect of None, without its warning

    def build(side: int) -> nn.Module:
        # among models with a fixed size, ViT takes a number and MaxViT a pair
        sized = {"image_size": side, "input_size": (side, side)}
        net: nn.Module = builder(**options, **{k: sized[k] for k in sized.keys() & accepted})
        return net

    sides = [first, *(side for side in USUAL_SIZES if resize is None and side > first)]
    side = _first_that_fits(name, build, sides)
    net = build(side)
    settings = {"grey": channels == 1, "side": None if side == image_size else side}
    # A wrapper would add a prefix to the parameters' names. PyTorch's parametrizations and
    # `fully_shard` change a module's class in the same way.
    net.__class__ = type(type(net).__name__, (_OnImages, type(net)), settings)
    return net


class _OnImages(nn.Module):
    """Extends a torchvision class: prepares the images, and normalizes the outputs."""

    grey: bool
    side: int | None  # the size to resize images to

    def forward(self, images: Tensor) -> Any:
        """Returns the log-probabilities of images (N, channels, height, width)."""
        if self.grey:
            images = images.expand(-1, 3, -1, -1)
        if self.side is not None:
            images = F.interpolate(images, [self.side] * 2, mode="bilinear", antialias=True)
        return tree_map(partial(F.log_softmax, dim=1), super().forward(images))


@contextmanager
def shapes_only() -> Iterator[None]:
    """A context in which modules are created without parameter memory or random draws.

    Unlike `torch.device("meta")`, it lets constructors compute with other tensors.
    """
    hook = register_module_parameter_registration_hook(
        lambda module, name, parameter: nn.Parameter(parameter.to("meta"))  # type: ignore[arg-type]
    )
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            yield
    finally:
        hook.remove()


def _first_that_fits(name: str, build: Callable[[int], nn.Module], sides: Sequence[int]) -> int:
    """Returns the first of these sizes that the model accepts in training."""
    for side in sides:
        try:
            with shapes_only():
                # two images: a batch norm rejects a single value per channel
                build(side).to("meta")(torch.empty(2, 3, side, side, device="meta"))
            return side
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
    raise ConfigError(
        f"{setting('name', name)} does not accept images of {' or '.join(map(str, sides))} pixels "
        f"per side ({reason}): pass {argument('resize')}<a size that it accepts>"
    )
