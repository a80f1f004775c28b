"""Progress and throughput: what a terminal, a log file and the summary show."""

import errno
import io
import logging
import math
import multiprocessing
import os
import pty
import re
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import pytest
from support.clock import Clock
from support.runs import RunOf
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from hybridtrain.cli.run import directory as run_directory  # noqa: F401, it sets the lock of the terminal's lines
from hybridtrain.loop import Throughput
from hybridtrain.observe import Progress

# --- progress -----------------------------------------------------------------------------------


TRAINING = {
    "train/loss": 0.23124,
    "train/lr": 0.001,
    "train/samples_per_second": 1843.2,
    "train/grad_norm": 1.0,
}


def test_piped_progress_is_a_line_per_logged_step() -> None:
    stream, clock = io.StringIO(), Clock(1000.0)
    progress = Progress(stream, clock)
    progress.on_start(RunOf(100, total_steps=450, texts={"config": "not shown"}))
    for step in range(101, 121):
        clock.now += 0.5
        progress.on_step(RunOf(step), 32)
    progress.on_log(RunOf(120), TRAINING)
    progress.on_log(RunOf(120), {"stage0/forward_ms": 1.0})
    progress.on_log(RunOf(225), {"eval/loss": 0.1021, "eval/accuracy": 0.9694})
    progress.on_end(RunOf())
    assert stream.getvalue().splitlines() == [
        "step 120/450  loss 0.2312  1,843 samples/s  lr 1.00e-03  left 02:45",
        "step 225/450  eval: loss 0.1021  accuracy 0.9694",
    ]


def test_piped_progress_without_a_known_end_or_a_first_step() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.on_start(RunOf())
    progress.on_log(RunOf(0), {"eval/loss": 2.0})
    progress.on_log(RunOf(3), {"train/loss": math.nan, "train/samples_per_second": 0.5})
    progress.on_end(RunOf())
    assert stream.getvalue().splitlines() == [
        "step 0  eval: loss 2.0000",
        "step 3  loss nan  0.5 samples/s",
    ]


@pytest.mark.parametrize(
    ("seconds_per_step", "left"),
    [(0.01, "left 00:01"), (1.0, "left 01:30"), (60.0, "left 1:30:00")],
)
def test_the_time_left_reads_as_a_clock(seconds_per_step: float, left: str) -> None:
    stream, clock = io.StringIO(), Clock(1000.0)
    progress = Progress(stream, clock)
    progress.on_start(RunOf(total_steps=100))
    clock.now += 10 * seconds_per_step
    progress.on_log(RunOf(10), {"train/loss": 1.0})
    assert stream.getvalue().strip().endswith(left)


@pytest.mark.parametrize(
    ("rate", "shown"), [(3e-5, "lr 3.00e-05"), (0.0, "lr 0.00e+00"), (0.0123, "lr 1.23e-02")]
)
def test_learning_rates_have_one_format_in_all_lines(rate: float, shown: str) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.on_start(RunOf())
    progress.on_log(RunOf(1), {"train/lr": rate})
    assert shown in stream.getvalue()


@contextmanager
def terminal(columns: int = 100) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Yields a terminal's stream, and a function that ends it and returns what it received."""
    controller, terminal_side = pty.openpty()
    termios.tcsetwinsize(terminal_side, (24, columns))
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
    """Returns the lines that a terminal shows after `sent`."""
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
        progress.on_start(RunOf(9_000, total_steps=10_000))
        for step in range(9_001, 9_021):
            progress.on_step(RunOf(step), 32)
            if step == 9_010:
                progress.on_log(RunOf(step), TRAINING)
        progress.on_end(RunOf())
        (bar, *rest) = screen(finish())
    assert rest == [""]
    shown = re.fullmatch(
        r"9020/10000 \|.+\| loss 0\.2312  1,843 samples/s  lr 1\.00e-03  left \d+:\d+", bar
    )
    assert shown is not None


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            120,
            r"120/450 \|.{9,}\| epoch 1\.50  loss 0\.2312  1,843 samples/s  lr 1\.00e-03  "
            r"messages 100%  left \d+:\d+",
        ),
        (80, r"120/450 \|.{4,}\| loss 0\.2312  1,843 samples/s  lr 1\.00e-03  left \d+:\d+"),
        (60, r"120/450 \|.{4,}\| loss 0\.2312  1,843 samples/s  lr 1\.00e-03"),
        (50, r"120/450 \|.{4,}\| loss 0\.2312  lr 1\.00e-03"),
        (30, r"120/450 \|.{4,}\| loss 0\.2312"),
        (22, r"120/450  loss 0\.2312"),
    ],
)
def test_a_narrow_terminal_keeps_the_loss_and_the_rates_whole(columns: int, line: str) -> None:
    with terminal(columns) as (stream, finish):
        progress = Progress(stream)
        progress.on_start(RunOf(100, total_steps=450))
        progress.on_log(RunOf(119), {**TRAINING, "train/epoch": 1.5, "account/messages_ms": 5.0})
        progress.on_step(RunOf(120), 32)
        progress.on_end(RunOf())
        (bar, *_) = screen(finish())
    assert re.fullmatch(line, bar), bar
    assert len(bar) <= columns


