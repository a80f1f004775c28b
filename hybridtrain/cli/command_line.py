"""The command line: `python -m hybridtrain [command] [overrides...]`.

Hydra parses the overrides and the flags that show a config. A run does not use `hydra.main`: with
it, all ranks would write the same log and `.hydra` folder, and a restarted run would get a new
directory.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from hybridtrain._base.text_table import counted
from hybridtrain.cli.command_table import COMMANDS, FLAGS, check_keys
from hybridtrain.cli.commands.help import help_of, overview
from hybridtrain.cli.config.compose import CONFIG_MODULE, compose_config, compose_settings
from hybridtrain.cli.config.keys import KEYS, NAMING, OTHER_NAMES
from hybridtrain.cli.config.option_files import recipe_names, register, register_file
from hybridtrain.cli.config.overrides import given_keys
from hybridtrain.cli.config.project import with_project
from hybridtrain.cli.config.resolve import Settings, resolve_settings
from hybridtrain.cli.config.show import config_text
from hybridtrain.cli.run.errors import STDOUT_S, lasting_streams, report, versions
from hybridtrain.errors import ConfigError, closest, did_you_mean, naming
from hybridtrain.launch import detect, end_with_parent, say


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    if argv is None:  # called by the console script, not by a test or a program
        gc.disable()  # until the command is imported, see `_loaded`
    arguments = list(sys.argv[1:] if argv is None else argv)
    with lasting_streams() as stdout:
        try:
            end_with_parent()
            _check_working_directory()
            code = _dispatch(arguments)
        except (Exception, KeyboardInterrupt) as error:
            return report(error)
        if stdout.dropped:  # else a reader would take a part for the whole
            missing = counted(stdout.dropped, "character")
            say(f"error: nobody read stdout for {STDOUT_S:g} s, and it lacks {missing}")
            return code or 1
        return code


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working directory no longer exists: change to another one (cd), and run the "
            "command again"
        ) from None


def _dispatch(arguments: list[str]) -> int:
    if "--version" in arguments:
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        return 0
    if not arguments or (arguments[0] in COMMANDS and {"--help", "-h"} & set(arguments)):
        return _print_on_main(help_of(arguments[0]) if arguments else overview())
    if arguments[0] in COMMANDS and COMMANDS[arguments[0]].takes == "words":
        code: int = _loaded(arguments[0])(arguments[1:])
        return code
    dry_run, quiet = "--dry-run" in arguments, bool({"--quiet", "-q"} & set(arguments))
    checks = "--check" in arguments
    own_flags = ("--dry-run", "--quiet", "-q", "--check")
    arguments = [word for word in arguments if word not in own_flags]
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    _refuse_dashes(arguments, parser)
    parsed = parser.parse_intermixed_args(arguments)
    shows_hydras = parsed.cfg in ("hydra", "all") or parsed.info or parsed.hydra_help
    command, overrides = _command(parsed.overrides)
    if parsed.help:
        return _print_on_main(help_of(command) if command in parsed.overrides else overview())
    if shows_hydras or parsed.shell_completion:
        if parsed.info or parsed.cfg:
            compose_config(overrides, parsed.config_dir)  # raises one-line errors
        flags = [word for word in arguments if word not in parsed.overrides]
        if parsed.help or parsed.hydra_help:
            # Hydra would set up the config's logging, with objects that a recipe may name
            overrides.append("hydra.hydra_logging.root=null")
        return _show([*overrides, *flags])
    _refuse_what_has_no_effect(parsed, overrides)
    _refuse_flags(command, parsed.multirun, dry_run, quiet, checks)
    if COMMANDS[command].takes == "words":
        raise ConfigError(
            f"{command} must be the first word and takes no overrides: hybridtrain {command} "
            f"{COMMANDS[command].usage}".rstrip()
        )
    check_keys(command, given_keys(overrides), by_hand=detect(os.environ).launcher == "single")
    if any("hydra.searchpath" in override for override in overrides):
        _make_working_directory_importable()  # for pkg://my_project.conf
    overrides, config_dir = with_project(command, overrides, parsed.config_dir)
    if parsed.cfg and parsed.multirun:
        raise ConfigError(
            "--cfg job shows one config, but --multirun makes several: remove one of them"
        )
    if parsed.cfg:
        composed = compose_settings(overrides, config_dir)
        return _print_on_main(config_text(composed, parsed.resolve, parsed.package))
    if COMMANDS[command].takes == "overrides":
        flags_given = {"--multirun": parsed.multirun, "--dry-run": dry_run, "--check": checks}
        return _run_on_overrides(command, overrides, config_dir, flags_given)
    if parsed.multirun:
        from hybridtrain.cli.run.sweep import run_sweep

        return run_sweep(command, overrides, config_dir, run)
    if dry_run:
        from hybridtrain.cli.run.dry_run import run_dry

        return run_dry(overrides, config_dir, run)
    run(command, resolve_settings(command, overrides, config_dir), quiet)
    return 0


def _loaded(command: str) -> Callable[..., Any]:
    """Imports the function of a command, and torch, which takes seconds.

    Modules live until the process ends, so the garbage collector skips their million objects during
    the import, where it would take a fifth of the time, and afterwards.
    """
    function = COMMANDS[command].load()
    if not gc.isenabled():
        gc.freeze()
        # or Triton, whose bindings look at exit for objects that live, prints 30 lines about them
        atexit.register(gc.unfreeze)
        gc.enable()
    return function


def _refuse_dashes(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Rejects a key that is written as a flag, such as --lr=1e-3."""
    flags = list(parser._option_string_actions)
    for number, word in enumerate(words):
        flag, sign, value = word.partition("=")
        if not re.match("--?[A-Za-z]", word) or flag in flags:
            continue
        if word.startswith("--") and any(known.startswith(flag) for known in flags):
            continue  # argparse takes the beginning of a flag for the flag
        name = flag.lstrip("-").replace("-", "_")
        if close := closest(flag, FLAGS, cutoff=0.8):
            raise ConfigError(f"there is no flag {flag}: did you mean {close}?")
        if not sign and number + 1 < len(words) and "=" not in words[number + 1]:
            value = words[number + 1]
        key = {**KEYS, **OTHER_NAMES, "lr": "optim.lr"}.get(name, name)
        raise ConfigError(f"{word}: keys have no dashes: {key}={value}")


