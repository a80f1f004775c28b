"""The end of a run that went well."""

import sys

import pytest
from support.launch import WORKERS, torchrun_script


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_closed_world_has_ended_the_threads_of_its_messages():
    torchrun_script(2, WORKERS / "leaving.py")
