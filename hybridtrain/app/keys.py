"""Config keys in the place of argument names, in the messages of errors.

The library speaks of its arguments (`chunks=3`); who runs the command line has set a key
(`pipeline.chunks=3`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hybridtrain.app.config import LOADER_KEYS, Config
from hybridtrain.errors import DataError, UserError
from hybridtrain.options import OTHER_NAMES as ARGUMENTS

KEYS: dict[str, str] = {
    **{name: f"data.{name}" for name in LOADER_KEYS},
    "checkpoint_every": "checkpoint.every_steps",
    "checkpoint_every_minutes": "checkpoint.every_minutes",
    "checkpoint_every_epochs": "checkpoint.every_epochs",
    **{
        setting.name: f"{group}.{setting.name}"
        for group, schema in get_type_hints(Config).items()
        if is_dataclass(schema) and group != "submit"  # no arguments of the library
        for setting in fields(schema)
    },
}
"""The config key of every argument. `timeout_s` is the world's."""

_KEYS_OF_DATA = {**KEYS, "timeout_s": "data.timeout_s"}
"""The same for errors of the data, whose `timeout_s` is the loader's."""

# Well-known names of other libraries, for settings that have another one here.
OTHER_NAMES = {
    **{name: KEYS[argument] for name, argument in ARGUMENTS.items() if argument in KEYS},
    **dict.fromkeys(["learning_rate", "base_lr"], "optim.lr"),
    **dict.fromkeys(["resume_from_checkpoint", "ckpt_path"], "resume"),
}

# A quoted text, or `name=` that is not a part of a dotted name, a path or a comparison.
_QUOTE_OR_ARGUMENT = re.compile(
    r"""(?<!\w)(?:'[^'\n]*'|"[^"\n]*")(?!\w)|(?<![\w.\-/?&])(\w+)=(?!=)(None\b|True\b|False\b|)"""
)


def with_config_keys(message: str, keys: Mapping[str, str] = KEYS) -> str:
    """Returns `message` with `chunks=` as `pipeline.chunks=`, and `None` as YAML's `null`.

    Where the library says to start a new run, the command line says how.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in keys:
            return match[0]
        value = "null" if match[2] == "None" else match[2].lower()
        return f"{keys[match[1]]}={value}"

    message = _QUOTE_OR_ARGUMENT.sub(replaced, message)
    return re.sub("or start a new run( in another directory)?", "or set another run_name", message)


@contextmanager
def errors_with_config_keys(keys: Mapping[str, str] = KEYS) -> Iterator[None]:
    """Applies `with_config_keys` to an error that is raised inside, and to every error's notes."""
    try:
        yield
    except Exception as error:
        if keys is KEYS and isinstance(error, DataError):
            keys = _KEYS_OF_DATA
        if isinstance(error, UserError):
            error.args = (with_config_keys(str(error), keys),)
        if hasattr(error, "__notes__"):
            error.__notes__ = [with_config_keys(note, keys) for note in error.__notes__]
        raise