def _print_on_main(text: str) -> int:
    """Prints on rank 0; returns the exit code."""
    if detect(os.environ).rank == 0:
        print(text)
    return 0


def _refuse_flags(command: str, multirun: bool, dry_run: bool, quiet: bool, checks: bool) -> None:
    """Rejects flags that a command does not support."""
    flags = {"--multirun": multirun, "--dry-run": dry_run, "--quiet": quiet, "--check": checks}
    for flag in compress(flags, flags.values()):
        if flag not in COMMANDS[command].flags:
            goes_with = [name for name, entry in COMMANDS.items() if flag in entry.flags]
            raise ConfigError(f"{flag} works with {', '.join(goes_with)}, not with {command}")
    if dry_run and multirun and command == "train":
        raise ConfigError("--dry-run works with a single run, not with a sweep (--multirun)")


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command, at any position in `words`, and the overrides."""
    commands = [word for word in words if re.fullmatch(r"[A-Za-z][\w-]*", word)]
    for word in commands:
        if word not in COMMANDS:
            raise ConfigError(
                f"there is no command {word!r}: {_meant(word, len(commands) > 1)} "
                f"(overrides have the form key=value)"
            )
    if len(commands) > 1:
        raise ConfigError(f"give only one command, not {' and '.join(commands)}")
    overrides = [word for word in words if word not in commands]
    return (commands or ["train"])[0], overrides


def _meant(word: str, has_command: bool) -> str:
    """Returns a suggestion for a word that is not a command: a run, a recipe or a command."""
    keys = {
        "run_name": (Path("outputs") / word / "config.yaml").is_file(),
        "recipe": word in recipe_names(),
    }
    order = ("run_name", "recipe") if has_command else ("recipe", "run_name")
    key = next((key for key in order if keys[key]), None)
    return f"did you mean {key}={word}?" if key else did_you_mean(word, COMMANDS, "commands")


def _refuse_what_has_no_effect(parsed: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Rejects Hydra's flags and settings that have no effect on a run here."""
    instead = {
        "config_path": "--config-dir adds a folder of groups, recipe=<file> reads a file",
        "config_name": "recipe=<file> reads a whole config",
        "experimental_rerun": "recipe=outputs/<run_name>/config.yaml repeats a run",
    }
    for flag, advice in instead.items():
        if getattr(parsed, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect here: {advice}")
    for flag in ("package", "resolve"):
        if getattr(parsed, flag) and not parsed.cfg:
            raise ConfigError(f"--{flag} works only with --cfg job")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.startswith(("hydra.", "hydra/")) and key != "hydra.searchpath":
            raise ConfigError(
                f"{override}: {key} has no effect here; of Hydra's own settings, only "
                f"hydra.searchpath does. output_dir= and run_name= set the run directory"
            )


def _run_on_overrides(
    command: str, overrides: Sequence[str], config_dir: str | None, flags: Mapping[str, bool]
) -> int:
    """Runs a command that takes overrides, with its flags in `flags`; returns its exit code."""
    if "allow_targets" in given_keys(overrides):
        _make_working_directory_importable()
    with naming(NAMING):
        function = _loaded(command)
        arguments = {
            flag.lstrip("-").replace("-", "_"): is_given
            for flag, is_given in flags.items()
            if flag in COMMANDS[command].flags
        }
        code: int = function(overrides, config_dir, **arguments)
    return code


def run(command: str, settings: Settings, quiet: bool = False) -> dict[str, Any]:
    """Runs a command with its settings; returns the values that it computed."""
    settings.quiet |= quiet
    if settings.config.allow_targets:
        _make_working_directory_importable()
    with naming(NAMING):
        function = _loaded(command)
        result: dict[str, Any] = function(settings)
    return result


def _make_working_directory_importable() -> None:
    """Makes the user's packages importable, like `python -m` and unlike the console script."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _show(arguments: Sequence[str]) -> int:
    """Runs Hydra's own `--cfg hydra`, `--hydra-help` and similar flags, on rank 0."""
    if detect(os.environ).rank == 0:
        import hydra

        register()
        sys.argv[1:] = [register_file(word) for word in arguments]
        show = hydra.main(f"pkg://{CONFIG_MODULE}", "config", version_base="1.3")
        show(lambda config: None)()
    return 0
