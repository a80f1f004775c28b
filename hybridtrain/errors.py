"""Exceptions for mistakes in a user's request.

Each package raises its own type where the fact is known. The message says what is wrong, which
argument, layer or file it concerns, and how to fix it. Messages name arguments as Python has them
(`chunks=`); the command line puts the config key in their place (`pipeline.chunks=`) and prints the
message without a traceback. Every other exception is a bug, and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


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
        raise ConfigError(f"{name}={value} is unknown: {did_you_mean(str(value), choices)}")


def did_you_mean(name: str, known: Iterable[str], kind: str = "choices") -> str:
    """Returns "did you mean 'x'?", or a list of the known names if none is close."""
    known = list(known)
    close = closest(name, known)
    return f"did you mean {close!r}?" if close else f"the {kind} are: {', '.join(known)}"


QUOTE_OR_ARGUMENT = re.compile(
    r"""(?<!\w)(?:'[^'\n]*'|"[^"\n]*")(?!\w)|(?<![\w.\-/?&])(\w+)=(?!=)(None\b|True\b|False\b|)"""
)
"""A quoted text, or `name=` that is not a part of a dotted name, a path or a comparison."""


@contextmanager
def reworded_errors(reword: Callable[[str, Exception], str]) -> Iterator[None]:
    """Applies `reword` to a UserError that is raised inside, and to every error's notes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            error.args = (reword(str(error), error),)
        if hasattr(error, "__notes__"):
            error.__notes__ = [reword(note, error) for note in error.__notes__]
        raise
