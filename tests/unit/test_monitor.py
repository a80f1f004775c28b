"""What the monitors promise to those who watch a run."""

import io
import json
import logging
import math
import os
import pty
import re
import select
import statistics
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest

from hybridtrain.monitor import (
    MetricsFile,
    Monitor,
    Monitors,
    Progress,
    TensorBoard,
    Throughput,
    log_handler,
)
from hybridtrain.monitor.timeline import Lanes


def run(
    monitor: Monitor,
    steps: range,
    *,
    total_steps: int | None = 100,
    first_step: int = 0,
    texts: Mapping[str, str] | None = None,
    values: Callable[[int], Mapping[str, float]] = lambda step: {"train/loss": step / 2},
) -> None:
    """What a training loop does with a monitor, every step logged."""
    monitor.start(total_steps=total_steps, first_step=first_step, texts=texts or {})
    for step in steps:
        monitor.step(step, 32)
        monitor.scalars(step, values(step))
    monitor.close()


# --- TensorBoard --------------------------------------------------------------------------------


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    """The points that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_every_scalar_under_its_tag(tmp_path: Path) -> None:
    def values(step: int) -> Mapping[str, float]:
        return {"train/loss": 0.5 * step, "stage0/forward_ms": 3.0 * step}

    run(TensorBoard(tmp_path), range(1, 4), values=values)
    assert curve(tmp_path, "train/loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert curve(tmp_path, "stage0/forward_ms") == [(1, 3.0), (2, 6.0), (3, 9.0)]


def test_tensorboard_shows_a_diverged_loss(tmp_path: Path) -> None:
    run(TensorBoard(tmp_path), range(1, 2), values=lambda _: {"train/loss": math.nan})
    ((_, value),) = curve(tmp_path, "train/loss")
    assert math.isnan(value)


# a library that tensorboard carries along
@pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
def test_tensorboard_shows_texts_as_they_are(tmp_path: Path) -> None:
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


def test_tensorboard_drops_what_an_interrupted_attempt_reported_after_the_checkpoint(
    tmp_path: Path,
) -> None:
    run(TensorBoard(tmp_path), range(1, 8), values=lambda _: {"train/loss": 1.0})
    # Logged less often now: points of the first attempt between the new ones must go as well.
    run(TensorBoard(tmp_path), range(6, 11, 2), first_step=4, values=lambda _: {"train/loss": 2.0})
    expected = [(step, 1.0) for step in (1, 2, 3, 4)] + [(step, 2.0) for step in (6, 8, 10)]
    assert curve(tmp_path, "train/loss") == expected


def test_tensorboard_starts_afresh_where_an_earlier_run_was(tmp_path: Path) -> None:
    run(TensorBoard(tmp_path), range(8), values=lambda _: {"eval/loss": 1.0})
    run(TensorBoard(tmp_path), range(2), values=lambda _: {"eval/loss": 2.0})
    assert curve(tmp_path, "eval/loss") == [(0, 2.0), (1, 2.0)]


def test_importing_the_monitors_does_not_import_tensorboard() -> None:
    source = "import sys, hybridtrain.monitor; print('tensorboard' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout
    assert output == "False\n"


# --- the metrics file ---------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, float | None]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_the_metrics_file_has_a_json_object_a_line(tmp_path: Path) -> None:
    before = time.time()
    run(MetricsFile(tmp_path / "run" / "metrics.jsonl"), range(1, 3))
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["train/loss"]) == (1, 0.5)
    assert (second["step"], second["train/loss"]) == (2, 1.0)
    assert before - 1 < (first["time"] or 0) < time.time() + 1


def test_the_metrics_file_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    monitor = MetricsFile(tmp_path / "metrics.jsonl")
    monitor.start(total_steps=None, first_step=0, texts={})
    monitor.scalars(1, {"train/loss": 0.5})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    monitor.close()


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
                MetricsFile(path).start(total_steps=None, first_step=4, texts={})
        assert len(lines(path)) == 7
    run(MetricsFile(path), range(5, 6), first_step=4)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]


def test_the_metrics_file_of_a_fresh_start_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path), range(5))
    run(MetricsFile(path), range(2))
    assert [line["step"] for line in lines(path)] == [0, 1]


# --- progress -----------------------------------------------------------------------------------


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


TRAINING = {
    "train/loss": 0.23124,
    "train/lr": 0.001,
    "train/samples_per_second": 1843.2,
    "train/grad_norm": 1.0,
}


def test_piped_progress_is_a_line_for_each_logged_step() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.start(total_steps=450, first_step=100, texts={"config": "not shown"})
    for step in range(101, 121):
        clock.now += 0.5
        progress.step(step, 32)
    progress.scalars(120, TRAINING)
    progress.scalars(120, {"stage0/forward_ms": 1.0})
    progress.scalars(225, {"eval/loss": 0.1021, "eval/accuracy": 0.9694})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 120/450  loss 0.2312  1,843 samples/s  lr 0.0010  left 2:45",
        "step 225/450  eval: loss 0.1021  accuracy 0.9694",
    ]


def test_piped_progress_without_a_known_end_or_a_first_step() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(total_steps=None, first_step=0, texts={})
    progress.scalars(0, {"eval/loss": 2.0})
    progress.scalars(3, {"train/loss": math.nan, "train/samples_per_second": 0.5})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 0  eval: loss 2.0000",
        "step 3  loss nan  0.5 samples/s",
    ]


@pytest.mark.parametrize(
    ("seconds_a_step", "left"), [(0.01, "left 0:01"), (1.0, "left 1:30"), (60.0, "left 1:30:00")]
)
def test_the_time_left_reads_as_a_clock(seconds_a_step: float, left: str) -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.start(total_steps=100, first_step=0, texts={})
    clock.now += 10 * seconds_a_step
    progress.scalars(10, {"train/loss": 1.0})
    assert stream.getvalue().strip().endswith(left)


@pytest.mark.parametrize(
    ("rate", "shown"), [(3e-5, "lr 3.00e-05"), (0.0, "lr 0.0000"), (0.0123, "lr 0.0123")]
)
def test_small_values_keep_their_digits(rate: float, shown: str) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(total_steps=None, first_step=0, texts={})
    progress.scalars(1, {"train/lr": rate})
    assert shown in stream.getvalue()


@contextmanager
def terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A stream that is a terminal, and a function that closes it and says what it was sent."""
    controller, terminal_side = pty.openpty()
    termios.tcsetwinsize(terminal_side, (24, 100))
    stream = os.fdopen(terminal_side, "w")
    received = bytearray()
    done = threading.Event()

    def read() -> None:
        while not done.is_set() or select.select([controller], [], [], 0)[0]:
            if select.select([controller], [], [], 0.02)[0]:
                received.extend(os.read(controller, 65536))

    reader = threading.Thread(target=read)
    reader.start()

    def finish() -> str:
        stream.flush()
        done.set()
        reader.join()
        return received.decode()

    try:
        yield stream, finish
    finally:
        finish()
        stream.close()
        os.close(controller)


