"""The name of a run: what a file system takes, the default, and the run that a command is about."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from hybridtrain.cli.config.overrides import given_keys
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
