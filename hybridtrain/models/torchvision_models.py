"""torchvision's classification models, for the images of any data set."""

from __future__ import annotations

import difflib
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

from hybridtrain.errors import ConfigError
from hybridtrain.models.check import check_dropout, check_sizes

# The sizes that image data sets and models come in, in pixels a side: MNIST 28, CIFAR 32,
# Tiny ImageNet 64, ImageNet 224, Inception v3 299, and so on.
USUAL_SIZES = (16, 28, 32, 64, 96, 128, 224, 299, 384, 448, 512)


def torchvision_model(
    name: str,
    num_classes: int,
    image_size: int | None = None,
    channels: int = 3,
    resize: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """A classification model of torchvision, from scratch, with torchvision's parameter names.

    Takes float images of shape (N, channels, image_size, image_size) and returns log-probabilities
    of shape (N, num_classes), whose cross-entropy is their negative log-likelihood. A grey image
    is given to the model as three equal colours. In training GoogLeNet and Inception v3 return
    torchvision's named tuples, log-probabilities of the auxiliary heads included.

    Weights are those that `torchvision.models.get_model(name)` draws; none are downloaded.

    Args:
        name: as in `torchvision.models.list_models(module=torchvision.models)`.
        num_classes: classes.
        image_size: pixels a side; may be None if `resize` is set.
        channels: colour channels, 1 or 3.
        resize: pixels a side that images are resized to (bilinear). None: not at all if the model
            takes the images as they are, else to the next larger of `USUAL_SIZES` that it takes.
        dropout: probability that a feature is dropped in training; None: the model's own.

    Raises:
        ConfigError: there is no such model, or the model does not take such an argument or images
            of such a size.
    """
    from torchvision import models as zoo  # seconds of imports: only for a run that needs them

    _check_name(name, zoo.list_models(module=zoo))
    given = {"image_size": image_size, "resize": resize}
    sizes = {key: size for key, size in given.items() if size is not None}
    check_sizes(num_classes=num_classes, channels=channels, **sizes)
    if channels not in (1, 3):
        raise ConfigError(f"model.channels={channels}: torchvision's models take 3 colours, or 1")
    if resize is not None:
        sides = [resize]
    elif image_size is not None:
        sides = [image_size, *(side for side in USUAL_SIZES if side > image_size)]
    else:
        raise ConfigError(
            "model.image_size is null and the data set does not know it either: set it, or the "
            "size that images are resized to, model.resize"
        )
    build = _builder(name, zoo.get_model_builder(name), num_classes, dropout)
    side = _first_that_fits(name, build, sides)
    net = build(side)
    settings = {"grey": channels == 1, "side": None if side == image_size else side}
    # The names of a wrapper's parameters would have a prefix. PyTorch's own parametrizations and
    # `fully_shard` change a module's class in the same way.
    net.__class__ = type(type(net).__name__, (_OnImages, type(net)), settings)
    return net


class _OnImages(nn.Module):
    """What a class of torchvision's is extended by: before and after its own forward.

    TraceGuards:
        grey: whether images have one channel.
        side: pixels a side that images are resized to; None: they are as they should be.
    """

    grey: bool
    side: int | None

    def forward(self, images: Tensor) -> Any:
        """Log-probabilities of (N, channels, height, width)."""
        if self.grey:
            images = images.expand(-1, 3, -1, -1)
        if self.side is not None:
            size = (self.side, self.side)
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return tree_map(partial(F.log_softmax, dim=1), super().forward(images))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Parameters that modules make in here have shapes but no memory, and nothing is drawn.

    Not `torch.device("meta")`, which some constructors that compute with tensors do not survive.
    """

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"))

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            yield
    finally:
        hook.remove()


def _builder(
    name: str, builder: Callable[..., nn.Module], num_classes: int, dropout: float | None
) -> Callable[[int], nn.Module]:
    """`build(side)` gives the model for images of that size."""
    accepted = inspect.signature(inspect.signature(builder).return_annotation).parameters
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if dropout is not None:
        if "dropout" not in accepted:
            raise ConfigError(f"model.dropout: {name} has no such probability; set it to null")
        if not isinstance(dropout, int | float):
            raise ConfigError(f"model.dropout={dropout} must be a number")
        check_dropout(dropout)
        options["dropout"] = dropout
    if "init_weights" in accepted and accepted["init_weights"].default is None:
        options["init_weights"] = True  # what None does too, but with a warning

    def build(side: int) -> nn.Module:
        # of the models that have a size, ViT takes a number and MaxViT a pair
        sized: dict[str, Any] = {"image_size": side, "input_size": (side, side)}
        sized = {key: size for key, size in sized.items() if key in accepted}
        return builder(**options, **sized)

    return build


def _first_that_fits(name: str, build: Callable[[int], nn.Module], sides: Sequence[int]) -> int:
    """The first of these sizes that the model takes in training."""
    reason = ""
    for side in sides:
        try:
            with shapes_only():
                # two rows: a batch norm refuses one where it is all that is left of an image
                build(side).to("meta")(torch.empty(2, 3, side, side, device="meta"))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
        else:
            return side
    raise ConfigError(
        f"model.name={name} takes no images of {' or '.join(map(str, sides))} pixels a side "
        f"({reason}): set model.resize to a size that it takes"
    )


def _check_name(name: str | None, known: Sequence[str]) -> None:
    if name in known:
        return
    if name is None:
        raise ConfigError("model.name is null: name a model of torchvision, such as resnet18")
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean model.name={close[0]}?" if close else f"there are: {', '.join(known)}"
    raise ConfigError(f"model.name={name}: torchvision has no such classification model; {hint}")
