"""Checks of the arguments that several models share."""

from hybridtrain.errors import ConfigError


def check_sizes(**sizes: int | None) -> None:
    """Raises `ConfigError` unless each of these is a whole number of at least 1."""
    for name, value in sizes.items():
        if value is None:
            raise ConfigError(f"{name}=None: pass {name}=, which the data set does not provide")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")


def check_heads(d_model: int, name: str, heads: int) -> None:
    """Raises `ConfigError` unless the attention heads can share the model's width equally."""
    if d_model % heads:
        raise ConfigError(f"d_model={d_model} must be a multiple of {name}={heads}")


def check_dropout(probability: float) -> None:
    """Raises `ConfigError` unless this is a probability below 1."""
    if not isinstance(probability, int | float) or not 0 <= probability < 1:
        raise ConfigError(f"dropout={probability!r} must be a number of at least 0 and below 1")


def check_length(length: int, name: str, most: int) -> None:
    """Raises `ConfigError` for a sequence with more tokens than the model has positions."""
    if length > most:
        raise ConfigError(
            f"a sequence of {length} tokens is too long for {name}={most}: shorten the sequences, "
            f"or pass {name}= of at least {length}"
        )
