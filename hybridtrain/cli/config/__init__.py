"""From the overrides on the command line to the `Settings` of a command.

schema          the groups of a config and their keys
keys            the names of keys in messages
targets         what a `_target_` may be
overrides       Hydra's grammar of overrides, and quotes
option_files    recipes and machines: options that are files
compose         overrides to a config
explain         one line for what Hydra found wrong
leftovers       keys of a `_target_` that was replaced
sweeps          the runs of a sweep
tree, secrets   a config as dicts and as YAML; what is not written or shown
show            the text of `--cfg job`
run_name        the name of a run, and the run that a command is about
saved_run       the config that a run began with
moved_base      the new place of a moved base model, for every key that names it
changes         the differences between two configs
resolve         the settings of a command: those of the run, with the command line's on top
check           values that no object of the library checks
agreement       one config for all processes
project         what a user's project adds: config folders and packages
"""
