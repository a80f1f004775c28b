"""The parts of `hybridtrain check`; each returns what it found, as text, and a value for others.

report      the lines, and the verdict
settings    the config
cluster     processes, devices, ports, versions, Slurm
start       data, batches, model, initial weights, checkpoint
step        schedule, order, plan, messages, memory
"""
