"""Exceptions for mistakes in a user's request.

Each package raises its own type where the fact is known. The message says what is wrong, which
argument, layer or file it concerns, and how to fix it. The command line prints it without a
traceback. Every other exception is a bug, and keeps its traceback.

A message names an argument through `argument` or `setting`, since users set it in different ways:
in Python (`chunks=`), on the command line (`pipeline.chunks=`) or in smp (`microbatches=`).
`naming` says which, for all threads of this process.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


class UserError(Exception):
    """A mistake in a user's request, reported in one message that says how to fix it.

    Attributes:
        exit_code: of the command line, when this error ends it.
        copy_of: the `Problem` of the process that has found the mistake and reports it; None: it is
            this process.
    """

    exit_code = 2
    copy_of: object = None


class ConfigError(UserError):
    """A config key, an override or a recipe is wrong."""


class WorldError(UserError):
    """The processes, devices or backend asked for are not there."""


class OtherProcessError(RuntimeError):
    """Another process has failed, other than by a `UserError`; the message has its error."""

    copy_of: object = None


class ProcessFailedError(RuntimeError):
    """A process that `notebook_launcher` has started has failed; the message has its traceback."""


class SplitError(UserError):
    """The model cannot be cut into the stages asked for."""


class ScheduleError(UserError):
    """A schedule is unknown, or breaks a rule that every schedule must keep."""


class BatchError(UserError):
    """A batch cannot be split into micro-batches, or its parts do not fit together."""


class DataError(UserError):
    """A data set is missing, damaged or not in the expected format."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""


class NotExactError(UserError):
    """A pipeline computes other numbers than the module that it was made of."""

    exit_code = 1


class DivergedError(UserError):
    """Losses, gradients or weights are not finite, so that training on is of no use."""

    exit_code = 3


class Interrupted(UserError):
    """Training has stopped and saved, because of a signal or a time limit; it can be resumed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the same command, called again, goes on


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that `name` is most probably a typo of, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises a ConfigError that names the argument, if `value` is not one of `choices`."""
    choices = list(choices)
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"{setting(name, value)} is unknown: {hint}")


def did_you_mean(name: str, known: Iterable[str], kind: str = "choices") -> str:
    """Returns "did you mean 'x'?", or a list of the known names if none is close."""
    known = list(known)
    close = closest(name, known)
    return f"did you mean {close!r}?" if close else f"the {kind} are: {', '.join(known)}"


@dataclass(frozen=True)
class Naming:
    """The names of the library's arguments in one interface.

    Attributes:
        keys: the names that users know arguments by; an argument without one keeps its own.
        value: writes the value of an argument, given the argument and the value.
        phrases: what users of this interface do instead, by what users of Python do.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    value: Callable[[str, object], str] = lambda _, value: str(value)
    phrases: Mapping[str, str] = field(default_factory=dict)


_naming = Naming()  # not a context variable: engines and loaders write messages in their threads


@contextmanager
def naming(names: Naming | Mapping[str, str]) -> Iterator[None]:
    """Has messages that are written inside name arguments as `names` does.

    Args:
        names: the names of an interface, or keys that are added to those in effect.
    """
    global _naming
    outer = _naming
    if not isinstance(names, Naming):
        names = replace(outer, keys={**outer.keys, **names})
    _naming = names
    try:
        yield
    finally:
        _naming = outer


def argument(name: str, owner: str | None = None) -> str:
    """Returns an argument as its user sets it: `chunks=`, or `pipeline.chunks=` in a config.

    Args:
        name: of the argument.
        owner: who takes it, where several take arguments of that name, which have other keys.
    """
    key = _naming.keys.get(f"{owner}.{name}") or _naming.keys.get(name, name)
    return f"{key}="


def setting(name: str, value: object, form: Callable[[object], str] = str) -> str:
    """Returns an argument with its value: `keep=None`, or `checkpoint.keep=null` in a config.

    Args:
        name: as for `argument`.
        value: of the argument.
        form: writes a value that is a text or a number; `repr` puts texts in quotes.
    """
    is_word = form is str or value is None or isinstance(value, bool)
    return f"{argument(name)}{_naming.value(name, value) if is_word else form(value)}"


def phrase(text: str) -> str:
    """Returns what users of the interface in use do, where users of Python do `text`."""
    return _naming.phrases.get(text, text)
