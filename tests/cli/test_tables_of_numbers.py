"""`data=table`: columns of numbers as features, a class or a number to predict."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from cli_runs import fail, succeed
from support.cases import installed

installed("datasets")

RUN = [
    *("data=table", "data.path=d.csv", "model=tabular_mlp", "model.hidden=[16]", "optim=adamw"),
    *("optim.lr=0.02", "data.batch_size=16", "trainer.epochs=null", "trainer.steps=40"),
    *("world.devices=cpu", "monitor.report=false", "run_name=t"),
]


def write(path: str, rows: int = 120, separator: str = ",") -> None:
    """Writes a table as pandas does, with an index: the class is whether size exceeds 500."""
    draws = random.Random(0)
    lines = [["", "size", "weight", "note", "label", "price"]]
    for number in range(rows):
        size, weight = draws.uniform(0, 1000), draws.gauss(0, 1)
        kind = "large" if size > 500 else "small"
        values = (number, f"{size:.3f}", f"{weight:.3f}", "ok", kind, f"{size / 100:.4f}")
        lines.append([str(value) for value in values])
    Path(path).write_text("".join(separator.join(line) + "\n" for line in lines))


def evaluated() -> dict[str, float]:
    result: dict[str, float] = json.loads(Path("outputs/t/summary.json").read_text())["eval"]
    return result


def test_classes_are_learnt_from_numbers_and_predicted_by_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write("d.csv", separator=";")
    said = succeed(capfd, *RUN, "data.features=[size,weight]", "pipeline.nb_part=1")
    assert "2 classes: large (" in said
    assert "2 features: size, weight" in said
    assert evaluated()["accuracy"] > 0.8
    Path("d.csv").unlink()  # the checkpoint has the mean and deviation
    Path("new.csv").write_text("weight,size\n0,950\n0,20\n")
    succeed(capfd, "predict", "run_name=t", "data.predict_path=new.csv", "output=o.jsonl")
    lines = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert [line["class"] for line in lines] == ["large", "small"]
    write("eval.csv", 30)
    words = ["evaluate", "run_name=t", "data.eval_path=eval.csv"]
    said = fail(capfd, *words, "data.features=[weight,size]", "allow_changes=true")
    assert "the model was trained on size, weight: remove data.features=" in said
    assert "(30 samples)" in succeed(capfd, *words)


@pytest.mark.thorough
def test_a_number_is_learnt_from_all_columns_of_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    write("d.csv")
    regression = ["data.task=regression", "model.task=regression", "data.target=price"]
    said = succeed(capfd, *RUN, *regression, "trainer.steps=150", "pipeline.nb_part=1")
    assert "2 features: size, weight" in said
    assert "columns without numbers not used: note, label" in said
    assert evaluated()["loss"] < 1
    succeed(capfd, "predict", "run_name=t", "output=o.npy")
    assert np.load("o.npy").shape == (12, 1)


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ((",0.0", ",x"), ["data.features=[weight]"], "which is not a finite number"),
        (("ok,", "ok,"), ["data.features=[length]"], "data.features=length: the train split has"),
        (
            ("ok,", "ok,"),
            ["data.features=[note]"],
            "data.features=note: sample 1 of d.csv has 'ok'",
        ),
        (
            ("ok,", "ok,"),
            ["data.stratify=true", "data.task=regression"],
            "data.stratify=true needs",
        ),
        (("ok,", "ok,"), ["model.hidden=[0]"], "model.hidden=[0] must be a list of widths"),
    ],
    ids=["a word", "no column", "a column of words", "stratified numbers", "no width"],
)
@pytest.mark.quick_cases(1)
def test_a_table_that_cannot_be_used_is_one_line(
    change: tuple[str, str], keys: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write("d.csv")
    Path("d.csv").write_text(Path("d.csv").read_text().replace(*change, 1))
    assert message in fail(capfd, *RUN, *keys)


@pytest.mark.thorough
def test_rows_without_a_value_are_left_out_by_one_key_and_counted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write("d.csv")
    text = Path("d.csv").read_text().splitlines()
    index, _, *rest = text[3].split(",")
    Path("d.csv").write_text("\n".join([*text[:3], ",".join([index, "", *rest]), *text[4:]]) + "\n")
    words = [*RUN, "data.features=[size,weight]"]
    assert "sample 3 of d.csv has no value" in fail(capfd, *words)
    said = succeed(capfd, *words, "data.drop_missing=true", "--dry-run")
    assert "1 sample without a value left out" in said
