"""The name of a run: what a file system takes, the default, and the run that a command is about."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import compress
from pathlib import Path

from hybridtrain.cli.config.overrides import given_keys, parse_overrides, with_texts
from hybridtrain.cli.config.schema import Config
from hybridtrain.errors import ConfigError

# The overrides that say which run a command is about, and those that a composition asks for.
_NAMING = ("recipe", "run_name", "output_dir", "resume", "allow_targets", "push_to", "output")

LONGEST_NAME = 255
"""The bytes that the name of a file has at most, on nearly every file system."""


def check_run_name(run_name: str) -> None:
    """Checks that a file system takes the name of a run.

    Raises:
        ConfigError: it does not.
    """
    names = run_name.split("/")
    if len(names) > 2 or any(not name or name != name.strip(". ") for name in names):
        raise ConfigError(
            f"run_name={run_name!r} must be the name of a folder in the one of output_dir=, "
            f"or group/name"
        )
    if not run_name.isprintable():
        raise ConfigError(
            f"run_name={run_name!r} has a control character or an invisible one: set another name"
        )
    longest = max(len(os.fsencode(name)) for name in names)
    if longest > LONGEST_NAME:
        raise ConfigError(
            f"run_name={run_name[:40]}... has {longest} bytes in the name of a folder, and a file "
            f"system takes {LONGEST_NAME}: set a shorter one"
        )


def shortened(name: str, longest: int = 140) -> str:
    """Returns a name of a folder, with its end replaced by a digest if it has too many bytes.

    Args:
        name: made from other names or values, so that no user has to shorten it.
        longest: bytes. Encrypted home folders take 143, other file systems 255.
    """
    encoded = os.fsencode(name)
    if len(encoded) <= longest:
        return name
    digest = hashlib.blake2b(encoded, digest_size=4).hexdigest()
    start = encoded[: longest - len(digest) - 1].decode(errors="ignore").rstrip("-_. ")
    return f"{start}-{digest}"


def default_run_name(recipe: str | None) -> str:
    """Returns the name of a run of `recipe` that has no other: `recs/a/base.yaml` is `recs-a-base`.

    A path below the working directory is taken from there, any other from the root.
    """
    if recipe is None:
        return "run"
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        return shortened(recipe.replace("/", "-"))
    full, here = path.resolve(), Path.cwd().resolve()
    relative = full.relative_to(here) if full.is_relative_to(here) else full.relative_to("/")
    return shortened("-".join(relative.with_suffix("").parts))


def naming_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns those overrides that say which run a command is about."""
    keys = given_keys(overrides)
    naming = [key in _NAMING or key.startswith("hydra.") for key in keys]
    return list(compress(overrides, naming))


def literal_names(overrides: Sequence[str]) -> Config | None:
    """Returns a config with the `run_name`, `output_dir` and `resume` of a command.

    None: they must be composed, since a recipe may set them, or a value is not plain text.
    """
    names = {field.name for field in fields(Config)} - {"recipe"}
    if any(key.partition(".")[0] not in names for key in given_keys(overrides)):
        return None
    config = Config(run_name=default_run_name(None))
    for override in parse_overrides(with_texts(naming_overrides(overrides))):
        key, value = override.key_or_group, override.value()
        if key not in ("run_name", "output_dir", "resume"):
            continue
        if not isinstance(value, str) or "${" in value or override.is_delete():
            return None
        setattr(config, key, value)
    return config


def name_run(command: str, config: Config, keys: Sequence[str]) -> None:
    """Makes the run of the checkpoint that `resume` names the run of a command that names no other.

    Args:
        command: such as evaluate.
        config: whose `run_name` and `output_dir` are set.
        keys: of the command line.
    """
    if command not in ("evaluate", "predict", "export") or {"recipe", "run_name"} & set(keys):
        return
    if config.resume in (None, "auto", "last", "best"):
        return
    folder = Path(str(config.resume))
    for run in (folder, folder.parent, folder.parent.parent):
        if (run / "config.yaml").is_file() and (run / "checkpoints").is_dir():
            config.run_name, config.output_dir = run.name, str(run.parent)
            return
