"""The names of keys in messages.

The library's messages name its arguments (`chunks=3`); who runs the command line has set a key
(`pipeline.chunks=3`), and reads that (`errors_with_config_keys`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields

from hybridtrain.cli.config.schema import LOADER_KEYS, groups, taken
from hybridtrain.errors import QUOTE_OR_ARGUMENT, DataError, closest, reworded_errors
from hybridtrain.options import OTHER_NAMES as ARGUMENTS
from hybridtrain.options import TrainerOptions

KEYS: dict[str, str] = {
    **{name: f"data.{name}" for name in LOADER_KEYS},
    **{argument: f"{group}.{key}" for argument, group, key in taken(TrainerOptions)},
    **{
        setting.name: f"{group}.{setting.name}"
        for group, schema in groups().items()
        if group not in ("submit", "search", "hardware")  # no arguments of the library
        for setting in fields(schema)  # type: ignore[arg-type]
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


def with_config_keys(message: str, keys: Mapping[str, str] = KEYS) -> str:
    """Returns `message` with `chunks=` as `pipeline.chunks=`, and `None` as YAML's `null`.

    Where the library says to start a new run, the command line says how.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in keys:
            return match[0]
        value = "null" if match[2] == "None" else match[2].lower()
        return f"{keys[match[1]]}={value}"

    message = QUOTE_OR_ARGUMENT.sub(replaced, message)
    return re.sub("or start a new run( in another directory)?", "or set another run_name", message)


def errors_with_config_keys(keys: Mapping[str, str] = KEYS) -> AbstractContextManager[None]:
    """Applies `with_config_keys` to an error that is raised inside, and to every error's notes."""

    def reword(message: str, error: Exception) -> str:
        is_of_data = keys is KEYS and isinstance(error, DataError)
        return with_config_keys(message, _KEYS_OF_DATA if is_of_data else keys)

    return reworded_errors(reword)


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Returns the message for a key that does not exist."""
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    meant = OTHER_NAMES.get(leaf)
    if meant not in known:
        meant = siblings.get(closest(leaf, siblings) or "")
    if meant is None:  # the right key in the wrong group, or a typo in the group
        elsewhere = (k for k in known if k.rpartition(".")[2] == leaf)
        meant = next(elsewhere, None) or closest(key, known, cutoff=0.8)
    if meant is not None:
        return f"{key}: unknown key; did you mean {meant}?"
    return f"{key}: unknown key; the choices are: {', '.join(siblings.values() or known)}"
