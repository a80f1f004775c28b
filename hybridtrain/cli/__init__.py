"""The command line: configs, runs and commands. Hydra stops here.

command_line dispatches `hybridtrain [command] [overrides...]`
config/      from overrides to a `Config`: schema, composition, what `_target_` may name
run/         from a `Config` to the objects of a run and its directory
commands/    the commands, and the table of their names

overrides -> config -> run -> Trainer -> run directory
"""

from hybridtrain.cli.command_line import main

__all__ = [
    "main",
]
