"""A run directory or a project file of a stranger does nothing that the user has not allowed."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.launch import SMALL

from hybridtrain.cli import main

EVIL = "\x1b]0;title\x07\x1b[2J"
HUGE = "9" * 400
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
DAMAGE = {
    "a deep list": "[" * 1_000,
    "a list whose aliases expand to a billion values": BOMB,
    "a deep mapping": '{"a": ' * 1_000,
    "bytes": "\x00\xff\xfe",
    "a list": "[]",
    "a list of others": "[[1], {}]",
    "a number": "3",
    "a text": '"x"',
    "texts for numbers": '{"steps": "x", "step": "x", "eval": 3, "stages": 3, "checkpoint": 3}',
    "a huge number": f'{{"steps": {HUGE}, "step": {HUGE}, "eval": {{}}}}',
    "a huge loss": f'{{"steps": 6, "step": 6, "eval": {{"loss": {HUGE}}}, "eval/loss": {HUGE}, '
    f'"time": {HUGE}, "train_loss": {HUGE}, "step_ms": {{"p50": {HUGE}}}, "optim.lr": {HUGE}}}',
    "a number that Python does not read": '{"steps": ' + "9" * 5000 + "}",
    "nothing": "",
    "a long text": "[" + "x, " * 400_000 + "]",
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a hole of 4 GiB": lambda path: (path.touch(), os.truncate(path, 1 << 32)),
}
NO_FILE = ("a folder", "a pipe", "a device")
UNREADABLE = (
    "a deep list",
    "a list whose aliases expand to a billion values",
    "a deep mapping",
    "bytes",
    "a number that Python does not read",
    "a hole of 4 GiB",
)
THOROUGH = pytest.mark.thorough
READ = {
    "results": ["config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json"],
    "report": [
        *("config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json"),
        *("plan.yaml", "timeline.json", "logs/rank_000.log"),
    ],
}
"""The files that a command reads of several runs."""
OF_THE_RUN = [
    *(*READ["report"], "evaluations.jsonl", "run.lock", "checkpoints/best.json"),
    *(
        f"checkpoints/step_00000006/{name}"
        for name in ("manifest.json", "state.json", "model.safetensors", "optimizer.json")
    ),
]
READ_BY_EVALUATE = [
    "config.yaml",
    "overrides.yaml",
    *(f"checkpoints/step_00000006/{name}" for name in ("manifest.json", "model.safetensors")),
]


def damage(path: Path, how: str | Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    if callable(how):
        how(path)
    else:
        path.write_text(how + "\n", encoding="latin-1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main([*SMALL, "run_name=good", "checkpoint.best=loss"]) == 0
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
@pytest.mark.quick_cases("export")
def test_links_in_a_run_directory_lead_nowhere(run: Path, command: str, tmp_path: Path) -> None:
    evil = copy_of(run, "evil")
    victim = tmp_path / "bashrc"
    victim.write_text("mine\n")
    for name in ("logs/rank_000.log", "evaluations.jsonl", "metrics.jsonl", "summary.json"):
        (evil / name).unlink(missing_ok=True)
        (evil / name).symlink_to(victim)
    main([command, "run_name=evil", "world.devices=cpu"])
    assert victim.read_text() == "mine\n"


@pytest.mark.thorough
def test_no_command_writes_through_a_link_in_the_place_of_a_file_of_the_run(tmp_path: Path) -> None:
    """Each file that a run writes becomes a link to a copy elsewhere, which stays as it is."""
    words = [*SMALL, "run_name=evil", "monitor.csv=true", "monitor.report=true"]
    commands = (
        ["evaluate", "run_name=evil"],
        ["predict", "run_name=evil"],
        ["export", "run_name=evil"],
        ["report", "evil"],
        ["plan", *words],
    )
    for command in ([*words, "checkpoint.best=loss"], *commands):
        assert main(command) == 0
    run, elsewhere = Path("outputs/evil"), tmp_path / "elsewhere"
    before = {}
    for path in [path for path in run.rglob("*") if path.is_file()]:
        copy = elsewhere / path.relative_to(run)
        copy.parent.mkdir(parents=True, exist_ok=True)
        before[copy] = path.read_bytes()
        path.rename(copy)
        path.symlink_to(copy)
    assert {copy.name for copy in before} >= {
        *("config.yaml", "overrides.yaml", "metrics.jsonl", "metrics.csv", "summary.json"),
        *("plan.yaml", "timeline.json", "timeline.png", "report.html", "evaluations.jsonl"),
        *("rank_000.log", "best.json", "manifest.json", "model.safetensors"),
    }
    for command in (*commands, [*words, "checkpoint.best=loss", "trainer.steps=8"]):
        main(command)  # a command may refuse a link
    assert {copy: copy.read_bytes() for copy in before} == before
    assert {path for path in elsewhere.rglob("*") if path.is_file()} == before.keys()


def test_a_folder_of_logs_that_is_a_link_is_not_written_to(run: Path, tmp_path: Path) -> None:
    evil = copy_of(run, "evil")
    shutil.rmtree(evil / "logs")
    (tmp_path / "home").mkdir()
    (evil / "logs").symlink_to(tmp_path / "home")
    assert main(["evaluate", "run_name=evil", "world.devices=cpu"]) == 0
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "file"),
    [
        pytest.param(c, f, marks=() if c == "results" or f == "summary.json" else THOROUGH)
        for c, names in READ.items()
        for f in names
    ],
)
@pytest.mark.quick_cases("results-overrides.yaml", "results-metrics.jsonl")
def test_a_damaged_run_is_one_line_that_names_the_file_and_hides_no_other(
    run: Path, command: str, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    names = {kind: f"bad_{number}" for number, kind in enumerate(DAMAGE)}
    for kind, name in names.items():
        damage(copy_of(run, name) / file, DAMAGE[kind])
    capfd.readouterr()
    assert main([command, "outputs"]) == 0
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    if command == "results":
        rows = {line.split()[0]: line for line in said.out.splitlines()[1:]}
        shown = {name for name, row in rows.items() if file not in row}
        lines = [row for row in rows.values() if file in row]
    else:
        shown = {*re.findall(r"\w+", Path(said.out.strip()).read_text())}
        lines = said.err.splitlines()
    assert "good" in shown
    for kind, name in names.items():
        left_out = [line for line in lines if re.search(rf"\b{name}\b", line)]
        if kind in NO_FILE and file in ("config.yaml", "metrics.jsonl"):  # it is no run
            continue
        if kind in UNREADABLE and not file.endswith(".log"):
            assert left_out, kind
        assert bool(left_out) == (name not in shown), kind
        if left_out:
            (line,) = left_out
            assert file in line, kind


@pytest.mark.parametrize(
    ("command", "file"),
    [
        pytest.param(c, f, marks=() if c == "evaluate" and f in READ_BY_EVALUATE else THOROUGH)
        for c in ("evaluate", "predict", "export", "report")
        for f in OF_THE_RUN
    ],
)
@pytest.mark.quick_cases("evaluate-config.yaml")
def test_a_command_on_a_damaged_run_ends_well_or_in_one_line_that_names_the_file(
    run: Path, command: str, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    of_several = command in READ
    bomb = "a list whose aliases expand to a billion values"
    for kind in ("a deep list", bomb, "bytes", "texts for numbers", "a huge number", "a folder"):
        shutil.rmtree("outputs", ignore_errors=True)
        damage(copy_of(run, "bad") / file, DAMAGE[kind])
        capfd.readouterr()
        words = ["outputs/bad"] if of_several else ["run_name=bad", "world.devices=cpu"]
        code = main([command, *words])
        said = capfd.readouterr().err
        assert code in (0, 2), (kind, said)
        assert "Traceback" not in said, kind
        if code:
            assert Path(file).name in said.splitlines()[-1], (kind, said)


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


def test_a_run_whose_name_is_no_text_hides_no_other(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    shutil.copytree(run, os.fsdecode(b"outputs/bad\xff"))
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "hybridtrain"), "results", "outputs"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        text=True,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert re.search(r"\bgood\b", ended.stdout)
    assert "bad\\udcff" in ended.stdout


@pytest.mark.parametrize(
    "end", ["\n", *(pytest.param(end, marks=THOROUGH) for end in "\r\x0b\u2028\x85")]
)
@pytest.mark.thorough
def test_no_name_begins_a_line_of_a_log_or_of_a_table(
    end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    accuracy = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 10}
    recipe = {"defaults": ["digits"], "trainer": {"metrics": {f"acc{end}forged": accuracy}}}
    Path("r.yaml").write_text(json.dumps(recipe))
    assert main(["recipe=r.yaml", *SMALL[1:], "run_name=r"]) == 2
    refused = capfd.readouterr().err
    assert main(["recipe=digits", *SMALL[1:], "run_name=r"]) == 0
    summary = json.loads(Path("outputs/r/summary.json").read_text())
    summary["eval"][f"acc{end}forged"] = 1.0
    Path("outputs/r/summary.json").write_text(json.dumps(summary))
    assert main(["results", "r", "output=table.md"]) == 0
    said = capfd.readouterr()
    shown = refused + said.out + said.err + Path("table.md").read_text()
    assert shown.count("forged") >= 3
    assert not [line for line in shown.splitlines() if line.lstrip("| ").startswith("forged")]


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
    assert "(without allow_targets" in said


PROJECT = '[tool.hybridtrain]\nallow_targets = ["os"]\nconfig_dir = "options"\n'
AMONG = "a directory of runs"


@pytest.mark.parametrize(
    ("group", "left_out"),
    [
        ("", None),
        ("group/other", "metrics.jsonl"),
        *(
            pytest.param(group, left_out, marks=THOROUGH)
            for group in ("", "group", "group/other")
            for left_out in ("overrides.yaml", "metrics.jsonl", None)
            if (group, left_out) not in [("", None), ("group/other", "metrics.jsonl")]
        ),
    ],
)
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
@pytest.mark.quick_cases(5)
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
@pytest.mark.quick_cases(1)
def test_the_project_file_beside_the_folder_of_runs_counts(
    run: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_of(run, "good")
    Path("options").mkdir()
    Path("pyproject.toml").write_text(PROJECT)
    assert main(["evaluate", "--cfg", "job", *words.split()]) == 0
    assert "allow_targets=[os] (from pyproject.toml)" in capfd.readouterr().err


@pytest.mark.thorough
def test_what_the_command_line_allows_counts_among_runs_too(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(run, "good")
    monkeypatch.chdir("outputs")
    Path("pyproject.toml").write_text(PROJECT)
    Path("options").mkdir()
    given = ["output_dir=.", "run_name=good", "allow_targets=[os]", "--config-dir", "options"]
    assert main(["evaluate", *given, "world.devices=cpu"]) == 0, capfd.readouterr().err


# the user names the file: it may be a pipe, such as <(command)
@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if isinstance(DAMAGE[kind], str)])
def test_a_damaged_file_is_one_line_of_smp_config(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(Path("given.json"), DAMAGE[kind])
    code = main(["smp-config", "given.json"])
    said = capfd.readouterr()
    if code == 0:  # of keys that SageMaker's do not have
        assert "torchrun" in said.out
        return
    assert code == 2
    (line,) = said.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "given.json" in line


GRANTING = {
    "allow_targets": {"allow_targets": ["evil"], "model": {"_target_": "evil.grant"}},
    "a target": {"model": {"_target_": "evil.grant"}},
    "a command": {"model": {"_target_": "subprocess.getoutput", "cmd": "touch granted"}},
    "hydra": {"hydra": {"searchpath": ["pkg://evil"]}},
    "push_to": {"push_to": "stranger/theirs"},
    "output": {"output": "granted"},
    "run_name": {"run_name": "../../granted"},
    "launcher": {"search": {"launcher": "touch granted", "space": ["optim.lr=1e-3,1e-2"]}},
    "storage": {"search": {"storage": "sqlite:///granted", "space": ["optim.lr=1e-3,1e-2"]}},
    "space": {"search": {"space": ["allow_targets=[evil],[os]"], "trials": 1}},
    "metric": {"trainer": {"metrics": {"m": {"_target_": "evil.grant"}}}},
    "callback": {"callbacks": {"c": {"_target_": "evil.grant"}}},
    "monitor": {"monitor": {"m": {"_target_": "evil.grant"}}},
    "tokenizer": {"data": {"tokenizer": "evil.grant"}},
}
"""What a file could say to run code, to write elsewhere or to send something, by its way there."""
WAYS = ["recipe", "config.yaml", "overrides.yaml"]


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(
            key, marks=() if key in ("allow_targets", "a command", "launcher") else THOROUGH
        )
        for key in GRANTING
    ],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick_cases("recipe-a command")
def test_words_of_a_file_never_grant(
    run: Path, way: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command on a recipe or a run that asks for more than the user did refuses or ignores it."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    grant = "from pathlib import Path\nPath('granted').touch()\n\n\ndef grant(*args, **kwargs):\n"
    Path("evil.py").write_text(f"{grant}    Path('granted').touch()\n")
    asked = GRANTING[key]
    if way == "recipe":
        Path("r.yaml").write_text(json.dumps({"defaults": ["digits"], **asked}))
        words = ["recipe=r.yaml", *SMALL[1:]]
        commands = [[c, *words] for c in ("train", "evaluate", "predict", "export", "search")]
    else:
        evil = copy_of(run, "evil")
        if way == "overrides.yaml":
            text = json.dumps([f"+{name}={json.dumps(value)}" for name, value in asked.items()])
            (evil / way).write_text(text)
        else:
            file = evil / way
            loaded = yaml.safe_load(file.read_text())
            for name, value in asked.items():
                known = loaded.get(name)
                merged = isinstance(known, dict) and isinstance(value, dict)
                loaded[name] = {**known, **value} if merged else value
            file.write_text(json.dumps(loaded))
        on_run = [[c, "run_name=evil"] for c in ("evaluate", "predict", "export")]
        commands = [*on_run, ["results", "outputs"], ["report", "outputs"]]
    for command in commands:
        assert main(command) in (0, 2)
    assert not list(tmp_path.rglob("granted*"))


def test_a_recipe_does_not_say_where_a_model_is_sent(capfd: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text("defaults: [digits]\npush_to: stranger/theirs\n")
    command = ["export", "recipe=r.yaml", "format=transformers"]
    assert main(command) == 2
    assert "push_to=stranger/theirs" in capfd.readouterr().err
    assert main([*command, "push_to=me/mine"]) == 2
    assert "push_to=stranger/theirs" not in capfd.readouterr().err
