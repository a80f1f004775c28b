"""The command `search`: settings that Optuna chooses, a run for each trial.

But for one test the trials are no trainings: a script in their place writes what a run writes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from cli_runs import fail
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState
from support.launch import SMALL, environment

from hybridtrain.cli import main
from hybridtrain.cli.commands.search import _space
from hybridtrain.cli.config.overrides import parse_overrides
from hybridtrain.cli.config.schema import SearchConfig
from hybridtrain.errors import DivergedError

TRIAL = """
import json, os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
run, rate = Path("outputs", given["run_name"]), float(given["optim.lr"])
assert sys.argv[1] == "train"
run.mkdir(parents=True, exist_ok=True)
with open(run / "starts", "a") as starts:
    print(os.getpid(), file=starts)
(run / "config.yaml").write_text(json.dumps({"optim": {"lr": rate}, "run_name": given["run_name"]}))
(run / "overrides.yaml").write_text(json.dumps([f"optim.lr={rate}"]))
(run / "command").write_text(" ".join(sys.argv))
if rate > 0.9:
    sys.exit(int(os.environ.get("FAILS_WITH", 2)))
if "SIGNALS" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
with open(run / "metrics.jsonl", "w") as lines:
    for step in range(1, 4):
        print(json.dumps({"step": step, "eval/loss": rate / step}), file=lines, flush=True)
        if "SLOW" in os.environ or rate > 0.5:
            time.sleep(2 if step == 3 else 0.1)
(run / "summary.json").write_text(json.dumps({"steps": 3, "eval": {"loss": rate / 3}}))
"""
FOLDER = Path("outputs/digits-search")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A search whose trials take no time."""
    Path("trial.py").write_text(TRIAL)
    launcher = f"search.launcher={sys.executable} trial.py"
    return ["search", "recipe=digits", launcher, "optim.lr=interval(0.1,0.4)", "search.trials=3"]


def study(storage: str | None = None) -> optuna.Study:
    url = storage or f"sqlite:///{FOLDER.resolve() / 'study.db'}"
    return optuna.load_study(study_name="digits-search", storage=url)


