"""Patterns for the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hybridtrain.errors import ConfigError, closest


def fits(name: str, patterns: str | Sequence[str]) -> bool:
    """Returns whether `name` matches a pattern with `*`, `?` and `[...]`, or one of several."""
    each = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in each)


def matching(patterns: str | Sequence[str], names: Iterable[str], argument: str) -> list[str]:
    """Returns those of `names` that match.

    Raises:
        ConfigError: a pattern matches none; names `argument`.
    """
    names = list(names)
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = closest(pattern.replace("*", ""), names, cutoff=0.3) or next(iter(names), None)
            hint = f", such as {close}" if close else ""
            raise ConfigError(
                f"{argument}={pattern} matches no parameter: it is compared with whole names{hint}"
            )
    return [name for name in names if fits(name, patterns)]
