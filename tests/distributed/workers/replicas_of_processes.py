"""Four processes: a pipeline over all of them, and two replicas of two processes each."""

import sys
from dataclasses import replace

import torch
from support.launch import Cells, worker_module
from support.matrix import FIRST, check_cell
from support.matrix import cells as matrix_cells
from support.slow import assert_names_slow_replica, check_rows, trained

from hybridtrain import World
from hybridtrain.schedule import registered

torch.set_num_threads(1)
cells = Cells()

CELLS = list({replace(cell, nb_part=2): None for cell in matrix_cells()})
# `matrix_cells.py` has every value of every axis.
QUICK = [cell for cell in CELLS[:FIRST] if cell.case == "stateful"]

# in a V over 4 processes there are 8 stages, more than some of the models have layers
for cell in [cell for cell in CELLS[::3] if registered(cell.schedule).placement == "loop"]:

    @cells.add(f"one pipeline of 4: {cell}", thorough=cell not in QUICK)
    def _(world, cell=cell):
        check_cell(replace(cell, nb_part=4, stages_per_device=1), engine="distributed")


for inner, chosen in (("pp", CELLS[1::3]), ("dp", CELLS[2::3])):
    for cell in chosen:

        @cells.add(f"2 replicas, inner={inner}: {cell}", thorough=cell not in QUICK)
        def _(world, cell=cell, inner=inner):
            replica = world.rank // 2 if inner == "pp" else world.rank % 2
            check_cell(cell, replica, 2, engine="distributed", inner=inner)


@cells.add("each direction of an edge has a connected group of its own, in every replica")
def _edges(world):
    for nb_part, inner in ((4, "pp"), (2, "pp"), (2, "dp")):
        shape = World.from_env(nb_part, "cpu", engine="distributed", inner=inner)
        groups = shape._connected_edges("gloo")  # NCCL only, but the order of calls is the same
        here = shape.pipeline_rank
        assert len(set(map(id, groups.values()))) == len(groups) == (2 if nb_part == 2 else 4)
        received = {edge: torch.zeros(1) for edge in groups}
        works = []
        for (sender, receiver), group in groups.items():
            if sender == here:
                value = torch.tensor([10.0 * shape.data_parallel_rank + sender])
                works.append(group.send([value], int(receiver > here), 0))
            else:
                at = received[sender, receiver]
                works.append(group.recv([at], int(sender > here), 0))
        for work in works:
            work.wait()
        for (sender, receiver), value in received.items():
            if receiver == here:
                assert value.item() == 10 * shape.data_parallel_rank + sender


@cells.add("one log tells of all replicas, and which one is slow")
def _slow_replica(world):
    slow = world.rank >= world.size // 2
    layers = (3e-3, 3e-3) if slow else (1e-4, 1e-4)
    trainer = trained(layers, 2, engine="distributed")
    check_rows(trainer, [(replica, device) for replica in (0, 1) for device in (0, 1)])
    assert_names_slow_replica(trainer, 1)


unequal = worker_module("unequal_replicas")


@cells.add("unequal shares and an unequal cut of pipelines over processes train as one process")
def _unequal(world):
    shares = unequal.unequal(nb_part=2, engine="distributed")
    ours = unequal.trainer(shares, device_speeds=[1, 4])
    assert ours.model.plan.counts == [1, 4]
    ours.fit()
    unequal.compare(shares, ours, unequal.expected(), "weights")


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