def test_a_search_has_a_run_for_each_trial_and_names_the_best(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    said = capfd.readouterr()
    trials = study().trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 3
    assert [path.name for path in sorted(FOLDER.glob("trial_*"))] == [
        f"trial_{trial.number:03d}" for trial in trials
    ]
    for trial in trials:
        assert trial.value == pytest.approx(trial.params["optim.lr"] / 3)
        assert trial.intermediate_values.keys() == {1, 2, 3}
    best = f"trial_{study().best_trial.number:03d}"
    assert f"best by loss: {best}, " in said.err
    assert f"run_name=digits-search/{best}" in said.err
    assert said.out.count("\n  trial_") == 3


@pytest.mark.thorough
def test_a_study_goes_on_where_more_trials_are_asked_for(words: list[str]) -> None:
    assert main(words) == 0
    assert main(words) == 0
    assert len(study().trials) == 3
    assert main([*words, "search.trials=5"]) == 0
    assert [trial.state for trial in study().trials] == [TrialState.COMPLETE] * 5


def test_the_space_of_a_recipe_is_searched_and_a_given_key_is_not(words: list[str]) -> None:
    space = "search.space=['optim.lr=tag(log,interval(1e-3,1e-2))','pipeline.chunks=2,4']"
    assert main([*(w for w in words if not w.startswith("optim")), space]) == 0
    for trial in study().trials:
        assert trial.params.keys() == {"optim.lr", "pipeline.chunks"}
        assert 1e-3 <= trial.params["optim.lr"] <= 1e-2


@pytest.mark.thorough
def test_a_trial_that_is_worse_than_the_others_is_stopped(words: list[str]) -> None:
    assert main([*words, "search.trials=6"]) == 0
    bad = [*(w for w in words if not w.startswith("optim")), "optim.lr=interval(0.6,0.8)"]
    assert main([*bad, "search.trials=7"]) == 0
    last = study().trials[-1]
    assert last.state is TrialState.PRUNED
    assert not (FOLDER / "trial_006/summary.json").exists()


@pytest.mark.thorough
def test_an_interrupted_search_goes_on_with_its_trial(words: list[str]) -> None:
    command = [sys.executable, "-m", "hybridtrain", *words]
    with subprocess.Popen(command, env={**environment(), "SLOW": "1"}) as process:
        while not (FOLDER / "trial_000/metrics.jsonl").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 75
    before = study().trials
    assert [trial.state for trial in before] == [TrialState.RUNNING]
    assert main(words) == 0
    after = study().trials
    assert [trial.state for trial in after] == [TrialState.COMPLETE] * 3
    assert after[0].params == before[0].params
    assert len((FOLDER / "trial_000/starts").read_text().split()) == 2


def test_a_signal_at_the_end_of_a_trial_stops_the_search(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNALS", "1")
    assert main(words) == 75
    assert [trial.state for trial in study().trials] == [TrialState.COMPLETE]


@pytest.mark.thorough
def test_a_study_is_not_mixed_with_one_of_another_metric_or_mode(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    for metric, mode in (("accuracy", "max"), ("loss", "max"), ("accuracy", "min")):
        said = fail(capfd, *words, f"search.metric={metric}", f"search.mode={mode}")
        assert said.startswith(
            "error: the study digits-search searches for the smallest loss, not "
        )
        assert said.endswith("set another run_name=\n")


@pytest.mark.thorough
def test_a_study_is_not_mixed_with_one_of_other_choices(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "pipeline.chunks=2,4"]) == 0
    said = fail(capfd, *words, "pipeline.chunks=2,4,8", "search.trials=5")
    assert said.startswith("error: pipeline.chunks: the study digits-search ")
    assert len(study().trials) == 3


@pytest.mark.thorough
def test_a_search_in_a_group_of_runs_has_a_folder_of_its_own(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "run_name=group/digits"]) == 0
    assert len(list(Path("outputs/group-digits-search").glob("trial_*/summary.json"))) == 3
    assert "run_name=group-digits-search/trial_" in capfd.readouterr().err


@pytest.mark.parametrize("group", ["mine", None])
@pytest.mark.quick_cases(1)
def test_the_trials_are_in_the_group_of_the_command_line_or_of_the_study(
    group: str | None, words: list[str]
) -> None:
    assert main([*words, "search.trials=1", *([f"monitor.group={group}"] if group else [])]) == 0
    command = (FOLDER / "trial_000/command").read_text().split()
    groups = [word for word in command if word.startswith("monitor.group=")]
    assert groups == [f"monitor.group={group or 'digits-search'}"]


@pytest.mark.thorough
def test_a_trial_that_diverges_is_not_called_worse_than_others(
    words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS_WITH", str(DivergedError.exit_code))
    diverge = [*(w for w in words if not w.startswith("optim")), "optim.lr=interval(1,2)"]
    assert main([*diverge, "search.trials=1"]) == 0
    assert study().trials[0].state is TrialState.PRUNED
    said = capfd.readouterr().err
    assert "trial_000 diverged" in said
    assert "stopped early" not in said


@pytest.mark.thorough
def test_two_searches_share_the_trials_of_a_study(words: list[str]) -> None:
    both = [*words, "search.storage=journal", "search.trials=6"]
    command = [sys.executable, "-m", "hybridtrain", *both]
    processes = [subprocess.Popen(command, env=environment()) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    journal = optuna.storages.journal.JournalFileBackend(str(FOLDER / "study.log"))
    found = optuna.load_study(
        study_name="digits-search", storage=optuna.storages.JournalStorage(journal)
    ).trials
    assert 6 <= len(found) <= 7  # the last one of each may be asked for at the same moment
    assert {trial.state for trial in found} == {TrialState.COMPLETE}
    starts = [len(path.read_text().split()) for path in FOLDER.glob("trial_*/starts")]
    assert starts == [1] * len(found)


def test_trials_that_all_fail_end_the_search(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    all_fail = [*(w for w in words if not w.startswith("optim")), "optim.lr=interval(1,2)"]
    said = fail(capfd, *all_fail, "search.trials=9")
    assert "error: 3 consecutive trials have failed, the last with" in said
    assert [trial.state for trial in study().trials] == [TrialState.FAIL] * 3


@pytest.mark.parametrize(
    ("override", "distribution"),
    [
        ("a=1,2", CategoricalDistribution(["1", "2"])),
        ("a=choice(x,[1,2])", CategoricalDistribution(["x", "[1,2]"])),
        ("a=range(1,4)", CategoricalDistribution(["1", "2", "3"])),
        ("a=interval(0,1)", FloatDistribution(0.0, 1.0)),
        ("a=int(interval(1,8))", IntDistribution(1, 8)),
        ("a=tag(log,interval(1e-4,1e-1))", FloatDistribution(1e-4, 1e-1, log=True)),
    ],
)
def test_the_words_of_a_space(override: str, distribution: object) -> None:
    assert _space(parse_overrides([override]), SearchConfig()) == {"a": distribution}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["optim.lr=1e-3"], "there is nothing to search: "),
        (
            ["search.metric=f2"],
            "f2 does not say whether a larger value is better: set search.mode=min or",
        ),
        (["search.metric=f1", "search.mode=max"], "search.metric=f1: "),
        (["search.sampler=grid"], "search.sampler=grid"),
        (["optim.lr=tag(log,interval(-1,1))"], "optim.lr=tag(log,interval(-1,1)): "),
        (
            ["search.space=['optim.lr=3']", "optim.lr=1"],
            "optim.lr=3 is not a search space",
        ),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_search_refuses(
    more: list[str], message: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in words if not (word + "=").startswith(more[-1].split("=")[0] + "=")]
    assert fail(capfd, *given, *more).splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.thorough
def test_each_trial_may_be_a_launch_of_torchrun(capfd: pytest.CaptureFixture[str]) -> None:
    launcher = "torchrun --standalone --nproc-per-node 2 -m hybridtrain"
    words = ["trainer.steps=4", "trainer.eval_every=2", "optim.lr=1e-3,1e-2", "search.trials=2"]
    assert main(["search", *SMALL, *words, f"search.launcher={launcher}"]) == 0
    for trial in study().trials:
        run = FOLDER / f"trial_{trial.number:03d}"
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["world"]["processes"], summary["steps"]) == (2, 4)
        assert trial.value == summary["eval"]["loss"]
        assert trial.intermediate_values.keys() == {2, 4}


@pytest.mark.parametrize(
    "search",
    [
        {"launcher": "touch granted"},
        {"storage": "sqlite:////tmp/granted.db"},
        {"space": ["allow_targets=[subprocess],[os]"]},
        {"space": ["hydra.searchpath=[pkg://granted],[pkg://other]"]},
        {"space": ["search.launcher='touch granted','touch other'"]},
        {"space": ["submit.setup=a,b"]},
        {"space": ["+recipe=a,b"]},
        {"space": ["output_dir=/tmp/a,/tmp/b"]},
        {"space": ["~optim=a,b"]},
    ],
    ids=lambda search: str(*search.values()),
)
@pytest.mark.quick_cases(1)
def test_words_of_a_recipe_never_grant(
    search: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    values = {"space": ["optim.lr=1e-3,1e-2"], **search, "trials": 1}
    Path("stranger.yaml").write_text(json.dumps({"run_name": "s", "search": values}))
    assert main(["search", "recipe=stranger.yaml", "world.devices=cpu"]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "only the command line" in line or "cannot be searched" in line
    assert not Path("granted").exists()
    assert not Path("outputs/s-search/trial_000").exists()


def test_a_trial_of_a_stored_study_with_other_keys_or_values_is_left_alone(
    words: list[str],
) -> None:
    FOLDER.mkdir(parents=True)
    url = f"sqlite:///{FOLDER.resolve() / 'study.db'}"
    made = optuna.create_study(storage=url, study_name="digits-search", direction="minimize")
    lr = FloatDistribution(0.1, 0.4)
    granting = {
        "optim.lr": lr,
        "allow_targets": CategoricalDistribution(["[subprocess]"]),
        "model._target_": CategoricalDistribution(["subprocess.getoutput"]),
    }
    for params, distributions in (
        (
            {
                "optim.lr": 0.2,
                "allow_targets": "[subprocess]",
                "model._target_": "subprocess.getoutput",
            },
            granting,
        ),
        ({"optim.lr": 0.8}, {"optim.lr": FloatDistribution(0.1, 0.9)}),
    ):
        made.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=distributions, state=TrialState.RUNNING
            )
        )
    assert main(words) == 0
    commands = [path.read_text() for path in FOLDER.glob("trial_*/command")]
    assert commands
    assert not any("allow_targets" in command or "0.8" in command for command in commands)


LR = FloatDistribution(0.1, 0.4)


def new_study() -> optuna.Study:
    FOLDER.mkdir(parents=True)
    url = f"sqlite:///{FOLDER.resolve() / 'study.db'}"
    return optuna.create_study(storage=url, study_name="digits-search", direction="minimize")


@pytest.mark.parametrize(
    "values",
    [
        {"optim.lr": 0.8},
        {"optim.lr": "0.2 allow_targets=[os]"},
        {"optim.lr": float("nan")},
        {"optim.lr": None},
        {"optim.lr": 0.2, "allow_targets": "[os]"},
    ],
    ids=str,
)
@pytest.mark.quick_cases(1)
def test_an_enqueued_trial_that_is_not_in_the_space_is_refused(
    values: dict[str, object], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    new_study().enqueue_trial(values)
    assert "which is not in the search space" in fail(capfd, *words)
    assert not list(FOLDER.glob("trial_*/command"))


@pytest.mark.parametrize(
    ("values", "distributions"),
    [
        ({"optim.lr": 0.8}, {"optim.lr": FloatDistribution(0.1, 0.9)}),
        (
            {"optim.lr": 0.2, "allow_targets": "[os]"},
            {"optim.lr": LR, "allow_targets": CategoricalDistribution(["[os]"])},
        ),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_stored_trial_that_waits_and_is_not_in_the_space_is_refused(
    values: dict[str, object], distributions: dict[str, BaseDistribution],
    words: list[str], capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trial = optuna.trial.create_trial(
        params=values, distributions=distributions, state=TrialState.WAITING
    )
    new_study().add_trial(trial)
    assert "which is not in the search space" in fail(capfd, *words)
    assert not list(FOLDER.glob("trial_*/command"))


@pytest.mark.thorough
def test_an_enqueued_trial_in_the_space_is_run(words: list[str]) -> None:
    new_study().enqueue_trial({"optim.lr": 0.3})
    assert main(words) == 0
    assert study().trials[0].params == {"optim.lr": 0.3}
