"""The commands, one module each, named after the command. `cli.command_table` lists them.

help            the text of `--help`
result          the return value of a command, and an evaluation as text
layout_tables   the stages of a plan, and the processes with their devices
trained_run     a run with the weights of a checkpoint, for `evaluate` and `predict`
"""
