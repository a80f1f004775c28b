"""Exceptions for mistakes in a user's request.

Each package raises its own type where it detects the mistake. The message says what is wrong, which
argument, layer or file is affected, and how to fix it. The command line prints it without a
traceback. Any other exception is a bug and keeps its traceback.

Messages name arguments through `argument` and `setting`, because users set them in different ways:
in Python (`chunks=`), on the command line (`pipeline.chunks=`) or in smp (`microbatches=`).
`naming` selects the form, for all threads of this process.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


class UserError(Exception):
    """A mistake in a user's request, reported in one message that says how to fix it.

    Attributes:
        exit_code: the exit code of the command line when this error ends it.
        copy_of: the `Problem` of the process that detected the mistake; None in that process.
    """

    exit_code = 2
    copy_of: object = None


class ConfigError(UserError):
    """A config key, an override or a recipe is wrong."""


class WorldError(UserError):
    """The requested processes, devices or backend are not available."""


class OtherProcessError(RuntimeError):
    """Another process failed with an error other than a `UserError`; the message includes it."""

    copy_of: object = None


class ProcessFailedError(RuntimeError):
    """A process started by `notebook_launcher` failed; the message includes its traceback."""


class SplitError(UserError):
    """The model cannot be split into the requested stages."""


class ScheduleError(UserError):
    """A schedule is unknown, or violates a rule for all schedules."""


class BatchError(UserError):
    """A batch cannot be split into micro-batches, or its tensors do not match."""


class DataError(UserError):
    """A data set is missing, damaged or not in the expected format."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not match the model."""


class NotExactError(UserError):
    """A pipeline's results differ from the unsplit module's."""

    exit_code = 1


class DivergedError(UserError):
    """Losses, gradients or weights are not finite, so training cannot continue."""

    exit_code = 3


class Interrupted(UserError):
    """Training saved and stopped because of a signal or a time limit; it can be resumed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: rerun the same command to resume


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the closest known name to a possible typo `name`, in any case, or None."""
    by_lower = {text.lower(): text for text in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises a ConfigError that names the argument if `value` is not one of `choices`."""
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
    """The names that one interface uses for the library's arguments.

    Attributes:
        keys: the interface's name of each argument; an argument without an entry keeps its own.
        value: formats the value of an argument, given the argument and the value.
        phrases: this interface's equivalent of a Python user's action, by the Python phrase.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    value: Callable[[str, object], str] = lambda _, value: str(value)
    phrases: Mapping[str, str] = field(default_factory=dict)


_naming = Naming()  # not a context variable: engines and loaders create messages in their threads


@contextmanager
def naming(names: Naming | Mapping[str, str]) -> Iterator[None]:
    """Makes messages created inside the block use the argument names of `names`.

    Args:
        names: the names of an interface, or keys to add to the current ones.
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
        name: the argument.
        owner: the object that takes it, if several take an argument of this name.
    """
    key = _naming.keys.get(f"{owner}.{name}") or _naming.keys.get(name, name)
    return f"{key}="


def setting(name: str, value: object, form: Callable[[object], str] = str) -> str:
    """Returns an argument with its value: `keep=None`, or `checkpoint.keep=null` in a config.

    Args:
        name: the argument.
        value: its value.
        form: formats a string or a number; `repr` adds quotes to strings.
    """
    is_word = form is str or value is None or isinstance(value, bool)
    return f"{argument(name)}{_naming.value(name, value) if is_word else form(value)}"


def phrase(text: str, **values: object) -> str:
    """Returns the current interface's equivalent of `text`, an action of a Python user.

    Args:
        text: the Python phrase, a key of `Naming.phrases`.
        values: what the equivalent formats, as in `{source}`.
    """
    equivalent = _naming.phrases.get(text)
    return text if equivalent is None else equivalent.format(**values)