def screen(sent: str) -> list[str]:
    """The lines a terminal shows after `sent`: a carriage return writes over the line."""
    shown, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\r\n\x1b]+", sent):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            shown += [""] * (row + 1 - len(shown))
        elif part == "\x1b[A":
            row -= 1
        else:
            line = shown[row].ljust(column)
            shown[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in shown]


def test_a_terminal_gets_a_bar_with_loss_rate_and_time_left() -> None:
    with terminal() as (stream, finish):
        progress = Progress(stream)
        progress.start(total_steps=10_000, first_step=9_000, texts={})
        for step in range(9_001, 9_021):
            time.sleep(0.02)
            progress.step(step, 32)
            if step == 9_010:
                progress.scalars(step, TRAINING)
        progress.close()
        (bar, *rest) = screen(finish())
    assert rest == [""]
    shown = re.fullmatch(
        r"9020/10000 \|.+\| loss 0\.2312  1,843 samples/s  lr 0\.0010  left (\d+):(\d+)", bar
    )
    assert shown is not None
    # 980 steps of 20 ms or more: the steps of before the resume took no time and must not count.
    assert 60 * int(shown[1]) + int(shown[2]) >= 15


def test_messages_do_not_tear_the_bar() -> None:
    with terminal() as (stream, finish):
        logger = logging.Logger("test")
        logger.addHandler(log_handler(stream))
        progress = Progress(stream)
        progress.start(total_steps=10, first_step=0, texts={})
        logger.warning("before the first step")
        progress.step(1, 32)
        progress.scalars(5, TRAINING)
        progress.step(5, 32)
        logger.warning("saved %s", "step_00000005")
        progress.scalars(5, {"eval/loss": 0.5})
        progress.step(10, 32)
        progress.close()
        logger.warning("after the end")
        shown = screen(finish())
    assert shown[:3] == [
        "before the first step",
        "saved step_00000005",
        "step 5/10  eval: loss 0.5000",
    ]
    assert shown[3].startswith("10/10 |")
    assert shown[4:] == ["after the end", ""]


def test_log_messages_come_out_as_they_are_when_piped() -> None:
    stream = io.StringIO()
    handler = log_handler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("disk %d%% full", 91)
    assert stream.getvalue() == "WARNING disk 91% full\n"


