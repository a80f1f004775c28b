"""The end of a run that went well."""

import sys
from pathlib import Path

import pytest
from launch import torchrun

WORKER = Path(__file__).parent / "workers" / "leaving.py"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_closed_world_leaves_no_thread_that_the_end_of_the_process_could_abort():
    torchrun(2, WORKER)
