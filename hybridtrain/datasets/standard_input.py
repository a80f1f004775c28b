"""Samples on standard input, for the command `predict`: `predict_path=-`."""

from __future__ import annotations

import sys

from hybridtrain.errors import DataError, argument

STANDARD_INPUT = "-"
"""The path that stands for standard input."""


def read_lines(key: str, content: str) -> list[str]:
    """Returns the lines of standard input that are not blank, without their line ends.

    Args:
        key: the option that selects standard input, for messages.
        content: the content of a line, for messages.

    Raises:
        DataError: there are no lines, they are not UTF-8, or standard input is a terminal.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError(
            f"{argument(key)}- reads standard input, but that is a terminal: pipe {content} per "
            f"line to the command, or set {argument(key)} to a file"
        )
    try:
        # a pipe from Windows may begin with a byte order mark
        lines = sys.stdin.read().removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{argument(key)}-: standard input is not UTF-8 ({error}): convert it"
        ) from error
    lines = [line.rstrip("\r") for line in lines if line.strip()]
    if not lines:
        raise DataError(
            f"{argument(key)}-: standard input is empty; it must have {content} per line"
        )
    return lines
