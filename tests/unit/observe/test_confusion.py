"""A confusion matrix among the values of an evaluation, as a picture and on the page of a run."""

import numpy as np
import pytest

from hybridtrain.observe import confusion_of, describe_values, draw_confusion, is_confusion

VALUES = {
    "eval/loss": 0.5,
    "eval/confusion/cat/cat": 7.0,
    "eval/confusion/cat/dog": 1.0,
    "eval/confusion/dog/cat": 0.0,
    "eval/confusion/dog/dog": 4.0,
}


def test_the_matrix_is_found_among_the_values_with_a_line_for_each_true_class() -> None:
    matrix = confusion_of(VALUES)
    assert matrix is not None
    assert list(matrix.classes) == ["cat", "dog"]
    assert matrix.counts == [[7, 1], [0, 4]]
    assert [tag for tag in VALUES if not is_confusion(tag)] == ["eval/loss"]
    assert confusion_of({"eval/loss": 1.0}) is None
    # a class may have the sign in its name
    slashed = confusion_of({"eval/confusion/a/b/a/b": 3.0})
    assert slashed is not None
    assert (list(slashed.classes), slashed.counts) == (["a/b"], [[3.0]])


def test_a_cell_is_as_dark_as_its_share() -> None:
    matrix = confusion_of(VALUES)
    assert matrix is not None
    pixels = np.asarray(draw_confusion(matrix, "evaluation"))
    assert {(33, 113, 181)} <= set(map(tuple, pixels.reshape(-1, 3)))  # 4 of 4


def test_the_page_of_a_run_has_the_matrix(tmp_path) -> None:
    pytest.importorskip("plotly")
    import json

    from hybridtrain.observe import write_report

    line = {"step": 3, "time": 1.0, **VALUES}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = write_report([tmp_path]).read_text()
    assert "The classes of the last evaluation" in page
    assert "confusion/cat/dog" not in page


def test_the_line_of_an_evaluation_has_whole_numbers_or_only_mentions_a_large_matrix():
    small = {"accuracy": 0.5} | {f"confusion/{a}/{b}": 3.0 for a in "xy" for b in "xy"}
    assert describe_values(small) == [
        "accuracy 0.5000",
        *(f"confusion/{a}/{b} 3" for a in "xy" for b in "xy"),
    ]
    large = {f"confusion/{a}/{b}": 3.0 for a in "vwxyz" for b in "vwxyz"} | {"f1": 0.5}
    assert describe_values(large) == ["confusion of 5 classes in the report", "f1 0.5000"]
