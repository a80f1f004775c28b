"""Draws the schedules of docs/schedules.md, predicted and measured, and writes the page's tables.

    python -m scripts.schedules --measure   run the sections without a recorded step on emulated
                                            devices, and record one
    python -m scripts.schedules --measure zb-h1 v-min        the same for these sections
    python -m scripts.schedules             draw what was recorded, and write the tables
    python -m scripts.schedules --check     fail where a picture or a table is not current

The devices are threads that sleep (`scripts/bench/emulated_devices.py`), so that four of them
fit on any number of cores. Of several steps the one with the median time is recorded, in
docs/assets/schedules.json. The code of "Your own schedule" draws that section's picture.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from statistics import median_low
from typing import Any

from PIL import Image, ImageChops

from hybridtrain._base.text_table import counted
from hybridtrain.observe import draw_timelines
from hybridtrain.schedule import (
    Action,
    Durations,
    Schedule,
    Span,
    Spans,
    bubble_fraction,
    fullest_moments,
    length,
    make_schedule,
)

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "schedules.md"
RECORD = DOCS / "assets" / "schedules.json"

# By the name of a section: the schedule, and its stages per device.
SCHEDULES = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved": ("1f1b", 2),
    "zb-h1": ("zb-h1", 1),
    "zb-v": ("zb-v", 2),
    "v-half": ("v-half", 2),
    "v-min": ("v-min", 2),
}
DEVICES, CHUNKS = 4, 8
FORWARD_S, BACKWARD_S = 0.020, 0.040
STEPS, WARM_UP = 9, 2


def table_of(name: str) -> Schedule:
    """Returns the table of a section's schedule."""
    schedule, per_device = SCHEDULES[name]
    return make_schedule(schedule, DEVICES, CHUNKS, per_device)


def predicted(name: str) -> Spans:
    """Returns the spans of a section's schedule, if nothing but the stages takes time."""
    stages, per_device = DEVICES * SCHEDULES[name][1], SCHEDULES[name][1]
    times = [FORWARD_S / per_device] * stages, [BACKWARD_S / per_device] * stages
    return Durations.of(*times).spans(table_of(name))


def measure(names: Sequence[str]) -> None:
    """Records the median step of the schedules of these sections."""
    import torch

    from scripts.bench import emulated_devices as emulated
    from scripts.bench.common import mean_loss
    from scripts.bench.schedule_efficiency import model_of

    torch.set_num_threads(1)
    emulated.sleeps.factor = FORWARD_S / emulated.FORWARD
    emulated.calibrate()
    record = _record()
    for name in names:
        schedule, per_device = SCHEDULES[name]
        model = model_of(DEVICES, CHUNKS, schedule, per_device)
        x = emulated.samples(CHUNKS)
        steps = []
        for step in range(WARM_UP + STEPS):
            timeline = model.train_step(x, None, mean_loss, timeline=True).timeline
            assert timeline is not None
            if step >= WARM_UP:
                steps.append(timeline.spans())
        typical = median_low([length(spans) for spans in steps])
        record[name] = _recorded(next(spans for spans in steps if length(spans) == typical))
        print(f"{name}: {typical * 1e3:.1f} ms, the median of {STEPS} steps")
    lines = [f'"{name}": {json.dumps(record[name])}' for name in SCHEDULES if name in record]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _recorded(spans: Spans) -> list[list[tuple[str, int, int]]]:
    """Returns, by device, each action with its start and end in microseconds."""
    begin = min(lane[0].start for lane in spans)
    return [
        [
            (str(action), round((start - begin) * 1e6), round((end - begin) * 1e6))
            for action, start, end in lane
        ]
        for lane in spans
    ]


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def recorded() -> dict[str, Spans]:
    """Returns the recorded steps of the sections whose schedules have the recorded tables."""
    record, steps = _record(), {}
    for name in SCHEDULES:
        spans = [
            [Span(_action(text), start / 1e6, end / 1e6) for text, start, end in lane]
            for lane in record.get(name, [])
        ]
        if [[span.action for span in lane] for lane in spans] == [*map(list, table_of(name).lanes)]:
            steps[name] = spans
    return steps


def measured() -> dict[str, Spans]:
    """Returns the recorded step of each section.

    Raises:
        SystemExit: a section has none, or one of another table than its schedule has now.
    """
    steps = recorded()
    for name in SCHEDULES:
        if name not in steps:
            sys.exit(f"{name} has no recorded step: python -m scripts.schedules --measure")
    return steps


