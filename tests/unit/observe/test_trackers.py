"""W&B, MLflow and the CSV file, by their own libraries; a tracker that hangs or fails."""

import csv
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.runs import RunOf
from support.stand_in_services import install
from support.wandb_files import offline_runs

from hybridtrain.errors import ConfigError, Interrupted
from hybridtrain.loop import Tracker, call_hook, trainer
from hybridtrain.observe import CSVFile, MLflow, QueuedTracker, WandB
from hybridtrain.schedule import Action, Span

CONFIG = "seed: 3\noptim:\n  lr: 0.1\n  betas: [0.9, 0.99]\n  eps: null\n"
TEXTS = {"config": CONFIG, "layout": "1 process", "overrides": "optim.lr: 0.1\n"}


def attempt(
    tracker: Tracker, steps: range, *, first_step: int = 0, loss: float = 1.0, ends: bool = True
) -> None:
    """An attempt of a run in which every step is logged; one that is killed is never complete."""
    tracker.patience_s = 300  # a busy machine is no server that is away
    run = RunOf(first_step, texts=TEXTS)
    tracker.on_start(run)
    for run.step in steps:
        tracker.on_log(run, {"train/loss": loss})
    if ends:
        spans = [[Span(Action("F", 0, 0), 0.0, 1.0)]]
        tracker.on_evaluate(run, {"loss": loss / 2})
        tracker.on_timeline(run, spans, spans)
        run.finished = True
        run.results = {"steps": run.step, "step_ms": {"p50": 2.0}, "eval": None}
    tracker.on_end(run)


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_a_resumed_run_goes_on_in_the_run_of_its_service(
    tracker: type[QueuedTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = install(tracker.package, monkeypatch)
    known = f"sqlite:///{tmp_path}/a.db"
    settings = {"tracking_uri": known} if tracker is MLflow else {}
    for steps, first in ((range(1, 6), 0), (range(5, 8), 4)):
        run = tracker(tmp_path, **settings)
        run.patience_s = 300
        at = RunOf(first, texts=TEXTS)
        run.on_start(at)
        for at.step in steps:
            run.on_log(at, {"train/loss": 1.0 + first})
        run.on_end(at)
    ((name, points),) = service.points.items()
    assert points == [
        *((n, {"train/loss": 1.0}) for n in range(1, 6)),
        *((n, {"train/loss": 5.0}) for n in (6, 7)),  # a service drops no point
    ]
    assert service.states == {name: "FINISHED"}


# --- Weights & Biases ---------------------------------------------------------------------------


@pytest.mark.thorough
def test_wandb_has_the_run_and_a_resumed_one_goes_on_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "lr_0.1"
    run.mkdir()
    for steps, first in ((range(1, 6), 0), (range(5, 8), 4)):
        wandb = WandB(run, group="a sweep", tags=["b"])
        attempt(wandb, steps, first_step=first, ends=first > 0)
        assert wandb.patience_s == 5, "the end of an offline run waits for no service"
    before, after = offline_runs(run)
    assert before.run.run_id == after.run.run_id
    assert (after.run.display_name, after.run.project) == ("lr_0.1", "hybridtrain")
    assert (after.run.run_group, list(after.run.tags)) == ("a sweep", ["b"])
    assert after.config["optim"] == {"lr": 0.1, "betas": [0.9, 0.99], "eps": None}
    assert after.config["overrides"] == {"optim.lr": 0.1}
    assert [(row["_step"], row["train/loss"]) for row in before.rows] == [
        (step, 1) for step in range(1, 6)
    ]
    assert [row["_step"] for row in after.rows] == [5, 6, 7]
    last = after.rows[-1]
    assert (last["eval/loss"], last["summary/step_ms/p50"], last["summary/steps"]) == (0.5, 2, 7)
    assert last["timeline/_type"] == "image-file"


# --- MLflow -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_mlflow_has_the_run_and_a_resumed_one_continues_its_curves(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run = tmp_path / "lr_0.1"
    run.mkdir()
    attempt(MLflow(run, group="a sweep", tags={"team": 7}), range(1, 6), ends=False)
    attempt(MLflow(run), range(4, 8), first_step=3, loss=2.0)
    assert {path.name for path in tmp_path.iterdir()} == {"lr_0.1", "mlflow.db", "mlruns"}
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("hybridtrain")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("lr_0.1", "FINISHED")
    assert (found.data.tags["group"], found.data.tags["team"]) == ("a sweep", "7")
    assert found.data.params == {"seed": "3", "optim.lr": "0.1", "optim.betas": "[0.9, 0.99]"}

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(p.step, p.value) for p in client.get_metric_history(found.info.run_id, tag)]

    # MLflow cannot drop a point: those after the resumed step are the first attempt's
    assert curve("train/loss") == [*((n, 1.0) for n in range(1, 6)), (6, 2.0), (7, 2.0)]
    assert curve("eval/loss") == [(7, 1.0)]
    assert curve("summary/step_ms/p50") == [(7, 2.0)]
    files = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert files == {"config.yaml", "layout.txt", "overrides.yaml", "timeline.png"}


@pytest.mark.thorough
def test_mlflow_begins_a_new_run_where_a_run_begins_anew(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path / 'own.db'}"
    for _ in range(2):
        attempt(MLflow(tmp_path, store, experiment="a"), range(1, 2), ends=False)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("a")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 2


@pytest.mark.thorough
def test_mlflow_leaves_nothing_in_the_working_directory_with_a_database_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "outputs/run"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'own.db'}")
    attempt(MLflow(tmp_path / "outputs/run"), range(1, 2))
    assert not list((tmp_path / "here").iterdir())
    assert list((tmp_path / "outputs" / "mlruns").rglob("timeline.png"))


