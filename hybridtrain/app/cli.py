"""The command line: `python -m hybridtrain [command] [overrides...]`.

The overrides are Hydra's, and so are the flags that show a config. A run itself does not go
through `hydra.main`, with which all ranks would write the same log and `.hydra` folder, and a
restarted run would get a new directory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridtrain.app.compose import (
    CONFIG_MODULE,
    compose_config,
    compose_settings,
    config_text,
    given_keys,
    register,
    register_file,
    with_later,
)
from hybridtrain.app.config import errors_with_config_keys, with_new_keys
from hybridtrain.app.error_report import lasting_streams, report, versions
from hybridtrain.app.project import with_project
from hybridtrain.app.resolve import Settings, settle
from hybridtrain.errors import ConfigError
from hybridtrain.launch import detect, end_with_parent

COMMANDS = (
    "train",
    "plan",
    "verify",
    "evaluate",
    "predict",
    "export",
    "search",
    "submit",
    "results",
    "report",
    "new",
    "smp-config",
    "measure-machine",
)

# Commands that take no overrides, and what is said of them with overrides.
_WITHOUT_OVERRIDES = {
    "results": "results takes runs, not overrides: hybridtrain results <run_name>...",
    "report": "report takes runs, not overrides: hybridtrain report <run_name>...",
    "new": "new takes a folder: hybridtrain new my_project",
    "measure-machine": "measure-machine comes first and takes no overrides",
    "smp-config": "smp-config takes a file: hybridtrain smp-config distribution.json",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with lasting_streams():
        try:
            end_with_parent()
            return _dispatch(arguments)
        except (Exception, KeyboardInterrupt) as error:
            return report(error)


def _dispatch(arguments: list[str]) -> int:
    from hydra._internal.utils import get_args_parser

    if "--version" in arguments:
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        return 0
    if arguments[:1] and arguments[0] in _WITHOUT_OVERRIDES:
        name = arguments[0].replace("-", "_")  # of a module, and of the function in it
        own = importlib.import_module(f"hybridtrain.app.{name}")
        code: int = getattr(own, name)(arguments[1:])
        return code
    dry_run = "--dry-run" in arguments
    arguments = [word for word in arguments if word != "--dry-run"]
    parsed = get_args_parser().parse_intermixed_args(arguments)
    shows_hydras = parsed.cfg in ("hydra", "all") or parsed.info or parsed.hydra_help
    command, overrides = _command(parsed.overrides)
    if parsed.help or shows_hydras or parsed.shell_completion:
        if parsed.info or parsed.cfg:
            compose_config(overrides, parsed.config_dir)  # for the one-line errors
        flags = [word for word in arguments if word not in parsed.overrides]
        if (
            parsed.help or parsed.hydra_help
        ):  # Hydra sets up the config's logging, with objects that a recipe may name
            overrides.append("hydra.hydra_logging.root=null")
        return _show([*overrides, *flags])
    _refuse_what_has_no_effect(parsed, overrides)
    if dry_run and (command not in ("train", "submit") or (command == "train" and parsed.multirun)):
        raise ConfigError(
            f"--dry-run goes with train and submit, and not with {command} or a sweep"
        )
    if command in _WITHOUT_OVERRIDES:
        raise ConfigError(_WITHOUT_OVERRIDES[command])
    overrides, config_dir = with_project(overrides, parsed.config_dir)
    if any("hydra.searchpath" in override for override in overrides):
        _make_working_directory_importable()  # for pkg://my_project.conf
    if command == "submit" and not parsed.cfg:
        return _submit(overrides, config_dir, parsed.multirun, dry_run)
    if command == "search" and not parsed.cfg:
        from hybridtrain.app.search import search

        return search(overrides, config_dir)
    if parsed.multirun:
        from hybridtrain.app.sweep import sweep

        return sweep(command, overrides, config_dir, run)
    if parsed.cfg:
        composed = compose_settings(overrides, config_dir)
        text = config_text(composed, parsed.resolve, parsed.package)
        if detect(os.environ).rank == 0:
            print(text)
        return 0
    if dry_run:
        return _try_out(overrides, config_dir)
    run(command, settle(command, overrides, config_dir))
    return 0


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command among `words`, wherever it stands, and the overrides."""
    commands = [word for word in words if re.fullmatch(r"[A-Za-z][\w-]*", word)]
    for word in commands:
        if word not in COMMANDS:
            raise ConfigError(
                f"there is no command {word!r}; the commands are: {', '.join(COMMANDS)} (and "
                f"overrides look like key=value)"
            )
    if len(commands) > 1:
        raise ConfigError(f"one command at a time, not {' and '.join(commands)}")
    overrides = with_new_keys([word for word in words if word not in commands])
    return (commands or ["train"])[0], overrides


