"""TensorBoard and the metrics file, and what they do when they cannot write."""

import gc
import io
import json
import math
import os
import pkgutil
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.runs import RunOf

from hybridtrain.loop import CALLBACKS, Callback, Tracker, call_hook
from hybridtrain.observe import TRACKERS, MetricsFile, Progress, TensorBoard, TimelineFiles
from hybridtrain.schedule import Account, Action, Span, Spans


def run(
    tracker: Tracker,
    steps: range,
    *,
    total_steps: int | None = 100,
    first_step: int = 0,
    texts: Mapping[str, str] | None = None,
    values: Callable[[int], Mapping[str, float]] = lambda step: {"train/loss": step / 2},
) -> None:
    """Calls a tracker as a training loop does, every step logged."""
    run = RunOf(first_step, total_steps, texts or {})
    tracker.on_start(run)
    for run.step in steps:
        tracker.on_step(run, 32)
        tracker.on_log(run, values(run.step))
    tracker.on_end(run)


# --- TensorBoard --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def event_files_sort_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers a process's event files from 0: of one second, the 10th sorts before the 9th."""
    from tensorboard.summary.writer import event_file_writer

    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    """Returns the points that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_every_scalar_under_its_tag(tmp_path: Path) -> None:
    def values(step: int) -> Mapping[str, float]:
        return {"train/loss": 0.5 * step, "stage0/forward_ms": 3.0 * step}

    run(TensorBoard(tmp_path), range(1, 4), values=values)
    assert curve(tmp_path, "1_overview/train_loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert curve(tmp_path, "3_stages/forward_ms/0") == [(1, 3.0), (2, 6.0), (3, 9.0)]


def test_tensorboard_shows_a_diverged_loss(tmp_path: Path) -> None:
    run(TensorBoard(tmp_path), range(1, 2), values=lambda _: {"train/loss": math.nan})
    ((_, value),) = curve(tmp_path, "1_overview/train_loss")
    assert math.isnan(value)


# a library inside tensorboard
@pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
def test_tensorboard_shows_texts_unchanged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    config = "model:\n  _target_: a.B\n\n  note: '```'  # *not* markup\n"
    run(TensorBoard(tmp_path), range(0), texts={"config": config})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("config/text_summary")
    html = markdown_to_safe_html(event.tensor_proto.string_val[0])
    inside = re.search("<pre><code>(.*)</code></pre>", html, re.DOTALL)
    assert inside is not None
    assert inside[1] == config


def test_tensorboard_drops_points_of_an_interrupted_attempt_after_the_checkpoint(
    tmp_path: Path,
) -> None:
    run(TensorBoard(tmp_path), range(1, 8), values=lambda _: {"train/loss": 1.0})
    # logged less often now: points of the first attempt between the new ones must go as well
    run(TensorBoard(tmp_path), range(6, 11, 2), first_step=4, values=lambda _: {"train/loss": 2.0})
    expected = [(step, 1.0) for step in (1, 2, 3, 4)] + [(step, 2.0) for step in (6, 8, 10)]
    assert curve(tmp_path, "1_overview/train_loss") == expected


def test_tensorboard_lists_the_config_and_has_one_chart_for_all_stages(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2

    config = "seed: 3\noptim:\n  lr: 0.1\n  betas: [0.9, 0.99]\n  eps: null\n"
    run(
        TensorBoard(tmp_path),
        range(1, 3),
        texts={"config": config},
        values=lambda _: {"stage11/forward_ms": 1.0, "pipeline/bubble_fraction": 0.1},
    )
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["3_stages/forward_ms/11", "2_time/pipeline_idle_percent"]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: value.WhichOneof("kind") for name, value in found.items()} == {
        "seed": "number_value",
        "optim.lr": "number_value",
        "optim.betas": "string_value",
    }
    (entry,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(entry.tensor_proto.string_val[0])
    charts = {c.title: list(c.multiline.tag) for group in layout.category for c in group.chart}
    (pattern,) = charts["forward, ms per micro-batch"]
    assert re.fullmatch(pattern, "3_stages/forward_ms/11")


def test_tensorboard_compares_runs_by_what_their_commands_set(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    overrides = "recipe: digits\noptim.lr: 0.1\nrun_name: a\npipeline.chunks: 8\n"
    overrides += "trainer.log_every: 5\ncheckpoint.keep: 2\n"  # no run learns more or less by these
    texts = {"config": "seed: 3\n", "overrides": overrides}
    run(TensorBoard(tmp_path), range(1, 3), texts=texts)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert set(found) == {"optim.lr", "pipeline.chunks"}


def test_tensorboard_says_what_a_curve_is_and_shows_the_account_in_percent(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {f"account/{name}_ms": 0.0 for name in Account._fields}
    values |= {"account/forward_ms": 6.0, "account/bubble_ms": 2.0, "stage0/memory_bytes": 2.0**21}
    run(TensorBoard(tmp_path), range(1, 3), values=lambda _: values)
    assert curve(tmp_path, "2_time/forward_percent") == [(1, 75.0), (2, 75.0)]
    assert curve(tmp_path, "2_time/bubble_percent") == [(1, 25.0), (2, 25.0)]
    assert curve(tmp_path, "3_stages/memory_mib/0") == [(1, 2.0), (2, 2.0)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "MiB" in events.SummaryMetadata("3_stages/memory_mib/0").summary_description


def test_tensorboard_shows_what_is_used_of_the_devices_and_the_slowest_replica(
    tmp_path: Path,
) -> None:
    values = {"train/mfu": 0.25, "stage0/memory_percent": 30.0, "stage1/memory_percent": 40.0}
    values |= {"replicas/slowest": 1.0, "replicas/slowest_ms": 9.0, "replicas/mean_ms": 8.0}
    run(TensorBoard(tmp_path), range(1, 2), values=lambda _: {**values, "lr/head": 0.5})
    for tag, value in {
        "1_overview/used_mfu_percent": 25.0,
        "1_overview/used_device_memory_percent": 40.0,
        "3_stages/memory_percent/0": 30.0,
        "2_time/replica_slowest": 1.0,
        "2_time/replica_slowest_ms": 9.0,
        "2_time/replica_mean_ms": 8.0,
        "4_optimizer/lr/head": 0.5,
    }.items():
        assert curve(tmp_path, tag) == [(1, value)]


def test_tensorboard_has_a_column_for_each_of_the_first_devices(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    parts = {**dict.fromkeys(Account._fields, 1.0), "recompute": 0.0}
    devices = [{"replica": i, "device": 0, **parts} for i in range(20)]
    tracker, run = TensorBoard(tmp_path), RunOf()
    tracker.on_start(run)
    run.step, run.account = 1, {"mean": parts, "devices": devices}
    run.advice = ["what to change"]
    tracker.on_timeline(run, spans(), spans())
    tracker.on_end(run)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("a step's time, by device/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("- what to change\n")
    assert "| forward | 1.00 (10%) | 1.00 (10%) |" in text
    assert "| step | 10.00 | 10.00 |" in text
    assert "recompute" not in text
    assert "replica 11, device 0" in text
    assert "replica 12, device 0" not in text
    assert "8 more devices are in summary.json" in text


def test_tensorboard_drops_all_points_of_an_earlier_run_on_a_fresh_start(tmp_path: Path) -> None:
    run(TensorBoard(tmp_path), range(8), values=lambda _: {"eval/loss": 1.0})
    run(TensorBoard(tmp_path), range(2), values=lambda _: {"eval/loss": 2.0})
    assert curve(tmp_path, "1_overview/eval_loss") == [(0, 2.0), (1, 2.0)]


@pytest.mark.thorough
def test_importing_tensorboards_tracker_does_not_import_tensorboard() -> None:
    source = "import sys; from hybridtrain.observe.trackers import TensorBoard\n"
    source += "print('tensorboard' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout
    assert output == "False\n"


# --- the metrics file ---------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, float | None]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_the_metrics_file_has_a_json_object_per_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    run(MetricsFile(tmp_path / "run" / "metrics.jsonl"), range(1, 3))
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["train/loss"]) == (1, 0.5)
    assert (second["step"], second["train/loss"]) == (2, 1.0)
    assert first["time"] == 1.7e9


def test_the_metrics_file_can_be_read_during_the_run(tmp_path: Path) -> None:
    tracker = MetricsFile(tmp_path / "metrics.jsonl")
    tracker.on_start(RunOf())
    tracker.on_log(RunOf(1), {"train/loss": 0.5})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    tracker.on_end(RunOf(1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_metrics_file_stays_json_when_the_loss_diverges(tmp_path: Path, value: float) -> None:
    run(MetricsFile(tmp_path / "m.jsonl"), range(1, 2), values=lambda _: {"train/loss": value})
    (line,) = lines(tmp_path / "m.jsonl")
    assert line["train/loss"] is None


@pytest.mark.parametrize(
    "torn",
    ["", '{"step": 4, "time": 17', '{"step": 3, "time": 1.0}', "\0\0\0\0\n", "[]\n", "\udcff\n"],
    ids=["whole", "half", "no-newline", "zeros", "no-object", "no-text"],
)
def test_the_metrics_file_reads_as_one_run_after_a_resume(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path), range(8), values=lambda _: {"train/loss": 1.0})
    with open(path, "ab") as file:
        file.write(torn.encode(errors="surrogateescape"))
    run(MetricsFile(path), range(5, 8), first_step=4, values=lambda _: {"train/loss": 2.0})
    assert [(line["step"], line["train/loss"]) for line in lines(path)] == [
        *[(step, 1.0) for step in (0, 1, 2, 3, 4)],
        *[(step, 2.0) for step in (5, 6, 7)],
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_the_metrics_file_survives_a_kill_while_it_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path), range(1, 8))
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                MetricsFile(path).on_start(RunOf(4))
        assert len(lines(path)) == 7
    run(MetricsFile(path), range(5, 6), first_step=4)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]


def test_the_metrics_file_of_a_fresh_start_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path), range(5))
    run(MetricsFile(path), range(2))
    assert [line["step"] for line in lines(path)] == [0, 1]


def test_the_metrics_file_has_the_evaluation_of_a_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path), range(1, 3), values=lambda _: {"train/loss": 1.0})
    for value in (2.0, 3.0):
        again = {"eval/loss": value}
        run(MetricsFile(path), range(2, 3), first_step=2, values=lambda _: again)  # noqa: B023
    assert [(line["step"], line.get("eval/loss")) for line in lines(path)] == [
        (1, None), (2, None), (2, 3.0),
    ]  # fmt: skip


# --- what cannot be written ---------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets no file grow, as a full disk does; pytest's own output may be such a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def spans() -> Spans:
    return [[Span(Action("F", 0, 0), 0.0, 1.0), Span(Action("B", 0, 0), 1.0, 3.0)]]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [MetricsFile, TensorBoard, TimelineFiles])
def test_a_full_disk_is_one_warning_and_training_goes_on(
    tmp_path: Path, kind: type[Tracker], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl" if kind is MetricsFile else tmp_path
    with full_disk():
        tracker, run = kind(path), RunOf()  # type: ignore[call-arg]
        call_hook(tracker, "on_start", run)
        for run.step in range(1, 40):
            call_hook(tracker, "on_log", run, {"train/loss": 1.0})
            call_hook(tracker, "on_timeline", run, spans(), spans())
            time.sleep(0.005)  # TensorBoard writes in a thread
        call_hook(tracker, "on_end", run)
    (warning,) = caplog.messages
    assert re.match(rf"{kind.__name__} .*: OSError: ", warning)


@pytest.mark.parametrize("kind", [MetricsFile, TimelineFiles])
def test_a_directory_that_has_gone_is_one_warning(
    tmp_path: Path, kind: type[Tracker], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "metrics.jsonl" if kind is MetricsFile else folder
    tracker, run = kind(path), RunOf()  # type: ignore[call-arg]
    call_hook(tracker, "on_start", run)
    shutil.rmtree(folder)
    for run.step in range(1, 4):
        call_hook(tracker, "on_log", run, {"train/loss": 1.0})
        call_hook(tracker, "on_timeline", run, spans(), spans())
    call_hook(tracker, "on_end", run)
    assert len(caplog.messages) == 1
    assert str(folder) in caplog.messages[0]


class Gone(io.StringIO):
    """A terminal that is closed, or a pipe that nobody reads."""

    def __init__(self, error: Exception, tty: bool) -> None:
        super().__init__()
        self.error, self.tty, self.closed_now = error, tty, False

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        if self.closed_now:
            raise type(self.error)(*self.error.args)  # its traceback holds the bar
        return len(text)


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file."), OSError(5)],
)
def test_a_closed_terminal_or_pipe_is_one_warning(
    error: Exception, tty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Gone(error, tty)
    tracker, run = Progress(stream), RunOf(total_steps=99)
    call_hook(tracker, "on_start", run)
    stream.closed_now = True
    for run.step in range(1, 40):
        call_hook(tracker, "on_step", run, 4)
        call_hook(tracker, "on_log", run, {"train/loss": 1.0})
        call_hook(tracker, "on_evaluation_batch", run, run.step, 40)
        time.sleep(0.005)
    call_hook(tracker, "on_evaluate", run, {"loss": 1.0})
    call_hook(tracker, "on_end", run)
    del tracker
    gc.collect()
    assert len(caplog.messages) == 1


# --- every tracker ------------------------------------------------------------------------------


def test_an_evaluation_is_logged_with_its_tags(tmp_path: Path) -> None:
    tracker, run = MetricsFile(tmp_path / "metrics.jsonl"), RunOf()
    tracker.on_start(run)
    tracker.on_evaluate(run, {"loss": 2.0, "accuracy": 0.5, "samples": 11})
    tracker.on_end(run)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line.keys() - {"step", "time"} == {"eval/loss", "eval/accuracy"}


def test_ending_twice_or_without_a_start_does_no_harm(tmp_path: Path) -> None:
    trackers: list[Tracker] = [
        TensorBoard(tmp_path), MetricsFile(tmp_path / "m.jsonl"), Progress(io.StringIO()),
    ]  # fmt: skip
    for tracker in trackers:
        tracker.on_end(RunOf())
        run(tracker, range(1, 2))
        tracker.on_end(RunOf(1))
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("kind", [TensorBoard, MetricsFile])
def test_values_before_the_start_are_refused(
    tmp_path: Path, kind: type[TensorBoard] | type[MetricsFile]
) -> None:
    with pytest.raises(RuntimeError, match="start"):
        kind(tmp_path / "x").on_log(RunOf(1), {"train/loss": 1.0})


@pytest.mark.thorough
def test_only_the_trackers_of_a_run_are_imported() -> None:
    source = "import sys, hybridtrain.observe\n"
    source += "print(*(name for name in sys.modules if name.startswith('hybridtrain.observe.tr')))"
    output = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout
    for name in ("wandb", "mlflow", "tensorboard"):
        assert f"trackers.{name}" not in output


def test_what_a_config_can_name_is_a_tracker_or_a_callback() -> None:
    trackers = {name: tracker.path for name, tracker in TRACKERS.items()}
    for names, base in ((trackers, Tracker), (CALLBACKS, Callback)):
        for path in names.values():
            assert issubclass(pkgutil.resolve_name(path), base)
