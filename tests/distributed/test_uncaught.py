"""The uncaught error of a script's process is what all its processes say."""

import os

import pytest
from support import forked
from support.launch import WORKERS, environment

HOST = os.uname().nodename


def last_words(folder, *arguments):
    """The exit codes and the outputs of two processes; no launcher ends one after the other."""
    outputs = [folder / f"rank{rank}" for rank in (0, 1)]
    script = WORKERS / "uncaught.py"
    with forked.together(2, script, arguments, environment(), outputs) as processes:
        for process in processes:
            process.join(200)
    return [
        (process.exitcode, output.read_text())
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("height", "place", "who", "name", "where"),
    [
        (
            "smp",
            "loss",
            1,
            "rank 1 (stage 1, {})",
            " (in the forward of micro-batch 0 on stage 1",
        ),
        ("own", "between", 0, "rank 0 (stage 0, {})", ""),
        ("session", "loss", 1, "rank 1", " (in the forward of micro-batch 0 on stage 0"),
    ],
)
@pytest.mark.quick_cases(2)
def test_an_uncaught_error_is_the_last_line_of_every_process(
    height, place, who, name, where, tmp_path
):
    for rank, (code, said) in enumerate(last_words(tmp_path, height, place, str(who))):
        assert code == 1, said
        assert "the end was reached" not in said
        last = said.splitlines()[-1]
        assert last.startswith(f"error: {name.format(HOST)} failed: ArithmeticError: boom{where}")
        assert "peer" not in said
        assert ("Traceback" in said) is (rank == who)


@pytest.mark.thorough
def test_another_learning_rate_of_one_rank_in_a_custom_loop_ends_all_processes(tmp_path):
    values = f"0.1 on rank 0 ({HOST}), 1.0 on rank 1 ({HOST})"
    for code, said in last_words(tmp_path, "own", "rate", "1"):
        assert code == 1, said
        last = said.splitlines()[-1]
        assert last.startswith("error: rank ")
        assert f" failed: lr= of the optimizer differs between the ranks: {values}: run" in last


def test_a_process_that_leaves_too_early_is_named(tmp_path):
    (code, said), (_, of_the_other) = last_words(tmp_path, "own", "leaves", "1")
    assert "the end was reached" in of_the_other
    assert code == 1
    assert said.splitlines()[-1].startswith(
        f"error: rank 1 (stage 1, {HOST}) finished while rank 0 was waiting for it: "
    )
