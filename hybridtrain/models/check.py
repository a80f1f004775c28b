"""Checks of the arguments that several models share."""

from hybridtrain.errors import ConfigError


def check_sizes(**sizes: int) -> None:
    """Raise `ConfigError` unless each of these is a whole number of at least 1."""
    for name, value in sizes.items():
        if value is None:
            raise ConfigError(
                f"model.{name} is null and the data set does not know it either: set model.{name}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"model.{name} must be a whole number of at least 1, not {value!r}")


def check_heads(d_model: int, name: str, heads: int) -> None:
    """Raise `ConfigError` unless the model's width can be shared out among the attention heads."""
    if d_model % heads:
        raise ConfigError(
            f"model.d_model={d_model} must be a multiple of model.{name}={heads}: "
            "each head takes an equal part of it"
        )


def check_dropout(probability: float) -> None:
    """Raise `ConfigError` unless this is a probability below 1."""
    if not 0 <= probability < 1:
        raise ConfigError(f"model.dropout must be at least 0 and below 1, not {probability!r}")


def check_length(length: int, name: str, most: int) -> None:
    """Raise `ConfigError` for a sequence with more tokens than the model has positions."""
    if length > most:
        raise ConfigError(
            f"a sequence of {length} tokens is too long for model.{name}={most}: "
            f"shorten the data's sequences or set model.{name} to at least {length}"
        )
