"""The trackers of a run by their names, with arguments, and the user's own ones."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import fail, metrics, succeed
from omegaconf import OmegaConf
from support.launch import SMALL, torchrun
from support.stand_in_services import install
from support.wandb_files import offline_runs

from hybridtrain.cli import main
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.observe import TRACKERS

QUICK = [*SMALL, "trainer.steps=2"]
RUN = Path("outputs/digits")

OWN = '''
from hybridtrain.loop import Tracker


class Told(Tracker):
    """Writes what it is told; fails if it is asked to."""

    def __init__(self, directory, group=None, color="red", fails=False):
        self.path, self.group, self.color, self.fails = directory / "told.txt", group, color, fails

    def on_start(self, run):
        self.told(f"{self.group} {self.color}")

    def on_log(self, run, values):
        if self.fails:
            raise OSError("the service is away")
        self.told(f"{run.step} {sorted(values)[-1]}")

    def on_end(self, run):
        if run.finished:
            self.told(f"{run.step} {run.results['eval']['samples']}")

    def told(self, line):
        with open(self.path, "a") as file:
            print(line, file=file)


class Hasty(Tracker):
    """Reports a run as soon as it is made."""

    def __init__(self, color="red"):
        open("reported", "w").close()
'''

COUNTED = """
class Counted(Tracker):
    def __init__(self):
        with open("made.txt", "a") as file:
            print("made", file=file)
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that add the user's own tracker, from a module in the working directory."""
    Path("my_trackers.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "my_trackers", raising=False)
    return ["allow_targets=[my_trackers]", "+monitor.mine._target_=my_trackers.Told"]


@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        ([], {"tensorboard", "progress"}),
        (["monitor=[csv]"], {"csv", "progress"}),
        (["monitor=csv"], {"csv", "progress"}),
        (["monitor=[]", "monitor.progress=false"], set()),
        (["monitor.tensorboard=false"], {"progress"}),
        (["monitor=[tensorboard,wandb,mlflow,csv]"],
         {"tensorboard", "wandb", "mlflow", "csv", "progress"}),
        (["monitor.profile={steps: [20, 25]}"], {"tensorboard", "progress", "profile"}),
    ],
)  # fmt: skip
@pytest.mark.quick_cases(1)
def test_a_list_of_names_is_the_trackers_of_a_run(overrides: list[str], on: set[str]) -> None:
    assert set(compose_config(overrides).monitor.chosen()) == on


