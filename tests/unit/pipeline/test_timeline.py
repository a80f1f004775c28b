"""Timelines: spans are recorded in the order of the schedule, drawn, and written to files."""

import io
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor
from support.runs import RunOf
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.loop import Tracker
from hybridtrain.observe import COLOURS, WAITS, TimelineFiles, draw_accounts, spans_of_trace
from hybridtrain.observe.pictures import draw
from hybridtrain.observe.timeline import chrome_trace
from hybridtrain.observe.trackers import TensorBoard
from hybridtrain.pipeline import Timeline
from hybridtrain.pipeline import timeline as timeline_module
from hybridtrain.schedule import Action, Span, bubble_fraction, make_schedule, simulate

FORWARD, BACKWARD = ({ImageColor.getrgb(colour) for colour in COLOURS[kind]} for kind in "FB")


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def lanes(devices=2, chunks=3, v=1, forward=0.002, backward=0.005):
    schedule = make_schedule("1f1b", devices, chunks, v)
    return simulate(schedule, [forward] * devices * v, [backward] * devices * v)


def colours(image):
    return {colour for _, colour in image.getcolors(maxcolors=1 << 24)}


# Drawn.
@pytest.mark.parametrize(("devices", "v"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_a_chrome_trace_has_one_event_per_action_with_its_duration(devices, v):
    spans = lanes(devices, 3, v)
    trace = json.loads(json.dumps(chrome_trace(spans, "step 7"), allow_nan=False))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 3 * devices * v
    found = {
        (e["name"], e["args"]["stage"]): (e["tid"], e["cat"], e["ts"], e["dur"]) for e in events
    }
    assert len(found) == len(events)
    for device, lane in enumerate(spans):
        for (kind, stage, i), start, end in lane:
            tid, category, ts, duration = found[f"{kind}{i}", stage]
            assert (tid, category) == (device, {"F": "forward", "B": "backward"}[kind])
            assert ts == pytest.approx(start * 1e6)  # microseconds
            assert duration == pytest.approx({"F": 2000, "B": 5000}[kind])
            assert end - start == pytest.approx(duration / 1e6)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"step 7", *(f"device {d}" for d in range(devices))}


LEGEND = 52  # pixels above the first half


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.quick_cases(1)
def test_the_picture_has_a_row_for_every_device_predicted_and_measured(devices):
    image = draw(lanes(devices), lanes(devices))
    assert image.height > draw(lanes(1), lanes(1)).height or devices == 1
    # a forward or a backward in every row of both halves
    pixels = image.load()
    found = colours(image)
    assert found & FORWARD
    assert found & BACKWARD
    rows = {
        y
        for y in range(LEGEND, image.height)
        if any(pixels[x, y] in FORWARD | BACKWARD for x in range(0, image.width, 3))
    }
    assert len([y for y in rows if y - 1 not in rows]) == 2 * devices


@pytest.mark.parametrize(("devices", "chunks", "v"), [(4, 32, 1), (2, 8, 3), (1, 1, 1)])
def test_the_picture_is_wide_enough_for_the_numbers_of_its_micro_batches(devices, chunks, v):
    spans = lanes(devices, chunks, v, forward=0.002, backward=0.004)
    image = draw(spans, spans)
    seconds = max(lane[-1].end for lane in spans)
    assert 0.002 / seconds * (image.width - 100) >= 17  # two digits and a gap
    assert image.width < 4100


def test_a_card_is_a_whole_multiple_of_the_pixels_that_tensorboard_shows_of_it():
    spans = lanes(2, 8)
    assert draw(spans, spans, card=True).width == 3 * 350  # of each three pixels it shows one
    accounts = [(step, {"forward": 2.0, "imbalance": 1.0}) for step in range(100)]
    assert draw_accounts(accounts, "a run", card=True).width == 3 * 350


def test_a_step_too_long_for_numbers_is_still_a_picture():
    spans = lanes(2, 512)
    assert draw(spans, spans).width < 4100


def test_the_stages_of_a_device_have_different_colours():
    assert len(colours(draw(lanes(2), lanes(2))) & (FORWARD | BACKWARD)) == 2
    assert len(colours(draw(lanes(2, v=3), lanes(2, v=3))) & (FORWARD | BACKWARD)) == 6
    draw(lanes(2, v=6), lanes(2, v=6))  # more stages than colours


def test_both_halves_are_drawn_on_one_scale():
    image = draw(lanes(), lanes(forward=0.004, backward=0.010))
    pixels = image.load()

    def right_end(top):
        return max(
            x
            for x in range(image.width)
            for y in range(top, top + (image.height - LEGEND) // 2)
            if pixels[x, y] in FORWARD | BACKWARD
        )

    margin = 74
    predicted = right_end(LEGEND) - margin
    measured = right_end((image.height + LEGEND) // 2) - margin
    assert predicted == pytest.approx(measured / 2, abs=3)


def test_an_action_that_took_no_time_can_be_drawn():
    spans = ((Span(Action("F", 0, 0), 0.0, 0.0), Span(Action("B", 0, 0), 0.0, 1e-9)),)
    assert draw(spans, spans).width > 0
    events = chrome_trace(spans, "step 1")["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["F0", "B0"]


# Recorded.
def test_lanes_on_one_device_count_from_one_time_however_long_reading_it_takes(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(timeline_module, "now", lambda: float(next(clock)))
    schedule = make_schedule("1f1b", 2, 1)
    recorded = Timeline(schedule, [torch.device("cpu")] * 2)
    first, second = Action("F", 0, 0), Action("F", 1, 0)
    recorded.record(0, first, 10.0, 11.0)
    recorded.record(1, second, 11.0, 12.0)
    (before,), (after,) = recorded.spans()
    assert before.end == after.start


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


def hybrid(nb_part=2, chunks=4, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*[Slow() for _ in range(8)])
    return HybridModel(
        net, World.from_env(nb_part=nb_part, devices="cpu"), chunks=chunks, **options
    )


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("nb_part", "v"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (2, 4)])
@pytest.mark.quick_cases(2)
def test_the_spans_of_a_step_follow_the_schedule_and_what_it_waits_for(
    nb_part, v, schedule, recompute
):
    model = hybrid(nb_part, stages_per_device=v, schedule=schedule, recompute=recompute)
    x = torch.randn(16, 32)
    for samples in (16, 3):  # a short batch has fewer micro-batches
        spans = model.train_step(
            x[:samples], x[:samples], F.mse_loss, timeline=True
        ).timeline.spans()
        table = model.schedule(min(4, samples))
        assert [[span.action for span in lane] for lane in spans] == [
            list(lane) for lane in table.lanes
        ]
        at = {span.action: span for lane in spans for span in lane}
        for lane in spans:
            assert lane[0].start >= 0
            assert all(span.start <= span.end for span in lane)
            assert all(a.end <= b.start for a, b in itertools.pairwise(lane))
        for (kind, s, i), span in at.items():
            if kind == "F" and s:
                assert at[Action("F", s - 1, i)].end <= span.start
            if kind == "B":
                assert at[Action("F", s, i)].end <= span.start
            if kind == "B" and s + 1 < table.stages:
                assert at[Action("B", s + 1, i)].end <= span.start
        assert 0 <= bubble_fraction(spans) < 1


def test_a_timeline_is_recorded_only_when_asked_for():
    x = torch.randn(8, 32)
    assert hybrid().train_step(x, x, F.mse_loss).timeline is None


# Reported.
class Kept(Tracker):
    def __init__(self):
        self.timelines = {}
        self.values = {}

    def on_log(self, run, values):
        self.values[run.step] = values

    def on_timeline(self, run, predicted, measured):
        self.timelines[run.step] = predicted, measured


def trainer(tracker, nb_part=2, steps=7, model=None, **options):
    model = model or hybrid(nb_part)
    x = torch.randn(22, 32, generator=torch.Generator().manual_seed(0))
    loader = TrainLoader(
        TensorDataset(x, x), 4, model.world, seed=1
    )  # the last batch has 2 samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Trainer(
        model, optimizer, F.mse_loss, loader, steps=steps, callbacks=[tracker], **options
    )


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize(
    ("every", "expected"), [(None, [7]), (3, [3, 6, 7]), (1, [1, 2, 3, 4, 5, 6, 7]), (50, [7])]
)
@pytest.mark.quick_cases(1)
def test_every_nth_step_and_the_last_have_a_timeline(every, expected, options):
    kept = Kept()
    ours = trainer(kept, timeline_every=every, log_every=4, **options)
    ours.fit()
    assert sorted(kept.timelines) == expected
    for predicted, measured in kept.timelines.values():
        assert [[s.action for s in lane] for lane in predicted] == [
            [s.action for s in lane] for lane in measured
        ]
        # the prediction has the schedule's order and the measured costs, and no other waiting
        assert sum(s.end - s.start for lane in predicted for s in lane) == pytest.approx(
            sum(s.end - s.start for lane in measured for s in lane)
        )


@pytest.mark.parametrize("nb_part", [1, 2, 4])
@pytest.mark.quick_cases(1)
def test_the_summary_has_the_measured_bubble(nb_part):
    kept = Kept()
    summary = trainer(kept, nb_part, log_every=2).fit()
    logged = [values["pipeline/bubble_fraction"] for values in kept.values.values()]
    assert len(logged) == 4
    assert all(0 <= value < 1 for value in logged)
    assert summary["bubble_fraction"] == pytest.approx(math.fsum(logged) / 4)
    assert 0 <= json.loads(json.dumps(summary))["bubble_fraction"] < 1
    if nb_part > 1:
        assert summary["bubble_fraction"] > 0


def test_the_newest_timeline_is_in_two_complete_files(tmp_path):
    files = TimelineFiles(tmp_path)
    trainer(files, timeline_every=5, steps=5).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline.json", "timeline.png"]
    trace = json.loads((tmp_path / "timeline.json").read_text())
    # step 5 has the whole batch of 4 samples: 4 micro-batches, 2 stages, forward and backward
    actions = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [sum(event["pid"] == pid for event in actions) for pid in (0, 1)] == [16, 16]
    assert "step 5" in (tmp_path / "timeline.json").read_text()
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.format == "PNG"
        assert colours(image.convert("RGB")) & FORWARD
    files.on_timeline(RunOf(6), lanes(4), lanes(4))
    assert "step 6" in (tmp_path / "timeline.json").read_text()
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.size == draw(lanes(4), lanes(4)).size


def test_both_timelines_are_read_from_their_file_again(tmp_path):
    predicted, measured = lanes(2, v=2), lanes(2, v=2, backward=0.004)
    assert spans_of_trace(tmp_path / "timeline.json") is None
    TimelineFiles(tmp_path).on_timeline(RunOf(6), predicted, measured)
    for found, spans in zip(
        spans_of_trace(tmp_path / "timeline.json"), (predicted, measured), strict=True
    ):
        assert [[span.action for span in lane] for lane in found] == [
            [span.action for span in lane] for lane in spans
        ]
        for lane, other in zip(found, spans, strict=True):
            assert [x for span in lane for x in span[1:]] == pytest.approx(
                [x for span in other for x in span[1:]]
            )


def test_waiting_is_hatched_in_the_colour_of_its_reason_in_the_measured_half_alone():
    image = draw(lanes(4), lanes(4))
    grey = ImageColor.getrgb(WAITS["stage"][1])
    middle = (image.height + LEGEND) // 2
    halves = [image.crop((0, LEGEND, image.width, middle)), image.crop((0, middle, *image.size))]
    # letters have some grey at their borders
    predicted, measured = (
        dict(map(reversed, half.getcolors(1 << 24))).get(grey, 0) for half in halves
    )
    assert measured > 100 > 10 > predicted
    assert not colours(image) & {ImageColor.getrgb(WAITS["message"][1])}  # there are none


def test_tensorboard_has_the_picture_as_an_image(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.on_start(RunOf(0, total_steps=9))
    board.on_timeline(RunOf(4), lanes(2), lanes(2))
    board.on_timeline(RunOf(9), lanes(4), lanes(4))
    board.on_end(RunOf(9))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    images = events.Images("5_pictures/timeline")
    assert [image.step for image in images] == [4, 9]
    for image, devices in zip(images, (2, 4), strict=True):
        drawn = draw(
            lanes(devices), lanes(devices), f"{tmp_path.name}, step {image.step}", card=True
        )
        assert (image.width, image.height) == drawn.size
        with Image.open(io.BytesIO(image.encoded_image_string)) as decoded:
            assert decoded.convert("RGB").tobytes() == drawn.tobytes()


def test_tensorboard_must_be_started_before_it_gets_a_picture(tmp_path):
    with pytest.raises(RuntimeError, match="start"):
        TensorBoard(tmp_path).on_timeline(RunOf(1), lanes(), lanes())
