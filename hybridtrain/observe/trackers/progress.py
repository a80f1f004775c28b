"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, TextIO

from tqdm import tqdm

from hybridtrain._base.text_table import in_one_line
from hybridtrain.loop import Run, Tracker, parts_of_account
from hybridtrain.observe.confusion import is_confusion
from hybridtrain.schedule import COMPUTING

_BAR = "{n_fmt}/{total_fmt} |{bar}| {desc}"
_NO_BAR = "{n_fmt}/{total_fmt}  {desc}"
_NO_END = "{n_fmt} steps  {desc}"
_LEFT, _RUNNING = "  left {remaining}", "  running for {elapsed}"
_LEAST_BAR = 6  # columns of the shortest bar, including its ends

# The most values of one metric in a line; a per-class metric may have many.
_MOST_CLASSES = 12
_MOST_CELLS = 9  # of a confusion matrix

# Parts that a narrow terminal omits from the line, in order; the loss always stays.
_LEFT_OUT = ("account", "tokens", "epoch", "time", "samples", "lr")


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar with as many parts in its line as fit the terminal.

    Attributes:
        parts: the texts after the bar, by name in `_LEFT_OUT`.
    """

    parts: Mapping[str, str] = MappingProxyType({})

    @property
    def format_dict(self) -> Any:
        """The arguments of `tqdm.format_meter`."""
        values = super().format_dict
        shown = {**self.parts, "time": ""}
        counter = f"{values['n']}/{values['total']}" if values["total"] else f"{values['n']} steps"
        time_left = len("  running for 00:00") if not values["total"] else len("  left 1:00:00")
        for name in ("", *_LEFT_OUT):
            shown.pop(name, None)
            text = "  ".join(filter(None, shown.values()))
            width = len(counter) + _LEAST_BAR + 2 + len(text) + time_left * ("time" in shown)
            if width <= (values["ncols"] or width):
                break
        form = _NO_END if not values["total"] else _BAR
        if values["total"] and width > (values["ncols"] or width):
            form = _NO_BAR
        if "time" in shown:
            form += _LEFT if values["total"] else _RUNNING
        return {**values, "prefix": text, "bar_format": form}

    # tqdm's own methods keep the lock of all bars when the stream fails. The next thread that makes
    # a bar would wait for ever; torch.compile makes one in each compilation.

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        """Draws the bar; see `tqdm.refresh`."""
        with nullcontext() if nolock else self.get_lock():
            super().refresh(nolock=True)

    def clear(self, nolock: bool = False) -> None:
        """Removes the bar from the screen; see `tqdm.clear`."""
        with nullcontext() if nolock else self.get_lock():
            super().clear(nolock=True)


class Progress(Tracker):
    """Shows loss, samples per second and remaining time on `stream` (None for stderr).

    On a terminal, shows a bar that follows every step; elsewhere, one line per logged step:

        step 120/450  loss 0.2312  1,843 samples/s  lr 1.00e-03  left 00:12
        step 225/450  eval: loss 0.1021  accuracy 0.9694
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bar: _Bar | None = None
        self._total_steps: int | None = None
        self._first_step = 0
        self._begin = 0.0
        self._drawn = 0.0  # when the bar was last drawn in an evaluation
        self._train: dict[str, str] = {}

    def on_start(self, run: Run) -> None:
        """Draws the bar if the stream is a terminal."""
        self._total_steps = run.total_steps
        self._first_step = run.step
        self._begin = self._clock()
        if self._stream.isatty():
            self._bar = _Bar(
                total=run.total_steps, initial=run.step, file=self._stream, dynamic_ncols=True
            )

    def on_step(self, run: Run, samples: int) -> None:
        """Advances the bar, redrawn at most ten times per second."""
        if self._bar is not None:
            self._bar.update(run.step - self._bar.n)

    def on_evaluation_batch(self, run: Run, done: int, total: int | None) -> None:
        """Shows the progress of an evaluation on the bar, at most ten times per second."""
        now = self._clock()
        if self._bar is not None and now - self._drawn > 0.1:
            self._drawn = now
            share = f"{done:,} samples" if not total else f"{done / total:.0%}"
            self._bar.parts = {"evaluation": f"evaluating: {share}"}
            self._bar.refresh()

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Shows the values of `train/` and `eval/`; stage values are for dashboards."""
        if train := _describe_training(values):
            if self._bar is not None:
                if "train/epoch" in values:
                    train = {"epoch": f"epoch {values['train/epoch']:.2f}", **train}
                self._bar.parts = self._train = train
            else:
                self._print(run.step, [*train.values(), *self._left(run.step)])
        if evaluation := _describe_evaluation(values):
            if self._bar is not None:
                self._bar.parts = self._train
            self._print(run.step, [f"eval: {evaluation[0]}", *evaluation[1:]])

    def on_end(self, run: Run) -> None:
        """Leaves the last state of the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def abandon(self) -> None:
        """Releases the bar without drawing it again."""
        if self._bar is not None:
            self._bar.disable = True  # otherwise it would draw again when garbage-collected
            self._bar = None

    def _print(self, step: int, parts: list[str]) -> None:
        end = "" if self._total_steps is None else f"/{self._total_steps}"
        # a metric's name may contain a newline
        line = in_one_line("  ".join([f"step {step}{end}", *parts]))
        tqdm.write(line, file=self._stream)
        self._stream.flush()

    def _left(self, step: int) -> list[str]:
        done = step - self._first_step
        if self._total_steps is None or done <= 0:
            return []
        # includes pauses for evaluation and checkpoints, because more will come
        left = (self._clock() - self._begin) / done * (self._total_steps - step)
        return [f"left {tqdm.format_interval(round(left))}"]


