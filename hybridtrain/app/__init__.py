"""The command line and what it builds: configs, runs and their directories. Hydra stops here.

cli, commands      the command line and its commands
config             the groups of a config, and its keys in messages
compose            overrides to a config and back to YAML, and what is wrong with them
resolve            a run's own config under the given overrides
instantiate        what a `_target_` may be
components         data, model, loss, metrics, optimizer and callbacks that a config names
build              the objects of a run
run_directory      its files, logs and checkpoints to start from; run_lock: one writer at a time
plan, pricing      plans and prices of a run, and the machine that they are for
sweep, results     many runs: their names, and tables of what they have reached
submit, job        a run on a cluster
smp_config         an estimator's `distribution` as a command
error_report       the result and the error of a command on the terminal

overrides -> compose -> Config -> build -> Trainer -> run directory
"""

from hybridtrain.app.cli import main

__all__ = [
    "main",
]
