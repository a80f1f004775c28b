"""The files of a checkpoint are byte for byte what they were, whoever writes them."""

from support.launch import each_cell


@each_cell({"checkpoint_bytes": [4, 2]})
def test_checkpoint_bytes(worker, processes, cell, launched):
    launched(worker, processes).check(cell)
