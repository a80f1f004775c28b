"""An error of one process, as the other processes are told of it: all of them raise the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridtrain.errors import OtherProcessError, UserError


@dataclass(frozen=True)
class Problem:
    """An exception of one process, in a form that can be sent to the others.

    Attributes:
        rank: of the process.
        kind: the type of a `UserError`; None for any other exception.
        message: of the exception, with its type if that is not sent.
    """

    rank: int
    kind: type[UserError] | None
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Problem:
        """Returns the problem that `error` on `rank` is, or the one that it is a copy of."""
        if (original := copied_problem(error)) is not None:
            return original
        for kind in type(error).__mro__:
            # a type of the user's own may not be there in the other processes
            if issubclass(kind, UserError) and kind.__module__.startswith("hybridtrain."):
                return cls(rank, kind, str(error))
        return cls(rank, None, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Returns the exception for the other processes: a copy, of the same type if it can be."""
        copy: UserError | OtherProcessError
        if self.kind is None:
            copy = OtherProcessError(f"rank {self.rank} failed: {self.message}")
        else:  # a mistake that rank 0 finds is the run's; another rank's may be its host's
            copy = self.kind(f"rank {self.rank}: {self.message}" if self.rank else self.message)
        copy.copy_of = self
        return copy


def first_problem(problems: Iterable[Problem | None]) -> Problem | None:
    """Returns the problem of the lowest rank, which all processes raise."""
    return min(filter(None, problems), key=lambda problem: problem.rank, default=None)


def copied_problem(error: BaseException) -> Problem | None:
    """Returns what `error` is a copy of; None if it happened in this process."""
    copy_of = getattr(error, "copy_of", None)
    return copy_of if isinstance(copy_of, Problem) else None