def test_log_messages_appear_above_the_bar() -> None:
    with terminal() as (stream, finish):
        logger = logging.Logger("test")
        logger.addHandler(logging.StreamHandler(DummyTqdmFile(stream)))
        progress = Progress(stream)
        progress.on_start(RunOf(total_steps=10))
        logger.warning("before the first step")
        progress.on_step(RunOf(1), 32)
        progress.on_log(RunOf(5), TRAINING)
        progress.on_step(RunOf(5), 32)
        logger.warning("saved %s", "step_00000005")
        progress.on_log(RunOf(5), {"eval/loss": 0.5})
        progress.on_step(RunOf(10), 32)
        progress.on_end(RunOf())
        logger.warning("after the end")
        shown = screen(finish())
    assert shown[:3] == [
        "before the first step",
        "saved step_00000005",
        "step 5/10  eval: loss 0.5000",
    ]
    assert shown[3].startswith("10/10 |")
    assert shown[4:] == ["after the end", ""]


def test_log_messages_are_unchanged_when_piped() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(DummyTqdmFile(stream))
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("disk %d%% full", 91)
    assert stream.getvalue() == "WARNING disk 91% full\n"


def test_the_bar_is_drawn_by_the_clock_and_not_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tqdm.std.time", lambda: 0.0)
    with terminal() as (stream, finish):
        progress = Progress(stream)
        progress.on_start(RunOf())
        for step in range(1, 5001):
            progress.on_step(RunOf(step), 32)
        progress.on_end(RunOf())
        draws = finish().count("\r")
    assert draws < 10


class LostTerminal(io.StringIO):
    """A terminal whose connection breaks."""

    is_lost = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_lost:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return super().write(text)


def test_a_bar_on_a_lost_terminal_blocks_no_other_thread() -> None:
    stream = LostTerminal()
    progress = Progress(stream)
    progress.on_start(RunOf())
    stream.is_lost = True
    bar = progress._bar
    assert bar is not None
    for draw in (bar.refresh, bar.clear, lambda: progress.on_log(RunOf(5), TRAINING)):
        with suppress(OSError):
            draw()
        assert is_free_for_other_threads(tqdm.get_lock())
    progress.abandon()


def is_free_for_other_threads(lock: threading.RLock) -> bool:
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=5))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


# --- throughput ---------------------------------------------------------------------------------


def test_throughput_leaves_pauses_out() -> None:
    clock = Clock(1000.0)
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
    assert throughput.summary() == pytest.approx((128.0, 250.0, 250.0, 0.0))


def test_throughput_of_an_interval_is_since_the_last_reading() -> None:
    clock = Clock(1000.0)
    throughput = Throughput(clock)
    for seconds in (0.5, 0.5):
        clock.now += seconds
        throughput.tick(10)
    assert throughput.read() == pytest.approx((20.0, 500.0, 0.0))
    for seconds in (0.1, 0.3):
        clock.now += seconds
        throughput.tick(10, 10 * 7)
    assert throughput.read() == pytest.approx((50.0, 200.0, 350.0))
    assert throughput.summary().samples_per_second == pytest.approx(40 / 1.4)
    assert throughput.summary().tokens_per_second == pytest.approx(140 / 1.4)


def test_throughput_gives_exact_percentiles() -> None:
    clock = Clock(1000.0)
    throughput = Throughput(clock)
    for i in range(101):  # 1 to 101 milliseconds, in no order
        clock.now += ((37 * i) % 101 + 1) / 1e3
        throughput.tick(1)
    summary = throughput.summary()
    assert summary.step_ms_p50 == pytest.approx(51)
    assert summary.step_ms_p95 == pytest.approx(96)


def test_throughput_of_a_run_without_steps_is_zero() -> None:
    throughput = Throughput()
    assert throughput.read() == (0.0, 0.0, 0.0)
    assert throughput.summary() == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked there")
def test_a_killed_worker_does_not_keep_the_lock_of_the_terminal() -> None:
    def take_it_and_die() -> None:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    with tqdm.get_lock():  # in the parent, as another thread may when a worker is forked
        worker = multiprocessing.get_context("fork").Process(target=take_it_and_die)
        worker.start()
        worker.join(10)
    assert worker.exitcode == -signal.SIGKILL
    assert tqdm.get_lock().acquire(timeout=5)
    tqdm.get_lock().release()