def test_a_recipe_names_its_trackers_and_the_command_line_their_arguments() -> None:
    Path("mine.yaml").write_text("defaults:\n  - override /monitor: [wandb, csv]\n")
    monitor = compose_config(["recipe=mine.yaml", "monitor.wandb.project=mine"]).monitor
    assert set(monitor.chosen()) == {"wandb", "csv", "progress"}
    assert monitor.wandb["project"] == "mine"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("monitor=[wandbb]", "monitor=wandbb is unknown: did you mean 'wandb'?"),
        ("monitor.wandbb=true", "monitor.wandbb: unknown key; did you mean monitor.wandb?"),
        ("recipe=mine.yaml", "monitor.tensorbord: unknown key; did you mean monitor.tensorboard?"),
        ("monitor.csv=maybe", "monitor.csv=maybe must be true, false or a mapping"),
        ("monitor.mlflow=maybe", "monitor.mlflow=maybe must be true, false or a mapping"),
        ("monitor.wandb={tag: a}", "monitor.wandb.tag: unknown key; did you mean monitor.wandb.t"),
        ("monitor.profile={steps: [9, 3]}", "monitor.profile.steps=[9, 3] must be a number of"),
        ("+monitor.mine._target_=os.system", "monitor.mine._target_=os.system is not allowed: "),
    ],
)
@pytest.mark.quick_cases(
    "monitor.mlflow=maybe-monitor.mlflow=maybe must be true, false or a mapping",
    "monitor.wandb={tag: a}-monitor.wandb.tag: unknown key; did you mean monitor.wandb.t",
)
def test_a_mistake_in_the_trackers_is_one_line_before_the_run(
    override: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("monitor: {tensorbord: false}\n")
    assert fail(capfd, *QUICK[1:], override).startswith(f"error: {line}")
    assert not Path("outputs").exists()


@pytest.mark.thorough
def test_a_library_that_is_missing_is_one_line_before_the_run_and_no_matter_of_evaluate(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, copied: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    # the data would be an error too, and are loaded later
    said = fail(capfd, *SMALL, "run_name=other", "monitor=[wandb]", "+data.nothing=1")
    assert said.startswith("error: WandB needs the package wandb")
    assert "pip install 'hybridtrain[wandb]'" in said
    assert not Path("outputs/other").exists()
    config = OmegaConf.load(copied / "config.yaml")
    config.monitor.wandb = True
    OmegaConf.save(config, copied / "config.yaml")
    assert main(["evaluate", "run_name=digits"]) == 0


def test_callbacks_and_trackers_of_a_run_are_constructed_once(
    own: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("my_trackers.py").open("a") as file:
        file.write(COUNTED)
    callback = "+callbacks={counted: {_target_: my_trackers.Counted}}"
    monitor = "+monitor.counted._target_=my_trackers.Counted"
    succeed(capfd, *QUICK, own[0], callback, monitor)
    assert Path("made.txt").read_text() == "made\n" * 2


def resumed_with_trackers(capfd: pytest.CaptureFixture[str]) -> set[tuple[int, str, float]]:
    """Trains with W&B and a CSV file, in two commands; returns what `metrics.jsonl` has."""
    for steps in (2, 4):
        succeed(capfd, *SMALL, "monitor=[wandb,csv]", f"trainer.steps={steps}")
    return {
        (line["step"], tag, value)
        for line in metrics(RUN)
        for tag, value in line.items()
        if tag not in ("step", "time")
    }


def test_trackers_have_what_metrics_jsonl_has_and_resume_with_the_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = install("wandb", monkeypatch)
    expected = resumed_with_trackers(capfd)
    with (RUN / "metrics.csv").open(newline="") as file:
        found = [
            (int(row["step"]), tag, float(value))
            for row in csv.DictReader(file)
            for tag, value in row.items()
            if tag not in ("step", "time") and value
        ]
    assert sorted(found) == sorted(expected)
    (points,) = service.points.values()  # of one run
    reported = [(step, tag, value) for step, values in points for tag, value in values.items()]
    assert all(point in reported for point in expected)


@pytest.mark.thorough
def test_wandb_has_what_metrics_jsonl_has_and_resumes_with_the_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    expected = resumed_with_trackers(capfd)
    first, second = offline_runs(RUN)
    assert first.run.run_id == second.run.run_id
    assert second.config["pipeline"]["nb_part"] == 2
    assert second.config["overrides"]["trainer.steps"] == 4
    reported = {
        (r["_step"], t, v) for run in (first, second) for r in run.rows for t, v in r.items()
    }
    assert reported >= {each for each in expected if each[1] in ("train/loss", "eval/accuracy")}
    (summary,) = [row for row in second.rows if "summary/steps" in row]
    ended = json.loads((RUN / "summary.json").read_text())
    assert summary["summary/eval/accuracy"] == ended["eval"]["accuracy"]
    assert summary["summary/step_ms/p50"] == ended["step_ms"]["p50"]


@pytest.mark.thorough
def test_a_run_of_before_goes_on_with_its_trackers(
    capfd: pytest.CaptureFixture[str], copied: Path
) -> None:
    config = OmegaConf.load(copied / "config.yaml")
    config.monitor = {"tensorboard": False, "progress": True, "timeline_every": None}
    OmegaConf.save(config, copied / "config.yaml")
    for file in copied.glob("events.out.*"):
        file.unlink()
    succeed(capfd, *SMALL, "trainer.steps=8")
    assert not list(copied.glob("events.out.*"))
    assert metrics(copied)[-1]["step"] == 8
    succeed(capfd, *SMALL, "trainer.steps=10", "monitor=[tensorboard,csv]")
    assert list(copied.glob("events.out.*"))
    assert (copied / "metrics.csv").exists()


@pytest.mark.thorough
def test_a_tracker_of_the_users_own_goes_by_a_target_and_is_resumed(
    capfd: pytest.CaptureFixture[str], own: list[str]
) -> None:
    succeed(capfd, *QUICK, *own, "+monitor.mine.color=blue")
    told = ["None blue", "2 train/step_ms", "2 eval/loss", "2 355"]
    assert (RUN / "told.txt").read_text().splitlines() == told
    succeed(capfd, *SMALL, *own, "trainer.steps=4")
    again = ["None blue", "4 train/step_ms", "4 eval/loss", "4 355"]
    assert (RUN / "told.txt").read_text().splitlines() == [*told, *again]


@pytest.mark.thorough
def test_a_recipe_has_a_tracker_of_the_users_own(
    capfd: pytest.CaptureFixture[str], own: list[str]
) -> None:
    Path("mine.yaml").write_text("monitor: {mine: {_target_: my_trackers.Told, color: green}}\n")
    succeed(capfd, "recipe=mine.yaml", *QUICK[1:], own[0], "run_name=digits")
    assert (RUN / "told.txt").read_text().startswith("None green\n")


def test_a_tracker_that_fails_does_not_end_the_run(
    capfd: pytest.CaptureFixture[str], own: list[str]
) -> None:
    said = succeed(capfd, *QUICK, *own, "+monitor.mine.fails=true")
    assert len(re.findall(r"Told .*OSError", said)) == 1
    assert metrics(RUN)[-1]["step"] == 2


@pytest.mark.thorough
def test_a_dry_run_checks_the_trackers_and_reports_to_none(
    capfd: pytest.CaptureFixture[str], own: list[str]
) -> None:
    hasty = [own[0], "+monitor.mine._target_=my_trackers.Hasty"]
    dry = [*SMALL, "monitor=[tensorboard,wandb,mlflow,csv]", "monitor.report=true", *hasty]
    said = succeed(capfd, "--dry-run", *dry)
    assert "step 2/2" in said
    assert "dashboard: " not in said
    assert not Path("reported").exists()
    assert not any(Path("outputs").iterdir())
    said = fail(capfd, "--dry-run", *dry, "+monitor.mine.colour=blue")
    assert said.startswith("error: monitor.mine.colour: unknown key; did you mean monitor.mine.col")
    succeed(capfd, *QUICK, *hasty)
    assert Path("reported").exists()


REGISTERING = """
import sys
from hybridtrain.observe import TRACKERS, RegisteredTracker

TRACKERS["tsv"] = RegisteredTracker("hybridtrain.observe.trackers:CSVFile", "Write a table.")
from hybridtrain.cli import main
for key in ("tvs", "tsv"):
    main([*sys.argv[1:], f"monitor.{key}=true"])
"""


def test_a_registered_tracker_is_a_key_of_monitor_and_its_typos_are_refused() -> None:
    code = [sys.executable, "-c", REGISTERING, *QUICK]  # anew: the keys are made by an import
    typo = subprocess.run(code, capture_output=True, text=True, check=False).stderr.splitlines()[0]
    assert typo.startswith("error: monitor.tvs: ")
    assert "monitor.tsv" in typo
    assert (RUN / "metrics.tsv").read_text().startswith("step,")


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.quick_cases(1)
def test_a_list_of_trackers_may_name_every_registered_one(name: str) -> None:
    assert name in compose_config([f"monitor=[{name}]"]).monitor.chosen()


@pytest.mark.thorough
def test_the_runs_of_a_sweep_are_a_group(capfd: pytest.CaptureFixture[str], own: list[str]) -> None:
    succeed(capfd, "-m", *QUICK, *own, "optim.lr=1e-3,1e-2")
    groups = [path.read_text().split()[0] for path in Path("outputs").glob("*/*/told.txt")]
    assert groups == ["digits-lr"] * 2


@pytest.mark.thorough
def test_every_process_has_a_profile_under_a_name_that_tensorboard_finds() -> None:
    done = torchrun(2, [*SMALL, "trainer.steps=3", "monitor.profile={steps: [2, 3]}"])
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (RUN / "profile").iterdir()} == {
        f"rank_{rank}_steps_2_to_3.pt.trace.json" for rank in (0, 1)
    }
