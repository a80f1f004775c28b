"""From the overrides on the command line to a `Config`.

schema       the groups of a config, and its keys in messages
compose      overrides to a config and back to YAML, and what is wrong with them
resolve      a run's own config under the given overrides
targets      what a `_target_` may be
project      what a user's project adds: config folders and packages
"""
