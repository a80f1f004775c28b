"""The parts of `hybridtrain check`; each returns its findings as text, and a value for later parts.

report      prints the lines and the verdict
settings    the config
cluster     processes, devices, ports, versions, Slurm
start       data, batches, model, initial weights, checkpoint
step        schedule, order, plan, messages, memory
"""
