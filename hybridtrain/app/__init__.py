"""The command line and what it builds: configs, runs and their directories. Hydra stops here.

cli, commands      the command line and its commands
config             the schema of a config, with the text of every key
compose            overrides to a config, and what is wrong with them
resolve            a run's own config under the given overrides
config_text        a config as YAML, without secrets; keys: config keys in errors
instantiate        what a `_target_` may be; components: data, model, loss, optimizer, ...
build              the objects of a run; resume: the checkpoint that it starts from
run_directory      its files and logs; run_lock: one writer at a time
plan, pricing      plans and prices of a run; measure_machine: the machine they are for
sweep, results     many runs; submit, job: a run on a cluster
error_report       the first error, in all processes; terminal

overrides -> compose -> Config -> build -> Trainer -> run directory
"""

from hybridtrain.app.cli import main

__all__ = [
    "main",
]
