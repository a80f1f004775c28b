"""A multilayer perceptron for tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hybridtrain.errors import ConfigError, setting
from hybridtrain.models.check import check_dropout, check_sizes, returns


@returns(lambda arguments: "values" if arguments.get("task") == "regression" else "logits")
def tabular_mlp(
    num_features: int,
    num_classes: int,
    hidden: Sequence[int] | None = None,
    dropout: float = 0.0,
    task: str | None = None,
) -> nn.Sequential:
    """Returns linear layers with ReLU between them.

    It takes floats of shape (N, num_features) and returns logits, or in a regression values, of
    shape (N, num_classes).

    Args:
        num_features: the number of inputs.
        num_classes: the number of classes, or of predicted numbers.
        hidden: the widths of the hidden layers; None: two of 128.
        dropout: the dropout probability after each hidden layer.
        task: `regression` for the loss `mse`; None: classification.

    Raises:
        ConfigError: a size or probability is out of range.
    """
    check_sizes(num_features=num_features, num_classes=num_classes)
    check_dropout(dropout)
    hidden = [128, 128] if hidden is None else hidden
    if isinstance(hidden, int) or not all(type(width) is int and width > 0 for width in hidden):
        raise ConfigError(f"{setting('hidden', hidden)} must be a list of widths of at least 1")
    layers: list[nn.Module] = []
    width = num_features
    for next_width in hidden:
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = next_width
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
