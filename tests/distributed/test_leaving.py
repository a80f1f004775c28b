"""The end of a run that went well."""

import sys

import pytest
from support.launch import forked_script


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_closed_world_has_ended_the_threads_of_its_messages(tmp_path):
    status, output = forked_script(2, "leaving.py", tmp_path)
    assert status == 0, output