def _action(text: str) -> Action:
    kind, microbatch, stage = re.fullmatch(r"([FBIW])(\d+)@(\d+)", text).groups()  # type: ignore[union-attr]
    return Action(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


def held(table: Schedule) -> list[float]:
    """Returns the most micro-batches that each device holds, in stages of a whole device."""
    per_device = table.stages // len(table.lanes)
    return [
        max(sum(moment.activations) for moment in moments) / per_device
        for moments in fullest_moments(table)
    ]


def pictures() -> Iterator[tuple[Path, Image.Image]]:
    """Yields the file of each picture, and the picture."""
    steps = measured()
    for name in SCHEDULES:
        timelines = {"predicted": predicted(name), "measured": steps[name]}
        title = f"{name}: {DEVICES} devices, {counted(CHUNKS, 'micro-batch', 'es')}"
        yield DOCS / "assets" / f"schedule-{name}.png", draw_timelines(timelines, title)
    yield DOCS / "assets" / "own-schedule.png", own_picture()


def own_picture() -> Image.Image:
    """Returns the picture that the code of "Your own schedule" draws."""
    code = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert code is not None
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()):
        exec(compile(code[1], str(PAGE), "exec"), {"__name__": "own_schedule"})
        with Image.open("own-schedule.png") as picture:
            return picture.copy()


def page() -> str:
    """Returns the page with its tables as they should be."""
    steps, text = measured(), PAGE.read_text()
    for name, rows in {"summary": _summary(steps), **{n: _memory(n) for n in SCHEDULES}}.items():
        begin, end = _marks(name)
        pattern = re.escape(begin) + r".*?" + re.escape(end)
        text = re.sub(pattern, lambda _, t=begin + rows + end: t, text, flags=re.S)  # type: ignore[misc]
    return text


def check_marks() -> None:
    """Checks that the page has a place for each table.

    Raises:
        SystemExit: the page lacks one; the message has the lines to add to its section.
    """
    text = PAGE.read_text()
    for name in ("summary", *SCHEDULES):
        begin, end = _marks(name)
        if text.count(begin) != 1 or end not in text.split(begin)[1]:
            where = PAGE.relative_to(DOCS.parent)
            sys.exit(f"{where} needs these two lines once, in the section {name}:\n{begin}{end}")


def _marks(name: str) -> tuple[str, str]:
    """Returns the lines before and after the table of a section."""
    return f"<!-- {name}: made by scripts/schedules.py -->\n", "<!-- end -->"


def _summary(steps: Mapping[str, Spans]) -> str:
    columns = ["stages per device", "step, predicted", "measured", "idle, predicted", "measured"]
    lines = [
        f"| schedule | {' | '.join(columns)} | a device holds at most |",
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    for name, (_, per_device) in SCHEDULES.items():
        both = predicted(name), steps[name]
        times = [f"{length(spans) * 1e3:.0f} ms" for spans in both]
        idle = [f"{bubble_fraction(spans):.0%}" for spans in both]
        most = f"{max(held(table_of(name))):g}"
        cells = [f"[{name}](#{name})", str(per_device), *times, *idle, most]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _memory(name: str) -> str:
    counts = [f"{count:g}" for count in held(table_of(name))]
    devices = [f"device {device}" for device in range(DEVICES)]
    return "\n".join(
        [
            f"![{name}, predicted and measured](assets/schedule-{name}.png)",
            "",
            f"| | {' | '.join(devices)} |",
            f"|---|{'---:|' * DEVICES}",
            f"| micro-batches in flight, at most | {' | '.join(counts)} |",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs="*", metavar="SECTION", choices=SCHEDULES)
    parser.add_argument("--check", action="store_true")
    options: Any = parser.parse_args(arguments)
    check_marks()
    if options.measure is not None:
        measure(options.measure or [name for name in SCHEDULES if name not in recorded()])
    stale = [PAGE] if page() != PAGE.read_text() else []
    for path, picture in pictures():
        if not path.exists() or _differ(path, picture):
            stale.append(path)
            if not options.check:
                picture.save(path, optimize=True)
    if options.check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is not current: python -m scripts.schedules")
        return bool(stale)
    PAGE.write_text(page())
    return 0


def _differ(path: Path, picture: Image.Image) -> bool:
    with Image.open(path) as old:
        if old.size != picture.size:
            return True
        return ImageChops.difference(old.convert("RGB"), picture).getbbox() is not None


if __name__ == "__main__":
    sys.exit(main())
