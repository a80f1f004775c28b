"""From the overrides on the command line to the `Settings` of a command.

schema          the groups of a config and their keys
keys            the names of keys in messages
targets         the objects that a `_target_` may name
places          which file, folder, address or command a key names, and who may set it
names           plain names of metrics, callbacks, trackers and runs
overrides       Hydra's grammar of overrides, and quotes
option_files    recipes and machines: options that are files
compose         composes overrides to a config
explain         turns an error of Hydra's into one line
leftovers       keys of a `_target_` that was replaced
sweeps          the runs of a sweep
tree, secrets   a config as dicts and as YAML; secrets, which are not written or shown
show            the text of `--cfg job`
run_name        the name of a run, and the run of a command
saved_run       the config that a run started with
moved_base      the new location of a base model that was moved, for every key that names it
changes         the differences between two configs
resolve         the settings of a command: the run's config and the command line
check           values that no object of the library checks
agreement       one config for all processes
project         a user's project: config folders and packages
"""
