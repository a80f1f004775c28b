"""From a `Config` to the objects of a run and its directory.

components   builds the model, loss, metrics, optimizer and callbacks that a config names
build        builds a run, stage by stage;  context  the objects of each stage
hardware     the hardware of a run;  auto  chooses values for `auto` keys when a run begins
prediction   the step time and memory of a run before it runs;  utilization  its MFU
run_model    the model of a run on meta tensors, for predictions
directory    a run's files and logs;  lock  one writer at a time
resume       the checkpoint that a command continues from, or reads
run_data     loads the data, compares it across ranks, records it in checkpoints
run_record   what else a checkpoint records for later commands
moved_base   loads the moved base model of an adapter's checkpoint
run_table    the table of runs
job, sweep   many processes on a cluster, and many runs;  dry_run  a short trial run
errors       a command's result and error on the terminal;  colour
"""
