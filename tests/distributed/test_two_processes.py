"""Two processes: every cell of the worker scripts, each with different data on each rank."""

from support.launch import each_cell

WORKERS = [
    "different_data", "gradients", "heights", "loss_scaling", "matrix_cells",
    "pipelined_models", "shared_values",
    "sharded", "state", "splits", "unequal_replicas",
]  # fmt: skip


@each_cell({worker: [2] for worker in WORKERS})
def test_two_processes(worker, processes, cell, launched):
    launched(worker, processes).check(cell)