# --- the CSV file -------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "time"} for row in csv.DictReader(file)]


def test_the_csv_file_has_a_column_for_each_tag_whenever_it_appears(tmp_path: Path) -> None:
    tracker = CSVFile(tmp_path / "metrics.csv")
    tracker.on_start(RunOf())
    tracker.on_log(RunOf(1), {"train/loss": 0.1})
    tracker.on_evaluate(RunOf(1), {"loss": float("nan")})
    tracker.on_log(RunOf(2), {"train/loss": 1e-30, "eval/a,b": 2})
    assert rows(tmp_path / "metrics.csv") == [  # also while the run goes on
        {"step": "1", "train/loss": "0.1", "eval/loss": "", "eval/a,b": ""},
        {"step": "1", "train/loss": "", "eval/loss": "nan", "eval/a,b": ""},
        {"step": "2", "train/loss": "1e-30", "eval/loss": "", "eval/a,b": "2"},
    ]
    tracker.on_end(RunOf(2))


@pytest.mark.parametrize("torn", ["", "7,1.0", "\0\0\n", "7,1,2,3,4\n", ",,\n", "\udcff\n"])
def test_the_csv_file_reads_as_one_run_after_a_resume(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.csv"
    attempt(CSVFile(path), range(1, 8))
    with path.open("ab") as file:
        file.write(torn.encode(errors="surrogateescape"))
    tracker = CSVFile(path)
    tracker.on_start(RunOf(4))
    tracker.on_evaluate(RunOf(4), {"loss": 3.0})
    tracker.on_evaluate(RunOf(4), {"loss": 4.0})  # the evaluation of that step, done again
    tracker.on_log(RunOf(5), {"train/loss": 2.0})
    tracker.on_end(RunOf(5))
    assert [(row["step"], row["train/loss"], row["eval/loss"]) for row in rows(path)] == [
        *[(str(step), "1.0", "") for step in (1, 2, 3, 4)],
        ("4", "", "4.0"),
        ("5", "2.0", ""),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_the_csv_file_of_a_fresh_start_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    attempt(CSVFile(path), range(1, 5), ends=False)
    attempt(CSVFile(path), range(1, 2), ends=False)
    assert [row["step"] for row in rows(path)] == ["1"]


# --- a service that is slow, away or not installed ----------------------------------------------


class Service(QueuedTracker):
    """A tracker whose service is `yaml`, and waits for `answer`, or refuses."""

    package = "yaml"
    patience_s = 0.05

    def __init__(self, directory: Path, answers: bool = True, refuses: bool = False) -> None:
        super().__init__(directory)
        self.answer = threading.Event()
        self.refuses = refuses
        if answers:
            self.answer.set()

    def begin(self, run_id: str | None, config: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        self.answer.wait()
        if self.refuses:
            raise ConnectionError("nobody there\nSELECT * FROM runs")
        return "id"

    def values(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def finish(self) -> None:
        pass


def test_a_service_that_does_not_answer_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(tmp_path, answers=False)
    call_hook(service, "on_start", RunOf())
    for step in range(3):
        call_hook(service, "on_log", RunOf(step), {"train/loss": 1.0})
    call_hook(service, "on_end", RunOf(3))
    service.answer.set()
    (message,) = caplog.messages
    assert re.match(r"Service .*: TimeoutError: ", message)


def test_the_end_of_an_interrupted_run_waits_for_all_services_less_than_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Hanging:
        def join(self, timeout: float) -> None:
            nonlocal now
            now += timeout

        def is_alive(self) -> bool:
            return True

    monkeypatch.setattr("hybridtrain.observe.trackers.queued.monotonic", lambda: now)
    services = [Service(tmp_path), Service(tmp_path)]
    for service in services:
        service.patience_s = 30
        service._thread = Hanging()
        service.on_exception(RunOf(), Interrupted("by SIGTERM"))
    for service in services:
        with pytest.raises(TimeoutError):
            service.on_end(RunOf())
    assert now < trainer._WAIT_FOR_OTHERS_S


def test_a_tracker_makes_the_directory_of_a_run_in_python(tmp_path: Path) -> None:
    service = Service(tmp_path / "runs" / "a")
    attempt(service, range(1, 2), ends=False)
    assert (tmp_path / "runs" / "a" / "yaml.id").read_text() == "id\n"


def test_a_service_that_refuses_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(tmp_path, refuses=True)
    call_hook(service, "on_start", RunOf())
    while service._error is None:
        time.sleep(0.001)
    for step in range(3):
        call_hook(service, "on_log", RunOf(step), {"train/loss": 1.0})
    call_hook(service, "on_end", RunOf(3))
    (message,) = caplog.messages
    assert re.fullmatch(r"Service .*: ConnectionError: nobody there", message)


def test_an_abandoned_run_does_not_end_the_reports_of_the_next_one(tmp_path: Path) -> None:
    begun: SimpleQueue[threading.Event] = SimpleQueue()

    class Refusing(Service):
        def begin(self, *_: Any) -> str:
            begun.put(answer := threading.Event())
            answer.wait()
            raise ConnectionError("nobody there")

    service = Refusing(tmp_path)
    service.on_start(RunOf())
    first, thread = begun.get(timeout=30), service._thread
    service.abandon()
    service.on_start(RunOf())
    second = begun.get(timeout=30)
    first.set()  # the service refuses the first run while the second one begins
    assert thread is not None
    thread.join(30)
    service.on_log(RunOf(1), {"train/loss": 1.0})
    second.set()


def test_reports_that_nobody_takes_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtrain.observe.trackers.queued._MOST_WAITING", 3)
    service = Service(tmp_path, answers=False)
    service.on_start(RunOf())
    while service._waiting.qsize() < 3:  # the thread has taken the first
        service.on_log(RunOf(1), {"train/loss": 1.0})
    with pytest.raises(TimeoutError, match="3 reports are waiting"):
        service.on_log(RunOf(2), {"train/loss": 1.0})
    service.answer.set()


def test_a_tracker_without_its_package_names_the_extra(tmp_path: Path) -> None:
    class Away(Service):
        package = "not_installed"

    with pytest.raises(ConfigError, match=r"pip install 'hybridtrain\[not_installed\]'"):
        Away(tmp_path)


def test_ending_a_tracker_twice_or_without_a_start_does_no_harm(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.on_end(RunOf(finished=True))
    attempt(service, range(1, 2), ends=False)
    service.on_end(RunOf(finished=True))
    with pytest.raises(RuntimeError, match="start"):
        service.on_log(RunOf(1), {"train/loss": 1.0})
