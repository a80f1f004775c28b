"""The TensorBoard tracker."""

from __future__ import annotations

import re
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from PIL import Image

from hybridtrain._base.text_table import markdown_table
from hybridtrain.loop import Run, Tracker, parts_of_account
from hybridtrain.observe.confusion import MOST_CLASSES, confusion_of, is_confusion
from hybridtrain.observe.hyperparameters import is_hyperparameter
from hybridtrain.observe.pictures import MOST_BARS, draw, draw_accounts, draw_confusion
from hybridtrain.observe.trackers.queued import flat
from hybridtrain.schedule import COMPUTING, Spans

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Tag of `Tracker.on_log` -> displayed tag, factor and description. TensorBoard sorts groups and
# curves by name, so names and numbers put the most important ones first.
_SHOWN = tuple(
    (re.compile(pattern), tag, factor, description)
    for pattern, tag, factor, description in (
        (r"train/loss", r"1_overview/train_loss", 1, "mean of the steps since the last point"),
        (r"eval/(.*)", r"1_overview/eval_\1", 1, "over all samples of the evaluation"),
        (r"train/samples_per_second", r"1_overview/train_samples_per_s", 1,
         "over all replicas, excluding evaluations and checkpoints"),
        (r"train/tokens_per_second", r"1_overview/train_tokens_per_s", 1,
         "samples per second times their length, including padding; over all replicas"),
        (r"train/mfu", r"1_overview/used_mfu_percent", 100,
         "model FLOPs utilization: FLOPs of forward and backward passes, without recomputation, "
         "in percent of the peak rate of all devices"),
        (r"train/step_ms", r"2_time/step_ms", 1, "milliseconds per optimizer step, mean"),
        (r"pipeline/bubble_fraction", r"2_time/pipeline_idle_percent", 100,
         "idle time of the devices between the first and last action of a batch, in percent"),
        (r"replicas/slowest", r"2_time/replica_slowest", 1,
         "index of the slowest replica"),
        (r"replicas/slowest_ms", r"2_time/replica_slowest_ms", 1,
         "milliseconds per step of the slowest replica, without waiting for others"),
        (r"replicas/mean_ms", r"2_time/replica_mean_ms", 1,
         "milliseconds per step without waiting for other replicas, mean over replicas"),
        (r"stage(\d+)/memory_bytes", r"3_stages/memory_mib/\1", 2**-20,
         "peak memory of the stage's device in MiB, replica 0; counted, not measured, on a CPU"),
        (r"stage(\d+)/memory_percent", r"3_stages/memory_percent/\1", 1,
         "peak memory of the stage's device in percent of the device's memory, replica 0"),
        (r"stage(\d+)/(\w+_ms)", r"3_stages/\2/\1", 1,
         "milliseconds per micro-batch, mean; replica 0"),
        (r"train/grad_norm", r"4_optimizer/grad_norm", 1,
         "gradient norm of a step, before trainer.clip_norm and after clip_value"),
        (r"train/lr", r"4_optimizer/lr", 1, "learning rate of the first parameter group"),
        (r"lr/(.*)", r"4_optimizer/lr/\1", 1, "learning rate of a parameter group"),
        (r"train/skipped_steps", r"4_optimizer/skipped_steps", 1,
         "number of steps skipped so far because of a non-finite gradient"),
        (r"train/loss_scale", r"4_optimizer/loss_scale", 1, "loss scale, fp16"),
        (r"train/(.*)", r"4_optimizer/\1", 1, ""),
    )
)  # fmt: skip
_CHARTS = {
    "is it learning": {"loss, training and evaluation": r"1_overview/(train|eval)_loss"},
    "stages": {
        "forward, ms per micro-batch": "3_stages/forward_ms/.*",
        "backward, ms per micro-batch": "3_stages/backward_ms/.*",
        "peak memory, MiB": "3_stages/memory_mib/.*",
    },
}
# The most devices in a table that fits on a screen.
_MOST_COLUMNS = 12


