"""An error of one process is an error of the same type in all of them."""

import pickle

import pytest

from hybridtrain._base.problem import Problem, copied_problem, first_problem
from hybridtrain.checkpoint import NoSpaceError
from hybridtrain.errors import DataError, DivergedError, OtherProcessError


class OnlyHere(DataError):
    """A type that other processes may not have, with an argument that they do not know."""

    def __init__(self, path, line):
        super().__init__(f"{path}: line {line}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (DivergedError("loss is NaN"), DivergedError, "rank 3: loss is NaN"),
        (NoSpaceError("full"), NoSpaceError, "rank 3: full"),
        (OnlyHere("a.csv", 7), DataError, "rank 3: a.csv: line 7"),
        (KeyError("k"), OtherProcessError, "rank 3 failed: KeyError: 'k'"),
    ],
)
def test_the_copy_of_an_error_has_its_type_and_names_its_rank(error, kind, message):
    problem = pickle.loads(pickle.dumps(Problem.of(3, error)))
    copy = problem.error()
    assert (type(copy), str(copy)) == (kind, message)
    assert copied_problem(error) is None
    assert copied_problem(copy) == problem
    assert Problem.of(0, copy) == problem  # a copy of a copy


def test_a_mistake_that_rank_0_finds_is_said_by_all_in_the_same_words():
    assert str(Problem.of(0, DataError("no files")).error()) == "no files"


def test_the_lowest_rank_has_the_problem_of_all():
    problems = [Problem(2, None, "c"), None, Problem(1, None, "b")]
    assert first_problem(problems) == problems[2]
    assert first_problem([None, None]) is None
