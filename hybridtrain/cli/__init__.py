"""The command line: configs, runs and commands. Only this package uses Hydra.

command_line dispatches `hybridtrain [command] [overrides...]`
command_table lists the commands with their functions, help, flags and keys
config/      from overrides to a `Config`: schema, composition, what `_target_` may name
run/         from a `Config` to the objects of a run and its directory
check/       the parts of `hybridtrain check`
commands/    one module per command

overrides -> config -> run -> Trainer -> run directory
"""

from hybridtrain.cli.command_line import main

__all__ = [
    "main",
]
