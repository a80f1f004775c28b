"""The lines of a check: a part is ok, a problem, or not checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridtrain._base.text_table import counted, printable
from hybridtrain.errors import UserError
from hybridtrain.launch import in_one_line


@dataclass(frozen=True)
class Part:
    """The result of a part of the check.

    Attributes:
        name: its name.
        value: its result, for later parts; None: it has a problem or was not checked.
    """

    name: str
    value: Any = None


class NotCheckedError(Exception):
    """A part cannot be checked from here; the message says why."""


class Report:
    """Prints the lines of a check and counts the problems."""

    def __init__(self) -> None:
        self._problems = self._unchecked = 0

    def part(self, name: str, check: Callable[..., tuple[str, Any]], *needs: Part) -> Part:
        """Runs a part, and prints its line.

        Args:
            name: its name.
            check: takes the values of `needs`; returns its findings as text, and a value.
            *needs: earlier parts; the part is not checked if one of them has no value.
        """
        lacking = [need.name for need in needs if need.value is None]
        try:
            if lacking:
                raise NotCheckedError(f"depends on: {', '.join(lacking)}")
            text, value = check(*(need.value for need in needs))
        except NotCheckedError as reason:
            self._unchecked += 1
            self._line(name, "not checked", str(reason))
            return Part(name)
        except Exception as error:  # also from the user's code
            self.problem(name, error)
            return Part(name)
        self._line(name, "ok", text)
        return Part(name, value)

    def problem(self, name: str, error: Exception) -> None:
        """Prints a problem of a part."""
        self._problems += 1
        self._line(name, "problem", in_one_line(error))

    def end(self) -> int:
        """Prints the verdict; returns the exit code."""
        verdict = counted(self._problems, "problem") if self._problems else "no problems found"
        not_checked = f", {counted(self._unchecked, 'part')} not checked" * bool(self._unchecked)
        print(f"{verdict}{not_checked}", flush=True)
        return UserError.exit_code if self._problems else 0

    def _line(self, name: str, verdict: str, text: str) -> None:
        print(
            printable(f"{name:<13}  {verdict:<11}  {' '.join(text.split())}").rstrip(), flush=True
        )
