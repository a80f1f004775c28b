"""A run directory or a project file of a stranger does nothing that the user has not allowed."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.launch import SMALL

from hybridtrain.cli.main import main

EVIL = "\x1b]0;title\x07\x1b[2J"
DAMAGE = {
    "deep": "[" * 100_000,
    "a list": "[]",
    "a text for a number": '{"steps": "x", "eval": 3}',
    "a huge number": '{"steps": ' + "9" * 400 + ', "eval": {}, "step": ' + "9" * 400 + "}",
    "bytes": "\x00\xff",
    "another type": '{"steps": [1], "eval": [2]}',
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main([*SMALL, "run_name=good", "trainer.eval_every=null"]) == 0
    finally:
        os.chdir(before)
    return folder / "outputs" / "good"


def copy_of(run: Path, name: str) -> Path:
    target = Path("outputs") / name
    shutil.copytree(run, target)
    for file in ("config.yaml", "overrides.yaml"):
        text = (target / file).read_text()
        (target / file).write_text(text.replace("run_name: good", f"run_name: {name}"))
    return target


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_links_in_a_run_directory_lead_nowhere(run: Path, command: str, tmp_path: Path) -> None:
    evil = copy_of(run, "evil")
    victim = tmp_path / "bashrc"
    victim.write_text("mine\n")
    for name in ("logs/rank_000.log", "evaluations.jsonl", "metrics.jsonl", "summary.json"):
        (evil / name).unlink(missing_ok=True)
        (evil / name).symlink_to(victim)
    main([command, "run_name=evil", "world.devices=cpu"])
    assert victim.read_text() == "mine\n"


def test_a_folder_of_logs_that_is_a_link_is_not_written_to(run: Path, tmp_path: Path) -> None:
    evil = copy_of(run, "evil")
    shutil.rmtree(evil / "logs")
    (tmp_path / "home").mkdir()
    (evil / "logs").symlink_to(tmp_path / "home")
    assert main(["evaluate", "run_name=evil", "world.devices=cpu"]) == 0
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("command", ["results", "report"])
def test_a_damaged_run_is_one_line_and_hides_no_other(
    run: Path, command: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    for number, name in enumerate(
        ("summary.json", "metrics.jsonl", "overrides.yaml", "config.yaml")
    ):
        bad = copy_of(run, f"bad_{number}")
        (bad / name).write_text(DAMAGE[kind] + "\n", encoding="latin-1")
    capfd.readouterr()
    assert main([command, "outputs"]) == 0
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    if command == "results":
        lines = said.out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == [
            *(f"bad_{number}" for number in range(4)),
            "good",
        ]
    else:
        assert "good" in Path(said.out.strip()).read_text()


def test_control_characters_of_a_stranger_are_escaped(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    evil = copy_of(run, "evil")
    summary = json.loads((evil / "summary.json").read_text())
    summary["eval"] = {f"loss{EVIL}": 1.0, "loss": 0.0}
    (evil / "summary.json").write_text(json.dumps(summary))
    capfd.readouterr()
    assert main(["results", "outputs"]) == 0
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\x07" not in said.out + said.err


def test_the_best_command_of_a_stranger_grants_nothing(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    evil = copy_of(run, "evil")
    (evil / "overrides.yaml").write_text(
        json.dumps(["recipe=digits", "allow_targets=[evil]", "+hydra.searchpath=[pkg://evil]"])
    )
    summary = json.loads((evil / "summary.json").read_text())
    summary["eval"]["loss"] = -1.0
    (evil / "summary.json").write_text(json.dumps(summary))
    capfd.readouterr()
    assert main(["results", "outputs"]) == 0
    said = capfd.readouterr().err
    assert "best by loss: evil" in said
    assert "allow_targets=[" not in said
    assert "pkg://evil" not in said
    assert "only you can grant" in said


PROJECT = '[tool.hybridtrain]\nallow_targets = ["os"]\nconfig_dir = "options"\n'
AMONG = "does not count in a directory of runs"


@pytest.mark.parametrize("group", ["", "group", "group/other"])
@pytest.mark.parametrize("left_out", ["overrides.yaml", "metrics.jsonl", None])
@pytest.mark.parametrize(
    "words",
    [
        "output_dir=. run_name={run}",
        "++output_dir='.' run_name={run}",
        'output_dir="." run_name={run}',
        "output_dir={here} run_name={run}",
        "output_dir=../shared run_name={run}",
        "output_dir=${{oc.env:HERE}} run_name={run}",
        "recipe=r.yaml run_name={run}",
        "resume={run}",
        "resume='./{run}/checkpoints/step_00000006'",
        "resume={here}/{run}",
    ],
)
def test_a_project_file_among_runs_does_not_count(
    run: Path, group: str, left_out: str | None, words: str,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shared = Path("shared")
    target = shared / group / "evil"
    shutil.copytree(run, target)
    if left_out:
        (target / left_out).unlink()
    (shared / "pyproject.toml").write_text(PROJECT)
    (shared / "options").mkdir()
    (shared / "r.yaml").write_text("output_dir: .\n")
    monkeypatch.chdir(shared)
    monkeypatch.setenv("HERE", str(Path.cwd()))
    given = words.format(run=target.relative_to(shared), here=Path.cwd()).split()
    assert main(["evaluate", *given, "world.devices=cpu"]) == 2
    said = capfd.readouterr().err
    assert AMONG in said
    assert "allow_targets=[os] --config-dir options" in said


def test_a_project_file_among_runs_does_not_count_in_a_sweep_either(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, Path("shared") / "group" / "evil")
    monkeypatch.chdir("shared")
    Path("pyproject.toml").write_text(PROJECT)
    Path("options").mkdir()
    command = ["evaluate", "run_name=group/evil", "output_dir=elsewhere,.", "--multirun"]
    assert main(command) == 2
    assert AMONG in capfd.readouterr().err


@pytest.mark.parametrize("words", ["run_name=good", "resume=outputs/good", "output_dir=outputs"])
def test_the_project_file_beside_the_folder_of_runs_counts(
    run: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    Path("options").mkdir()
    Path("pyproject.toml").write_text(PROJECT)
    assert main(["evaluate", "--cfg", "job", *words.split()]) == 0
    assert "allow_targets=[os], as pyproject.toml says" in capfd.readouterr().err


def test_what_the_command_line_allows_counts_among_runs_too(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(run, "good")
    monkeypatch.chdir("outputs")
    Path("pyproject.toml").write_text(PROJECT)
    Path("options").mkdir()
    given = ["output_dir=.", "run_name=good", "allow_targets=[os]", "--config-dir", "options"]
    assert main(["evaluate", *given, "world.devices=cpu"]) == 0, capfd.readouterr().err


def test_deep_json_is_one_line_of_smp_config(capfd: pytest.CaptureFixture[str]) -> None:
    Path("deep.json").write_text("[" * 100_000)
    assert main(["smp-config", "deep.json"]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("error: deep.json is not JSON")


def test_a_recipe_does_not_say_where_a_model_is_sent(capfd: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text("defaults: [digits]\npush_to: stranger/theirs\n")
    command = ["export", "recipe=r.yaml", "format=transformers"]
    assert main(command) == 2
    assert "the recipe asks to send the model to 'stranger/theirs'" in capfd.readouterr().err
    assert main([*command, "push_to=me/mine"]) == 2
    assert "asks to send" not in capfd.readouterr().err
