"""Declaring what a model returns, and checks of arguments that several models share."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

from hybridtrain.errors import ConfigError, argument, check_choice, setting

LOSS_OF = {
    "logits": "cross_entropy",
    "log_probabilities": "nll",
    "label_logits": "bce",
    "values": "mse",
    "loss": "model_output",
}
"""The loss for each kind of output that a model returns."""

Model = TypeVar("Model", bound=Callable[..., Any])


def returns(output: str | Callable[[Mapping[str, Any]], str]) -> Callable[[Model], Model]:
    """Decorates a model function with the kind of output its model returns.

    It determines the loss of a run unless `trainer.loss` is set. A function without the decorator
    is assumed to return logits.

    Args:
        output: `logits`, `log_probabilities`, `label_logits` (for several labels per sample),
            `values` (for regression) or `loss` (an output with the model's own loss); or a function
            of the config's arguments that returns one of them.
    """

    def decorate(model: Model) -> Model:
        model.returns = output  # type: ignore[attr-defined]
        return model

    return decorate


def loss_of_model(target: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the name of the loss for the output kind of the model of `target`.

    Raises:
        ConfigError: `returns` is not one of the known kinds.
    """
    output = getattr(target, "returns", "logits")
    output = output(arguments) if callable(output) else output
    check_choice("returns", output, list(LOSS_OF))
    return LOSS_OF[output]


def check_sizes(**sizes: int | None) -> None:
    """Raises `ConfigError` unless each size is a whole number of at least 1."""
    for name, value in sizes.items():
        if value is None:
            raise ConfigError(
                f"{setting(name, None)}: pass {argument(name)}, which the data set does not provide"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{setting(name, value, repr)} must be a whole number of at least 1")


def check_heads(d_model: int, name: str, heads: int) -> None:
    """Raises `ConfigError` unless the attention heads can share the model's width equally."""
    if d_model % heads:
        raise ConfigError(
            f"{setting('d_model', d_model)} must be a multiple of {setting(name, heads)}"
        )


def check_dropout(probability: float) -> None:
    """Raises `ConfigError` unless `probability` is at least 0 and below 1."""
    if not isinstance(probability, Real) or not 0 <= probability < 1:
        raise ConfigError(
            f"{setting('dropout', probability, repr)} must be a number of at least 0 and below 1"
        )


def check_length(length: int, name: str, most: int) -> None:
    """Raises `ConfigError` for a sequence with more tokens than the model has positions."""
    if length > most:
        raise ConfigError(
            f"a sequence of {length} tokens is too long for {setting(name, most)}: shorten the "
            f"sequences, or pass {argument(name)} of at least {length}"
        )
