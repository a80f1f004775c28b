"""The end of a run that went well."""

import sys
from pathlib import Path

import pytest
from launch import torchrun

WORKER = Path(__file__).parent / "workers" / "leaving.py"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_closed_world_has_ended_the_threads_of_its_messages():
    torchrun(2, WORKER)
