"""The name of a run: valid folder names, the default, and the run of a command."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from hybridtrain.cli.config.names import plain
from hybridtrain.cli.config.overrides import given_keys
from hybridtrain.cli.config.schema import Config
from hybridtrain.errors import ConfigError

# The overrides that select a command's run, and the overrides that require a composition.
_NAMING = ("recipe", "run_name", "output_dir", "resume", "allow_targets", "push_to", "output")

LONGEST_NAME = 255
"""The maximum length of a file name in bytes, on nearly every file system."""


def check_run_name(run_name: str) -> None:
    """Checks that the name of a run is a valid folder name.

    Raises:
        ConfigError: it is not.
    """
    names = run_name.split("/")
    if len(names) > 2 or any(not name or name != name.strip(". ") for name in names):
        raise ConfigError(
            f"run_name={run_name!r} must be the name of a folder (in output_dir=), or group/name"
        )
    if not run_name.isprintable():
        raise ConfigError(
            f"run_name={run_name!r} has a control or invisible character: set another name"
        )
    longest = max(len(os.fsencode(name)) for name in names)
    if longest > LONGEST_NAME:
        raise ConfigError(
            f"run_name={run_name[:40]}... has a folder name of {longest} bytes, but file systems "
            f"allow {LONGEST_NAME}: set a shorter name"
        )


def shortened(name: str, longest: int = 140) -> str:
    """Returns a folder name, with its end replaced by a digest if it has too many bytes.

    Args:
        name: a generated name, which the user cannot shorten.
        longest: the limit in bytes. Encrypted home folders allow 143, other file systems 255.
    """
    encoded = os.fsencode(name)
    if len(encoded) <= longest:
        return name
    start = encoded[: longest - 9].decode(errors="ignore").rstrip("-_. ")
    return with_digest(start, name)


def with_digest(name: str, text: str) -> str:
    """Returns a folder name that ends in a digest of `text`, of 9 characters."""
    digest = hashlib.blake2b(os.fsencode(text), digest_size=4).hexdigest()
    return f"{name}-{digest}"


def default_run_name(recipe: str | None) -> str:
    """Returns the default name of a run of `recipe`: `recs/a/base.yaml` becomes `recs-a-base`.

    A path below the working directory is relative to it; any other path is absolute.
    """
    if recipe is None:
        return "run"
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        return shortened(plain(recipe.replace("/", "-")))
    full, here = path.resolve(), Path.cwd().resolve()
    relative = full.relative_to(here) if full.is_relative_to(here) else full.relative_to("/")
    return shortened(plain("-".join(relative.with_suffix("").parts)))


def naming_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that select a command's run."""
    keys = given_keys(overrides)
    naming = [key in _NAMING or key.startswith("hydra.") for key in keys]
    return list(compress(overrides, naming))


def name_run(command: str, config: Config, keys: Sequence[str]) -> None:
    """Selects the run of the checkpoint in `resume` for a command without a run of its own.

    Args:
        command: such as evaluate.
        config: the config; this sets its `run_name` and `output_dir`.
        keys: the keys on the command line.
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
