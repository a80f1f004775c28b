"""Which processes of a pipeline read the data."""

from support.launch import each_cell


@each_cell({"reading": [3], "reading_streams": [4]})
def test_reading(worker, processes, cell, launched):
    launched(worker, processes).check(cell)
