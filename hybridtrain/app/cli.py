"""The command line: `python -m hybridtrain [train|plan|evaluate|export] [overrides...]`.

The overrides are Hydra's, and so are the flags that show a config. A run itself does not go
through `hydra.main`, with which all ranks would write the same log and `.hydra` folder, and a
restarted run would get a new directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hybridtrain.app.compose import (
    CONFIG_MODULE,
    compose_config,
    register,
    register_recipe_file,
    sweep_choices,
)
from hybridtrain.app.config import Config
from hybridtrain.app.keys import errors_with_config_keys
from hybridtrain.errors import ConfigError
from hybridtrain.launch.early_signals import end_on_signals

COMMANDS = ("train", "plan", "evaluate", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "train"
    try:
        with end_on_signals():
            return _dispatch(command, arguments)
    except (Exception, KeyboardInterrupt) as error:
        from hybridtrain.app.error_report import report  # not needed for --help

        return report(error, _rank())


def _dispatch(command: str, arguments: list[str]) -> int:
    from hydra._internal.utils import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    if parsed.multirun:
        return _sweep(command, parsed.overrides, parsed.config_dir)
    if parsed.cfg or parsed.info:
        compose_config(parsed.overrides, parsed.config_dir)  # for the one-line errors
    if parsed.cfg or parsed.info or parsed.help or parsed.hydra_help or parsed.shell_completion:
        return _show(arguments)
    unknown = [word for word in parsed.overrides if "=" not in word and not word.startswith("~")]
    if unknown and unknown[0] == parsed.overrides[0]:
        raise ConfigError(
            f"there is no command {unknown[0]!r}; the commands are: {', '.join(COMMANDS)} (and "
            f"overrides look like key=value)"
        )
    config = compose_config(parsed.overrides, parsed.config_dir)
    run(command, config, parsed.overrides)
    return 0


def run(command: str, config: Config, overrides: Sequence[str]) -> None:
    """Runs a command on a composed config."""
    if config.allow_targets and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # where `python -m` finds the user's packages
    with errors_with_config_keys():
        from hybridtrain.app import commands  # with torch, which takes a second to import

        getattr(commands, command)(config, overrides)


def _show(arguments: Sequence[str]) -> int:
    """Runs Hydra's own `--cfg job`, `--help` and the like, on rank 0."""
    if _rank() == 0:
        import hydra

        register()
        sys.argv[1:] = [register_recipe_file(word) for word in arguments]
        show = hydra.main(f"pkg://{CONFIG_MODULE}", "config", version_base="1.3")
        show(lambda config: None)()
    return 0


def _sweep(command: str, overrides: Sequence[str], config_dir: str | None) -> int:
    """Runs every combination of a `--multirun`, one after the other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        raise ConfigError(
            "--multirun does not work under torchrun or srun: every process would sweep. Start one "
            "torchrun for each combination, from a shell loop or an array of jobs"
        )
    choices = sweep_choices(overrides)
    swept = [len(set(values)) > 1 for values in zip(*choices, strict=True)]
    runs = [(choice, compose_config(choice, config_dir)) for choice in choices]
    for number, (choice, config) in enumerate(runs):
        # Named after the values, so that another sweep does not resume these runs.
        values = [value for value, varies in zip(choice, swept, strict=True) if varies]
        config.run_name = "-".join([str(config.run_name), *values]).replace("/", "_")
        print(f"run {number + 1} of {len(runs)}: {' '.join(choice)}", file=sys.stderr, flush=True)
        run(command, config, choice)
    return 0


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
