"""From a `Config` to the objects of a run and its directory.

components   model, loss, metrics, optimizer and callbacks that a config names
build        the objects of a run, stage by stage;  context  what each stage has made
hardware     the hardware of a run;  auto  keys that are `auto`, chosen when a run begins
prediction   the step time and memory of a run before it runs;  utilization  its MFU
run_model    the model of a run without values, for prices
directory    its files, logs and checkpoints to start from;  lock  one writer at a time
run_data     the data: loaded, equal on all ranks, recorded in checkpoints
moved_base   loads the moved base model of an adapter's checkpoint
run_table    runs in a table
job, sweep   many processes on a cluster, and many runs;  dry_run  a trial of one
errors       the result and the error of a command on the terminal;  colour
"""
