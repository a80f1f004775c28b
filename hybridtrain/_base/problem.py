"""An error of one process, sent to the other processes so that all raise the same error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridtrain.errors import OtherProcessError, UserError


@dataclass(frozen=True)
class Problem:
    """An exception of one process, in a form that can be sent to the others.

    Attributes:
        rank: the rank of the process.
        kind: the type of a `UserError`; None for any other exception.
        message: the exception's message, including its type if `kind` is None.
    """

    rank: int
    kind: type[UserError] | None
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Problem:
        """Returns the problem for `error` on `rank`; for a copied error, the original problem."""
        # An error that has been through one agreement must keep its rank in the next.
        if (original := copied_problem(error)) is not None:
            return original
        for kind in type(error).__mro__:
            # the other processes may not have a user-defined type
            if issubclass(kind, UserError) and kind.__module__.startswith("hybridtrain."):
                return cls(rank, kind, str(error))
        return cls(rank, None, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Returns the exception for the other processes: a copy, of the same type if possible."""
        copy: UserError | OtherProcessError
        if self.kind is None:
            copy = OtherProcessError(f"rank {self.rank} failed: {self.message}")
        # an error on rank 0 concerns the whole run; an error on another rank may be specific to its
        # host
        else:
            copy = self.kind(f"rank {self.rank}: {self.message}" if self.rank else self.message)
        copy.copy_of = self
        return copy


def first_problem(problems: Iterable[Problem | None]) -> Problem | None:
    """Returns the problem of the lowest rank, which all processes raise."""
    # Deterministic, so that all processes raise the same one.
    return min(filter(None, problems), key=lambda problem: problem.rank, default=None)


def copied_problem(error: BaseException) -> Problem | None:
    """Returns the problem that `error` is a copy of; None if it was raised in this process."""
    copy_of = getattr(error, "copy_of", None)
    return copy_of if isinstance(copy_of, Problem) else None
