"""The names of keys in messages.

In the messages of a command, `NAMING` replaces the library's argument (`chunks=3`) by the config
key (`pipeline.chunks=3`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hybridtrain.cli.config.schema import LOADER_KEYS, groups, taken
from hybridtrain.errors import Naming, closest
from hybridtrain.options import OTHER_NAMES as ARGUMENTS
from hybridtrain.options import TrainerOptions

KEYS: dict[str, str] = {
    **{name: f"data.{name}" for name in LOADER_KEYS},
    **{argument: f"{group}.{key}" for argument, group, key in taken(TrainerOptions)},
    **{
        setting.name: f"{group}.{setting.name}"
        for group, schema in groups().items()
        if group not in ("submit", "search", "hardware")  # not arguments of the library
        for setting in fields(schema)  # type: ignore[arg-type]
    },
}
"""The config key of every argument. `timeout_s` means `world.timeout_s`."""


def _yaml(name: str, value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


NAMING = Naming(
    {
        **KEYS,
        "loader.timeout_s": "data.timeout_s",
        "lora.modules_to_save": "model.lora.modules_to_save",
        "quantize": "model.quantize",
        "loss_fn": "trainer.loss",
    },
    value=_yaml,
    phrases={
        "start a new run": "set another run_name",
        "start a new run in another directory": "set another run_name",
        "pass strict=False": "set 'init_from={{path: {source}, strict: false}}'",
        "pass keep= to quantize": "set 'model.quantize={{kind: {kind}, keep: [{keep}]}}'",
        "pass prefix=": "set 'init_from={{path: {source}, prefix: {prefix}}}'",
    },
)
"""The names of the library's arguments on the command line."""

# Names that other libraries use for keys of this one.
OTHER_NAMES = {
    **{name: KEYS[argument] for name, argument in ARGUMENTS.items() if argument in KEYS},
    **dict.fromkeys(["learning_rate", "base_lr"], "optim.lr"),
    **dict.fromkeys(["resume_from_checkpoint", "ckpt_path"], "resume"),
}


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
