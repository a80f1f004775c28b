"""The commands: one module each, of the command's name, and their table.

table           the name, function, usage, keys and flags of each command;  help  its text
result          what a command returns, and an evaluation in words
layout_tables   the stages of a plan, and the processes with their devices
trained_run     a run with the weights of a checkpoint, for `evaluate` and `predict`
"""
