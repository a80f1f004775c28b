"""Which processes of a pipeline read the data."""

import pytest
from support.launch import each_cell


@each_cell({"reading": [3]})
def test_reading(worker, processes, cell, launched):
    launched(worker, processes).check(cell)


@pytest.mark.thorough
@each_cell({"reading_streams": [4]})
def test_reading_streams(worker, processes, cell, launched):
    launched(worker, processes).check(cell)
