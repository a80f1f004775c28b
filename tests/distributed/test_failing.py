"""An exception in a step ends the run with its own message, and no process is left waiting."""

import pytest
from support.cases import thorough
from support.launch import forked_script

OTHERS = [("distributed", 1), ("local", 1), ("distributed", 0)]


@pytest.mark.parametrize("who", ["all", "1"])
@pytest.mark.quick_cases("1")
def test_an_exception_in_a_step_ends_all_processes(who, tmp_path):
    # the limit of the collectives is longer
    status, output = forked_script(2, "failing.py", tmp_path, who, "local")
    assert status == 1
    assert "ArithmeticError: boom" in output
    assert "in layer '2', with the input float32[3, 4]" in output
    assert "in the forward of micro-batch 0 on stage 1 (2 to 3)" in output
    assert "the end was reached" not in output


@pytest.mark.parametrize("step", [4, *thorough([2, 6])])  # a middle, the first and the last one
@pytest.mark.parametrize(
    ("engine", "who"),
    [
        ("local", 0),
        *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS),
    ],
)
def test_a_step_whose_evaluation_fails_on_a_rank_is_saved_and_the_run_goes_on_exactly(
    engine, who, step, tmp_path
):
    def launch(step):
        (tmp_path / "output.txt").unlink(missing_ok=True)
        return forked_script(2, "failing_evaluation.py", tmp_path, engine, who, step)

    status, output = launch(step)
    assert status == 1, output
    assert "ArithmeticError: boom" in output
    assert "in the metric 'flaky'" in output
    assert "the end was reached" not in output
    assert (tmp_path / str(step) / "checkpoints" / f"step_{step:08d}").is_dir()
    status, output = launch(0)
    assert status == 0, output
    assert output.count("all went on") == 2


@pytest.mark.parametrize("failing", ["train", "evaluation"])
@pytest.mark.quick_cases("evaluation")
def test_an_error_of_the_only_process_that_fails_to_read_a_stream_ends_all(failing, tmp_path):
    status, output = forked_script(4, "failing_stream.py", tmp_path, failing)
    assert status == 1, output
    error = "sample 15 of Samples cannot be read: ArithmeticError: boom"
    assert error in output
    # the processes that do not read report the reader's error
    assert output.count(error) >= 4, output
    assert "the end was reached" not in output


def test_a_collate_function_that_changes_the_number_of_micro_batches_is_one_clear_error(tmp_path):
    status, output = forked_script(3, "failing_collate.py", tmp_path)
    assert status == 1, output
    assert "this process has 2 micro-batches in a step" in output
    assert "OwnLoader" in output
    assert "the end was reached" not in output
