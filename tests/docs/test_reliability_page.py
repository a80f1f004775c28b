"""Each promise of docs/reliability.md names the tests that hold it.

A paragraph or an item of a list is found by how it begins. A name with a colon is a cell of a
worker script, by how the cell's name begins; a name with a slash is a script for developers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pages import ROOT
from support.launch import worker_module

PAGE = ROOT / "docs" / "reliability.md"
TESTS = ROOT / "tests"

OF_TORCHRUN: list[str] = []
"""The tests of what says how torchrun or Slurm behaves, and promises nothing."""

HELD_BY = {
    "How a run reports errors, ends, and continues": [],
    # First errors
    "If a process fails, the job reports the first error": [
        "test_an_error_in_the_first_step_is_reported_once_and_recorded_for_torchrun",
        "test_the_first_error_is_reported_once_with_its_rank",
        "test_an_exception_in_a_step_ends_all_processes",
    ],
    "torchrun's own report follows": [
        "test_an_error_in_the_first_step_is_reported_once_and_recorded_for_torchrun",
        "test_the_first_error_is_reported_once_with_its_rank",
    ],
    "Scripts with their own loop": [
        "test_an_uncaught_error_is_the_last_line_of_every_process",
        "test_a_process_that_leaves_too_early_is_named",
    ],
    "A script that catches the error of a step": [
        "gradients: after an exception on both ranks the next step is right",
    ],
    "The job ends within seconds": [
        "test_an_end_waits_for_the_checkpoint_that_is_being_written",
        "test_a_stopped_data_worker_ends_with_its_process",
        "test_a_worker_that_is_stopped_ends_with_a_process_that_is_killed",
        "test_a_process_of_another_container_is_never_taken_for_one_of_this_host",
    ],
    # Ranks that differ
    "With several processes, each rank runs the whole script": [
        "different_data: another learning rate on one rank",
    ],
    "`HybridModel` compares": [
        "different_data: another rate of a dropout on one rank",
        "different_data: another class of a layer on one rank",
        "different_data: another number in a module or a loss",
        "different_data: a model and a loss that know their rank are accepted",
    ],
    "The first step compares the loss": [
        "different_data: another loss on one rank",
        "different_data: another code of a loss on one rank",
        "different_data: another setting of a loss on one rank",
    ],
    "`Trainer`, `Session` and `OptimizerStep` compare": [
        "different_data: another optimizer on one rank",
        "different_data: another schedule of learning rates on one rank",
        "test_another_learning_rate_of_one_rank_in_a_custom_loop_ends_all_processes",
        "different_data: other parameter groups on one rank of a stage",
    ],
    "Data sets, batch sizes and the options": [
        "different_data: equally many samples that differ",
        "different_data: another batch_size= on another rank",
        "different_data: another steps= of a trainer",
        "different_data: another schedule under the same name",
        "state: what is frozen must be the same on all ranks",
    ],
    # Evaluations that fail
    "The command line and `Trainer` evaluate during training": [
        "test_a_step_that_is_due_is_saved_even_if_its_evaluation_fails",
        "test_a_step_whose_evaluation_fails_on_a_rank_is_saved_and_the_run_goes_on_exactly",
        "test_the_last_checkpoint_has_the_state_after_the_last_evaluation",
    ],
    "Before the first step every process runs one batch": [
        "test_a_metric_that_is_broken_is_named_before_the_first_step",
        "test_the_evaluation_before_the_first_step_changes_no_bit_of_the_training",
        "test_eval_first_is_logged_at_step_0_and_not_again_after_a_resume",
    ],
    "A tracker that raises": [
        "test_a_tracker_that_fails_is_one_warning_and_the_run_goes_on",
        "test_a_callback_that_fails_ends_the_run_after_a_save_of_the_last_step",
    ],
    # Hangs
    "A watchdog thread in each process": [
        "test_the_process_that_stands_still_is_named_and_the_stacks_are_kept",
        "test_stall_s_ends_a_script_of_one_process_at_every_height",
    ],
    "Progress means micro-batches": [
        "test_a_layer_that_stands_still_is_named_by_stage_micro_batch_and_line",
        "test_a_process_that_waits_for_a_slow_one_has_not_stalled",
        "test_each_micro_batch_of_a_comparison_with_plain_pytorch_is_progress",
    ],
    "The first two steps of a run": [
        "test_each_run_of_a_process_may_take_longer_in_its_first_steps",
        "test_the_first_evaluation_as_a_whole_may_take_longer",
    ],
    "Scripts are watched too": [
        "test_stall_s_ends_a_script_of_one_process_at_every_height",
        "test_an_evaluation_outside_of_training_is_watched",
        "test_a_process_that_stands_at_a_breakpoint_does_not_stand_still",
        "test_the_stacks_of_each_run_without_a_directory_are_in_a_folder_of_a_new_name",
    ],
    "If only one rank calls a collective": [
        "test_the_only_process_that_calls_a_collective_is_named_with_its_line",
        "test_the_only_process_that_gathers_with_the_world_is_named_with_its_line",
    ],
    "At the start, rank 0 logs": [
        "test_rank_0_says_which_ranks_it_waits_for",
        "test_a_process_that_does_not_come_is_named_once",
        "test_the_others_say_that_they_wait_for_rank_0_and_where",
        "test_a_server_that_answers_nothing_is_waited_for_no_longer_than_the_limit",
    ],
    "Every process gives a sign of life": [
        "test_a_process_that_gives_no_sign_of_life_is_found_by_rank_0",
        "test_a_process_that_is_cut_off_knows_how_long_the_store_has_not_answered",
        "test_a_node_that_loses_its_network_ends_the_run_on_both_sides",
    ],
    "Without torchrun, rank 0 serves the store": [
        "test_an_error_of_rank_0_reaches_those_that_wait_for_it",
        "test_an_error_of_rank_0_reaches_a_process_that_looks_when_rank_0_has_ended",
        "test_a_process_ends_of_a_failure_also_where_the_store_has_gone",
        "test_the_watchdog_ends_a_run_whose_terminal_is_gone",
    ],
    "If stderr is a full pipe": [
        "test_a_stream_drops_what_a_full_pipe_cannot_take_until_it_is_read_again",
        "test_a_command_that_fails_ends_while_its_stderr_is_full",
        "test_a_command_whose_stdout_is_full_from_its_start_says_what_is_missing",
        "test_training_goes_on_while_its_stderr_is_full_from_its_start",
    ],
    # Interruptions
    "SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1": [
        "test_sigterm_to_the_launcher_saves_and_the_same_command_goes_on_exactly",
        "loss_scaling: a signal to one rank stops all at the same step",
    ],
    "A signal during an evaluation": [
        "loss_scaling: a signal to one rank stops all at the same step, in an evaluation too",
    ],
    "A second SIGTERM or Ctrl-C": [
        "test_a_second_signal_ends_a_script_whose_layer_does_not_return",
        "test_a_signal_that_a_launcher_passes_on_is_not_a_second_one",
    ],
    "`Trainer.fit` in a script does the same": [
        "loss_scaling: a signal to one rank stops all at the same step",
        "test_sigterm_ends_a_script_without_a_trainer_as_it_ends_any_of_pytorch",
        "test_ctrl_c_stops_the_step_after_the_action_that_runs",
    ],
    "torchrun kills processes that are still running": OF_TORCHRUN,
    "SIGUSR1 kills torchrun": OF_TORCHRUN,
    "If torchrun itself is killed": ["test_faults_at_random_change_nothing"],
    "Before training, while data is loaded": ["test_a_signal_ends_the_command_with_its_name"],
    # Restarts
    "`torchrun --max-restarts 3` restarts": [
        "test_every_restart_of_the_launcher_joins_and_goes_on_exactly",
    ],
    "`torchrun --nnodes 1:2` continues": ["scripts/reliability/elastic.sh"],
    "`--monitor-interval`": OF_TORCHRUN,
    "With `--nnodes 1:2`, torchrun waits": OF_TORCHRUN,
    "Leave `--shutdown-timeout`": OF_TORCHRUN,
    # Any number of processes
    "Both commands train the same run": [
        "test_several_processes_train_the_same_bits_as_one",
        "test_a_run_that_is_resumed_on_other_numbers_of_processes_is_the_same_run",
    ],
    "While a process runs a replica": [
        "test_gradients_of_one_process_are_added_in_the_tree_s_order_and_few_are_kept",
    ],
}


def promises() -> Iterator[str]:
    """Yields the paragraphs and items of the page, each as one line."""
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        line = " ".join(block.split()).removeprefix("- ")
        if line and not line.startswith(("#", "|")):
            yield line


def test_each_promise_names_its_tests() -> None:
    found = list(promises())
    nameless = [line for line in found if not line.startswith(tuple(HELD_BY))]
    assert nameless == []
    assert [key for key in HELD_BY if sum(line.startswith(key) for line in found) != 1] == []


@pytest.mark.parametrize("promise", HELD_BY)
def test_the_tests_of_a_promise_exist(promise: str) -> None:
    functions = {
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)
    }
    for name in HELD_BY[promise]:
        worker, _, cell = name.partition(": ")
        if cell:
            cells = worker_module(worker).cells.cells
            assert any(each.startswith(cell) for each in cells), name
        elif "/" in name:
            assert (ROOT / name).is_file(), name
        else:
            assert name in functions, name
