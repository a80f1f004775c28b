"""An exception in a step ends the run with its own message, and no process is left waiting."""

import pytest
from support.launch import WORKERS, torchrun_script


@pytest.mark.parametrize("who", ["all", "1"])
def test_an_exception_in_a_step_ends_all_processes(who):
    # the limit of the collectives is longer
    output = torchrun_script(2, WORKERS / "failing.py", who, "local", ok=False, timeout=200)
    assert "ArithmeticError: boom" in output
    assert "in layer '2', which was given float32[3, 4]" in output
    assert "in the forward of micro-batch 0 on stage 1 (2 to 3)" in output
    assert "the end was reached" not in output