def _describe_training(values: Mapping[str, float]) -> dict[str, str]:
    shown: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("loss", "train/loss", "loss {}", format_value),
        ("samples", "train/samples_per_second", "{} samples/s", _format_rate),
        ("tokens", "train/tokens_per_second", "{} tokens/s", _format_rate),
        # one format, since a schedule spans many magnitudes
        ("lr", "train/lr", "lr {}", "{:.2e}".format),
    )
    parts = {
        name: text.format(write(values[tag])) for name, tag, text, write in shown if tag in values
    }
    return parts | _describe_account(values)


def _describe_account(values: Mapping[str, float]) -> dict[str, str]:
    """Describes the largest part of a step in which devices do not compute, in percent."""
    parts = parts_of_account(values)
    idle = {name: value for name, value in parts.items() if name not in COMPUTING}
    largest = max(idle, key=idle.__getitem__, default=None)
    if largest is None:
        return {}
    return {"account": f"{largest} {idle[largest] / sum(parts.values()):.0%}"}


def _describe_evaluation(values: Mapping[str, float]) -> list[str]:
    return describe_values(
        {tag.removeprefix("eval/"): v for tag, v in values.items() if tag.startswith("eval/")}
    )


def describe_values(values: Mapping[str, float]) -> list[str]:
    """Describes the values of an evaluation; only the first of a metric with many classes.

    A confusion matrix has whole numbers; one of more than three classes is only mentioned.
    """
    counts = Counter(name.partition("/")[0] for name in values if "/" in name)
    shown: Counter[str] = Counter()
    parts = []
    for name, value in values.items():
        metric = name.partition("/")[0]
        shown[metric] += 1
        if is_confusion(f"eval/{name}"):
            if counts[metric] <= _MOST_CELLS:
                parts.append(f"{name} {value:.0f}")
            elif shown[metric] == 1:
                parts.append(f"{metric} of {round(counts[metric] ** 0.5)} classes in the report")
            continue
        if counts[metric] <= _MOST_CLASSES or shown[metric] <= _MOST_CLASSES:
            parts.append(f"{name} {format_value(value)}")
        elif shown[metric] == counts[metric]:
            parts.append(f"... ({counts[metric]} values of {metric})")
    return parts


def format_value(value: float) -> str:
    """Formats a loss or metric with four decimals, or in scientific notation."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def _format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
