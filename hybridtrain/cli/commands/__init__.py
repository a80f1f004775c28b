"""The commands: one module each, of the command's name. `cli.command_table` lists them.

help            the text of `--help`
result          what a command returns, and an evaluation in words
layout_tables   the stages of a plan, and the processes with their devices
trained_run     a run with the weights of a checkpoint, for `evaluate` and `predict`
"""