def _refuse_what_has_no_effect(parsed: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Refuses flags and settings of Hydra's that a run here does not follow."""
    instead = {
        "config_path": "--config-dir adds a folder of groups, recipe=<file> takes a file",
        "config_name": "recipe=<file> takes a whole config",
        "experimental_rerun": "recipe=outputs/<run_name>/config.yaml repeats a run",
    }
    for flag, advice in instead.items():
        if getattr(parsed, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect here: {advice}")
    for flag in ("package", "resolve"):
        if getattr(parsed, flag) and not parsed.cfg:
            raise ConfigError(f"--{flag} goes with --cfg job only")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.startswith(("hydra.", "hydra/")) and key != "hydra.searchpath":
            raise ConfigError(
                f"{override}: {key} has no effect here, like all of Hydra's own settings but "
                f"hydra.searchpath; where a run is written to is set by output_dir= and run_name="
            )


def _submit(overrides: Sequence[str], config_dir: str | None, multirun: bool, dry_run: bool) -> int:
    from hybridtrain.app.submit import submit  # with torch, which takes a second to import

    if "allow_targets" in given_keys(overrides):
        _make_working_directory_importable()
    with errors_with_config_keys():
        return submit(overrides, config_dir, multirun=multirun, dry_run=dry_run)


def _try_out(overrides: Sequence[str], config_dir: str | None) -> int:
    """Trains two steps, evaluates two batches and saves, in a folder that is removed again."""
    config = compose_config(overrides, config_dir)
    folder = Path(config.output_dir) / dry_run_name(os.environ)
    # what others would see, or what the log would lead to after its removal
    shown = [f"monitor.{name}=false" for name in ("tensorboard", "report", "wandb", "mlflow")]
    short = ["trainer.epochs=null", "trainer.steps=2", "trainer.log_every=1", *shown]
    short += ["++data.first_batches=2", "++lr_schedule.warmup_steps=0", f"output_dir={folder}"]
    is_main = detect(os.environ).rank == 0
    try:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
        settings = settle("train", with_later(overrides, short), config_dir)
        evaluated = run("train", settings).keys() - {"step"}
    finally:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if is_main:
        tried = ["two steps"]
        tried += ["an evaluation"] if evaluated else []
        tried += ["a save"] if settings.config.checkpoint.every_steps != 0 else []
        said = " and ".join([*([", ".join(tried[:-1])] if tried[1:] else []), tried[-1]])
        print(f"dry run: {said} went well; nothing is kept", file=sys.stderr, flush=True)
    return 0


def dry_run_name(environ: Mapping[str, str]) -> str:
    """Returns the name of a dry run's folder: one for all processes of a launch, and no other."""
    launch = detect(environ)
    words = [launch.run, environ.get("TORCHELASTIC_RUN_ID", "")]
    words += map(str, launch.master or [os.getpid()])
    if launch.local_size == launch.size:  # other machines may share the folder
        words.append(socket.gethostname())
    return re.sub(r"[^\w.]+", "_", "-".join([".dry_run", *filter(None, words)]))


def run(command: str, settings: Settings) -> dict[str, Any]:
    """Runs a command with its settings; returns what it has found."""
    if settings.config.allow_targets:
        _make_working_directory_importable()
    with errors_with_config_keys():
        from hybridtrain.app import commands  # with torch, which takes a second to import

        found: dict[str, Any] = getattr(commands, command)(settings)
    return found


def _make_working_directory_importable() -> None:
    """Makes the user's packages importable, as `python -m` does and the console script does not."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _show(arguments: Sequence[str]) -> int:
    """Runs Hydra's own `--cfg hydra`, `--help` and the like, on rank 0."""
    if detect(os.environ).rank == 0:
        import hydra

        register()
        sys.argv[1:] = [register_file(word) for word in arguments]
        show = hydra.main(f"pkg://{CONFIG_MODULE}", "config", version_base="1.3")
        show(lambda config: None)()
    return 0
