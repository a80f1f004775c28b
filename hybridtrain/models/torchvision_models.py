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
    """Returns a classification model of torchvision, untrained, with its parameter names.

    It takes float images of shape (N, channels, image_size, image_size) and returns
    log-probabilities of shape (N, num_classes), whose cross-entropy is their negative
    log-likelihood. A grey image becomes three equal colours. In training GoogLeNet and Inception v3
    return torchvision's named tuples, with log-probabilities of the auxiliary heads. The initial
    weights are those that `torchvision.models.get_model(name)` draws.

    Args:
        name: as in `torchvision.models.list_models(module=torchvision.models)`.
        num_classes: number of classes.
        image_size: pixels per side; may be None if `resize` is given.
        channels: colour channels, 1 or 3.
        resize: pixels per side that images are resized to (bilinear). None: images keep their size
            if the model takes it, else they get the next larger of `USUAL_SIZES` that it takes.
        dropout: probability that a feature is dropped in training; None: the model's default.

    Raises:
        ConfigError: the name is unknown, or the model does not take such an argument or image.
    """
    from torchvision import models  # seconds of imports: only for a run that needs them

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
            f"{setting('channels', channels)}: torchvision's models take 3 colours, or 1"
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
        options["init_weights"] = True  # what None does too, but with a warning

    def build(side: int) -> nn.Module:
        # of the models that have a size, ViT takes a number and MaxViT a pair
        sized = {"image_size": side, "input_size": (side, side)}
        net: nn.Module = builder(**options, **{k: sized[k] for k in sized.keys() & accepted})
        return net

    sides = [first, *(side for side in USUAL_SIZES if resize is None and side > first)]
    side = _first_that_fits(name, build, sides)
    net = build(side)
    settings = {"grey": channels == 1, "side": None if side == image_size else side}
    # In a wrapper, the parameters' names would have a prefix. PyTorch's parametrizations and
    # `fully_shard` change a module's class in the same way.
    net.__class__ = type(type(net).__name__, (_OnImages, type(net)), settings)
    return net


class _OnImages(nn.Module):
    """Extends a class of torchvision's: prepares the images, and normalises the outputs."""

    grey: bool
    side: int | None  # to which images are resized

    def forward(self, images: Tensor) -> Any:
        """Returns the log-probabilities of images (N, channels, height, width)."""
        if self.grey:
            images = images.expand(-1, 3, -1, -1)
        if self.side is not None:
            images = F.interpolate(images, [self.side] * 2, mode="bilinear", antialias=True)
        return tree_map(partial(F.log_softmax, dim=1), super().forward(images))


@contextmanager
def shapes_only() -> Iterator[None]:
    """A context in which modules are made without memory for parameters or random draws.

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
    """Returns the first of these sizes that the model takes in training."""
    for side in sides:
        try:
            with shapes_only():
                # two images: a batch norm refuses a single value per channel
                build(side).to("meta")(torch.empty(2, 3, side, side, device="meta"))
            return side
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
    raise ConfigError(
        f"{setting('name', name)} takes no images of {' or '.join(map(str, sides))} pixels per "
        f"side ({reason}): pass {argument('resize')}<a size that it takes>"
    )
