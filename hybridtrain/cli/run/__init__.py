"""From a `Config` to the objects of a run and its directory.

components   data, model, loss, metrics, optimizer and callbacks that a config names
build        the objects of a run
pricing      the machine of a run, keys that are `auto`, and the prediction of its step time
directory    its files, logs and checkpoints to start from;  lock  one writer at a time
data_record  what a checkpoint says of the data
job, sweep   many processes on a cluster, and many runs
errors       the result and the error of a command on the terminal;  colour
"""