def test_a_step_costs_microseconds(tmp_path: Path) -> None:
    with terminal() as (stream, finish):
        monitor = Monitors(
            [TensorBoard(tmp_path), MetricsFile(tmp_path / "m.jsonl"), Progress(stream)]
        )
        monitor.start(total_steps=None, first_step=0, texts={})
        times = []
        for step in range(1, 5001):
            begin = time.perf_counter()
            monitor.step(step, 32)
            times.append(time.perf_counter() - begin)
        monitor.close()
        draws = finish().count("\r")
    assert draws < 100
    # The median, as a busy machine takes the time slice away now and then.
    assert statistics.median(times) < 50e-6


# --- throughput ---------------------------------------------------------------------------------


def test_throughput_leaves_pauses_out() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    for _ in range(4):
        clock.now += 0.25
        throughput.tick(32)
    with throughput.pause():
        clock.now += 100
    clock.now += 0.1
    with suppress(RuntimeError), throughput.pause():
        clock.now += 100
        raise RuntimeError("an evaluation that fails")
    clock.now += 0.15
    throughput.tick(32)
    assert throughput.summary() == pytest.approx((160, 128.0, 250.0, 250.0))


def test_throughput_of_an_interval_is_since_the_last_reading() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    for seconds in (0.5, 0.5):
        clock.now += seconds
        throughput.tick(10)
    assert throughput.read() == pytest.approx((20.0, 500.0))
    for seconds in (0.1, 0.3):
        clock.now += seconds
        throughput.tick(10)
    assert throughput.read() == pytest.approx((50.0, 200.0))
    assert throughput.summary().samples_per_second == pytest.approx(40 / 1.4)


def test_throughput_gives_exact_percentiles() -> None:
    numpy = pytest.importorskip("numpy")
    clock = Clock()
    throughput = Throughput(clock)
    milliseconds = [(37 * i) % 101 + 1 for i in range(90)]
    for duration in milliseconds:
        clock.now += duration / 1e3
        throughput.tick(1)
    summary = throughput.summary()
    assert summary.step_ms_p50 == pytest.approx(numpy.percentile(milliseconds, 50))
    assert summary.step_ms_p95 == pytest.approx(numpy.percentile(milliseconds, 95))


def test_throughput_of_a_run_without_steps_is_zero() -> None:
    throughput = Throughput()
    assert throughput.read() == (0.0, 0.0)
    assert throughput.summary() == (0, 0.0, 0.0, 0.0)


# --- all together -------------------------------------------------------------------------------


class Recorder:
    def __init__(self, calls: list[tuple[object, ...]], name: str, fails: bool = False) -> None:
        self.calls, self.name, self.fails = calls, name, fails

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        self.calls.append((self.name, "start", total_steps, first_step, dict(texts)))

    def step(self, step: int, samples: int) -> None:
        self.calls.append((self.name, "step", step, samples))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((self.name, "scalars", step, dict(values)))

    def timeline(self, step: int, predicted: Lanes, measured: Lanes) -> None:
        self.calls.append((self.name, "timeline", step))

    def close(self) -> None:
        self.calls.append((self.name, "close"))
        if self.fails:
            raise OSError("disk full")


def test_monitors_forward_every_call_to_each_in_order() -> None:
    calls: list[tuple[object, ...]] = []
    monitors = Monitors([Recorder(calls, "a"), Recorder(calls, "b")])
    run(monitors, range(3, 4), total_steps=9, first_step=2, texts={"config": "x"})
    assert [call[1:] for call in calls if call[0] == "a"] == [
        ("start", 9, 2, {"config": "x"}),
        ("step", 3, 32),
        ("scalars", 3, {"train/loss": 1.5}),
        ("close",),
    ]
    assert [call[0] for call in calls] == ["a", "b"] * 4


def test_every_monitor_is_closed_when_one_fails_at_it() -> None:
    calls: list[tuple[object, ...]] = []
    with pytest.raises(OSError, match="disk full"):
        Monitors([Recorder(calls, "a", fails=True), Recorder(calls, "b")]).close()
    assert calls == [("a", "close"), ("b", "close")]


def test_closing_twice_or_without_a_start_does_no_harm(tmp_path: Path) -> None:
    monitor = Monitors(
        [TensorBoard(tmp_path), MetricsFile(tmp_path / "m.jsonl"), Progress(io.StringIO())]
    )
    monitor.close()
    run(monitor, range(1, 2))
    monitor.close()
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("kind", [TensorBoard, MetricsFile])
def test_scalars_before_the_start_are_refused(
    tmp_path: Path, kind: type[TensorBoard] | type[MetricsFile]
) -> None:
    with pytest.raises(RuntimeError, match="start"):
        kind(tmp_path / "x").scalars(1, {"train/loss": 1.0})
