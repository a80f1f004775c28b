"""The command `results`: the table of runs, what it sorts and leaves out, and the best of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from cli_runs import fail
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.cli.commands.results import results
from hybridtrain.cli.run.run_table import SWEEP_FILE

QUICK = [*SMALL, "monitor.tensorboard=false", "trainer.steps=2"]


def test_results_of_a_sweep_are_one_table(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = ("0.001", "0.01", "0.1")
    lines = [f"optim.lr={rate} run_name=digits-lr/lr_{rate} seed=0" for rate in rates]
    folder = Path("outputs/digits-lr")
    (folder / SWEEP_FILE).parent.mkdir(parents=True)
    (folder / SWEEP_FILE).write_text("\n".join(lines))
    copied.rename(folder / "lr_0.001")
    for name, rate in (("lr_0.001", 1e-3), ("lr_0.01", 1e-2)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.yaml").write_text(f"{{seed: 0, optim: {{lr: {rate}}}}}\n")
        (folder / name / "overrides.yaml").write_text(f"[optim.lr={rate}]\n")
    (folder / "lr_0.01/metrics.jsonl").write_text(
        '{"step": 2, "train/loss": 1.5}\n{"step": 4, "eval/loss": 0.25}\n{"step": 6, "tr'
    )

    def shown(*words: str) -> list[list[str]]:
        capfd.readouterr()
        assert main(["results", *words]) == 0
        return [line.split() for line in capfd.readouterr().out.splitlines()]

    table = shown("outputs/digits-lr", "sort=optim.lr")
    assert table[0] == ["run", "optim.lr", "state", "step", "loss", "samples", "accuracy"]
    assert table[1][:4] == ["lr_0.001", "0.001", "done", "6"]
    assert table[2] == ["lr_0.01", "0.01", "not", "done", "4", "0.25"]
    assert table[3] == ["lr_0.1", "0.1", "not", "begun", "0"]
    assert [line[0] for line in shown("digits-lr", "sort=-optim.lr")[1:]] == [
        "lr_0.1",
        "lr_0.01",
        "lr_0.001",
    ]
    assert [line[0] for line in shown("digits-lr", "optim.lr<=1e-2", "loss>0")[1:]] == [
        "lr_0.001",
        "lr_0.01",
    ]
    names = [line[0] for line in shown("outputs", "state!=done", "output=out.csv")[1:]]
    assert names == ["digits-lr/lr_0.01"]  # of the folders, those that are there
    assert Path("out.csv").read_text().splitlines()[1].startswith("digits-lr/lr_0.01,not done,4")
    monkeypatch.chdir("outputs/digits-lr")
    assert shown(".", "sort=optim.lr", "output=../../out.md") == table
    assert Path("../../out.md").read_text().startswith("| run | optim.lr | state |")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "sort=optim.lrr"], "no run has optim.lrr: "),
        (["digits", "accuracyy>0.5"], "no run has accuracyy: "),
        (["digits", "output=out.txt"], "output=out.txt must end in .csv or .md"),
        (["digits", "sort=loss", "sort=step"], "usage: hybridtrain results"),
        (["sort=loss"], "usage: hybridtrain results"),
        (["nowhere"], "there is no folder nowhere and no run outputs/nowhere"),
    ],
)
def test_results_refuse_what_no_run_has(
    words: list[str], message: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fail(capfd, "results", *words).startswith(f"error: {message}")


@pytest.mark.thorough
def test_the_best_run_of_a_sweep_is_named_with_its_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["-m", *QUICK, "seed=1,2,3"]) == 0
    said = capfd.readouterr().err
    losses = {
        float(json.loads(path.read_text())["eval"]["loss"]): path.parent.name
        for path in Path("outputs/digits-seed").glob("*/summary.json")
    }
    best = losses[min(losses)]
    assert f"best by loss: {best}, " in said
    command = said.splitlines()[-1].split()
    assert command[0] == "hybridtrain"
    assert f"seed={best[-1]}" in command
    assert command[-1] == f"run_name=digits-seed/{best}"
    assert main(["results", "outputs", "sort=-loss"]) == 0
    assert f"best by loss: digits-seed/{losses[min(losses)]}, " in capfd.readouterr().err
    assert main(command[1:]) == 0  # it is complete, and only evaluated


@pytest.mark.thorough
def test_commands_that_a_sweep_and_a_plan_end_with_have_the_folder_of_options(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("my options/optim").mkdir(parents=True)
    Path("my options/optim/mine.yaml").write_text("{_target_: torch.optim.SGD, lr: 0.01}\n")
    given = [*QUICK, "optim=mine", "--config-dir", "my options"]
    for words in (["-m", *given, "seed=1,2"], ["plan", *given, "hardware=h100", "run_name=plan"]):
        assert main(words) == 0
        command = shlex.split(capfd.readouterr().err.splitlines()[-1])
        assert command[-2:] == ["--config-dir", "my options"]
        assert main([*command[command.index("hybridtrain") + 1 :], "world.devices=cpu"]) == 0


def test_results_are_found_by_name_and_by_folder(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for argument in ("digits", "outputs/digits", "outputs"):
        assert results([argument]) == 0
        tables.append(capfd.readouterr().out)
    assert len(set(tables)) == 1
    assert "done" in tables[0]
    Path("digits").mkdir()  # a folder with data, say
    assert results(["digits"]) == 0
    assert capfd.readouterr().out == tables[0]
    assert "there is no folder other and no run outputs/other" in fail(capfd, "results", "other")
    assert "usage: hybridtrain results" in fail(capfd, "results")
    assert "hybridtrain results RUN_OR_FOLDER" in fail(capfd, "seed=1", "results")