class TensorBoard(Tracker):
    """Writes scalars, texts and pictures to event files in `directory`.

    Groups are numbered so that the first screen answers the first questions: is it learning, how
    fast, where does the time go, how full is memory. A tag of `Tracker.on_log` such as `train/loss`
    is shown as `1_overview/train_loss`; unknown tags are unchanged. The custom scalars tab has
    charts with both losses and with all stages; the time breakdown of a step is a picture.

    The hyperparameters tab lists the text `overrides` (YAML, a mapping of dotted keys), or else
    `config`.

    Files of earlier attempts are kept. A mark in the new file makes TensorBoard drop their points
    after the step from which the run resumed.

    Args:
        directory: the directory of the event files, from which TensorBoard derives the run's name.
        title: the title of the pictures; None for the name of `directory`.
    """

    def __init__(self, directory: str | Path, title: str | None = None) -> None:
        self.directory = Path(directory)
        self._title = title
        self._writer: SummaryWriter | None = None
        self._described: set[str] = set()
        self._accounts = deque[tuple[int, Mapping[str, float]]](maxlen=MOST_BARS)

    def on_start(self, run: Run) -> None:
        """Opens an event file; texts appear in the text tab."""
        # takes half a second to import, which only rank 0 of a started run should spend
        from torch.utils.tensorboard import SummaryWriter

        first_step, texts = run.step, run.texts
        # the mark also purges its own step, but points of `first_step` were reported before the
        # checkpoint was saved; on a fresh start, all old points are purged
        purge_step = first_step + 1 if first_step else 0
        # the default of two minutes is long for a dashboard being watched
        with _silent_thread():
            self._writer = SummaryWriter(str(self.directory), purge_step=purge_step, flush_secs=10)
        for title, text in texts.items():
            # an indented Markdown code block, because a fenced one could end inside the text
            self._writer.add_text(title, textwrap.indent(text, "    "), first_step)
        self._writer.add_custom_scalars(
            {
                group: {title: ["Multiline", [tags]] for title, tags in charts.items()}
                for group, charts in _CHARTS.items()
            }
        )
        if hyperparameters := texts.get("overrides") or texts.get("config"):
            _add_hyperparameters(self._writer, hyperparameters)
        self._writer.flush()

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Queues the values for the writer's thread."""
        step = run.step
        account = parts_of_account(values)
        if account:
            self._accounts.append((step, account))
        total = sum(account.values()) or 1.0
        for name, value in account.items():
            tag = f"2_time/{name}_percent"
            if value or tag in self._described:  # no curve in a run without recomputation
                self._add(
                    step, tag, 100 * value / total,
                    "of a step, mean over all devices; defined in docs/monitoring.md",
                )  # fmt: skip
        if account:
            computing = 100 * sum(account[name] for name in COMPUTING) / total
            self._add(
                step, "1_overview/used_device_time_percent", computing,
                "of a step in which devices run forwards and backwards; the rest is in 2_time",
            )  # fmt: skip
        memory = [value for tag, value in values.items() if tag.endswith("/memory_percent")]
        if memory:
            self._add(
                step, "1_overview/used_device_memory_percent", max(memory),
                "peak memory of the most loaded device, in percent of its memory",
            )  # fmt: skip
        for tag, value in values.items():
            if not tag.startswith("account/") and not is_confusion(tag):
                self._add(step, *shown(tag, value))
        confusion = confusion_of(values)
        if confusion is not None and len(confusion.classes) <= MOST_CLASSES:
            picture = draw_confusion(confusion, f"evaluation at step {step}")
            self._add_picture(step, "5_pictures/confusion", picture)

    def on_texts(self, run: Run, texts: Mapping[str, str]) -> None:
        """Adds texts to the text tab."""
        assert self._writer is not None
        for tag, text in texts.items():
            # an indented code block, because a text may contain Markdown
            self._writer.add_text(tag, textwrap.indent(text, "    "), run.step)

    def on_timeline(self, run: Run, predicted: Spans, measured: Spans) -> None:
        """Adds pictures to the images tab, and a table of the time breakdown to the text tab."""
        step = run.step
        title = f"{self._title or self.directory.resolve().name}, step {step}"
        self._add_picture(step, "5_pictures/timeline", draw(predicted, measured, title, card=True))
        if self._accounts:
            picture = draw_accounts(self._accounts, title, card=True)
            self._add_picture(step, "5_pictures/where_the_time_goes", picture)
        if (account := run.account) is not None:
            self._add_account(step, account, run.advice)

    def _add_account(self, step: int, account: Mapping[str, Any], advice: Sequence[str]) -> None:
        shown = account["devices"][:_MOST_COLUMNS]
        columns = {"mean": account["mean"]}
        several = any(device["replica"] for device in account["devices"])
        columns |= {
            f"replica {d['replica']}, " * several + f"device {d['device']}": d for d in shown
        }
        parts = [name for name in account["mean"] if any(d[name] for d in account["devices"])]
        steps = [sum(times[part] for part in parts) for times in columns.values()]
        lines = [["part", *columns]]
        for part in parts:
            shares = zip(columns.values(), steps, strict=True)
            cells = [
                f"{times[part]:.2f} ({times[part] / (step or 1):.0%})" for times, step in shares
            ]
            lines.append([part, *cells])
        lines.append(["step", *(f"{step:.2f}" for step in steps)])
        more = len(account["devices"]) - len(shown)
        text = [
            *(["\n".join(f"- {line}" for line in advice)] if advice else []),
            "Milliseconds per step, mean over the recorded steps; the first column is the mean "
            f"over all devices.{f' {more} more devices are in summary.json.' if more else ''}",
            markdown_table(lines),
        ]
        # sorts first among the texts, of which TensorBoard expands two
        self._started().add_text("a step's time, by device", "\n\n".join(text), step)

    def on_end(self, run: Run) -> None:
        """Closes the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def abandon(self) -> None:
        """Releases the writer."""
        self._writer = None

    def _started(self) -> SummaryWriter:
        if self._writer is None:
            raise RuntimeError("call TensorBoard.on_start() first")
        return self._writer

    def _add(self, step: int, tag: str, value: float, description: str = "") -> None:
        writer = self._started()
        if tag in self._described or not description:
            writer.add_scalar(tag, value, step)
            return
        # SummaryWriter has no argument for descriptions; TensorBoard takes them from the first
        # point.
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-untyped]

        self._described.add(tag)
        plugin = SummaryMetadata.PluginData(plugin_name="scalars")
        metadata = SummaryMetadata(summary_description=description, plugin_data=plugin)
        point = Summary.Value(tag=tag, simple_value=value, metadata=metadata)
        writer._get_file_writer().add_summary(Summary(value=[point]), step)

    def _add_picture(self, step: int, tag: str, picture: Image.Image) -> None:
        pixels = torch.from_numpy(np.asarray(picture).copy())
        self._started().add_image(tag, pixels, step, dataformats="HWC")


@contextmanager
def _silent_thread() -> Iterator[None]:
    """Makes writers created in the block report an error of their thread only once.

    The next write raises the error, and the run logs a warning. Otherwise the thread would raise it
    too, and Python would print its traceback.
    """
    from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

    usual = getattr(event_file_writer, "_AsyncWriterThread", None)
    if usual is None:  # a private class
        yield
        return

    class Silent(usual):  # type: ignore[misc, valid-type]
        def run(self) -> None:
            with suppress(Exception):  # the writer stores it and raises it at the next write
                super().run()

    event_file_writer._AsyncWriterThread = Silent
    try:
        yield
    finally:
        event_file_writer._AsyncWriterThread = usual


def shown(tag: str, value: float) -> tuple[str, float, str]:
    """Returns the displayed tag, value and description for a tag of `Tracker.on_log`."""
    for pattern, replacement, factor, description in _SHOWN:
        if match := pattern.fullmatch(tag):
            return match.expand(replacement), value * factor, description
    return tag, value, ""


def _add_hyperparameters(writer: Any, settings: str) -> None:
    """Writes hyperparameters, given as YAML; the dashboard takes metrics from the curves."""
    from torch.utils.tensorboard.summary import hparams

    with suppress(yaml.YAMLError):
        values = {
            key: value for key, value in flat(yaml.safe_load(settings)) if is_hyperparameter(key)
        }
        _, started, _ = hparams(values, {})
        writer._get_file_writer().add_summary(started)
