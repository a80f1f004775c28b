"""The benchmark grid: blank cells, runs that go on, predictions, tables."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import asdict, replace

import pytest
import torch

from hybridtrain.cli.run.hardware import hardware_of
from hybridtrain.errors import ConfigError
from hybridtrain.models import transformer
from hybridtrain.price import Choices, StepWork, find_plans
from scripts.bench.grid import __main__ as command
from scripts.bench.grid import worker
from scripts.bench.grid.cells import Cell, grid, stage_layers, why_impossible
from scripts.bench.grid.draw import heat_map
from scripts.bench.grid.measure import emulated_task, launch_cell, measure, real_task
from scripts.bench.grid.predict import make_predictor
from scripts.bench.grid.results import ERROR, MEMORY, TIMEOUT, Outcome, Results
from scripts.bench.grid.tables import as_csv, as_markdown, rows

SMALL = ["model.d_model=8", "model.nhead=2", "model.d_hid=8", "data.max_len=8", "data.max_vocab=20"]
CELL = Cell(devices=2, ntasks=1, batch_per_device=4, chunks=2)


@pytest.fixture(scope="module")
def v100():
    return make_predictor("jean-zay-v100")


@pytest.fixture(scope="module")
def small():
    return make_predictor("jean-zay-v100", SMALL)


def possible(cell):
    return ""


class Launches:
    """A launch that takes no time and remembers its cells."""

    def __init__(self, failure=""):
        self.cells = []
        self.failure = failure

    def __call__(self, cell, task):
        self.cells.append(cell)
        return Outcome(cell, None if self.failure else 5.0, self.failure, self.failure)


def task_of(cell):
    return {"cell": asdict(cell), "steps": 3}


@pytest.mark.thorough
def test_impossible_cells_are_blank_and_never_run(v100, tmp_path):
    cells = grid(devices=[4])
    launch = Launches()
    results = Results(tmp_path / "r.jsonl")
    measured = measure(cells, v100.why_impossible, task_of, launch, results)
    # the page: no model parallelism where there are as many processes as devices
    blank = [cell for cell in cells if cell.ntasks == 4 and cell.chunks > 1]
    assert len(cells) == 3 * 4 * 6
    assert [o.cell for o in measured if o.step_ms is None] == blank
    assert [o.cell for o in map(v100.outcome, cells) if o.step_ms is None] == blank
    assert launch.cells == [cell for cell in cells if cell not in blank]
    assert all(o.reason and not o.failure for o in measured if o.step_ms is None)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (Cell(8, 1, 32, 1), "nodes of 4"),
        (Cell(4, 3, 32, 1), "do not divide"),
        (Cell(4, 1, 2, 16), "16 chunks"),
        (Cell(4, 4, 32, 2), "no pipeline"),
        (Cell(4, 1, 32, 4), ""),
    ],
)
def test_the_reason_of_a_blank_cell(cell, reason):
    found = why_impossible(cell, layers=10, devices_per_node=4)
    assert reason in found
    assert bool(reason) == bool(found)


def test_more_stages_than_transformer_layers_are_impossible():
    assert "4 stages for 3" in why_impossible(Cell(4, 1, 32, 4), layers=5, devices_per_node=4)


def test_the_page_cuts_the_layers_evenly_with_the_ends_beside():
    assert stage_layers(6, 1) == [6]
    assert stage_layers(6, 2) == [3, 3]
    assert stage_layers(6, 4) == [2, 1, 1, 2]
    assert sorted(stage_layers(8, 4)) == [2, 2, 2, 2]


def test_a_blank_cell_is_white_a_failed_one_has_a_mark_and_a_value_has_a_colour():
    cells = grid([2], batches=[8], chunks=[1, 2], ntasks=[1])
    white = (255, 255, 255)

    def inside(outcomes):
        """The colours within the cell of two chunks: one of them if it is blank."""
        image = heat_map(outcomes, "title", "subtitle")
        return {image.getpixel((x, y)) for x in range(310, 385) for y in range(130, 155)}

    first = Outcome(cells[0], 3.0)
    assert inside([first, Outcome(cells[1], reason="impossible")]) == {white}
    marked = inside([first, Outcome(cells[1], failure=MEMORY, reason="20 GiB")])
    assert white in marked
    assert len(marked) > 1
    # the fastest: the brightest colour, with a black number
    assert white not in inside([first, Outcome(cells[1], 1.0)])


def test_a_cell_that_is_done_is_not_run_again(tmp_path):
    cells = grid([2], batches=[8], chunks=[1, 2], ntasks=[1])
    path = tmp_path / "r.jsonl"
    first = measure(cells[:1], possible, task_of, Launches(), Results(path))
    # a run that was killed in the middle of a line
    with path.open("a") as file:
        file.write('{"task": {"ce')
    launch = Launches()
    both = measure(cells, possible, task_of, launch, Results(path))
    assert launch.cells == cells[1:]
    assert both[0] == first[0]
    again = Launches()
    assert measure(cells, possible, task_of, again, Results(path)) == both
    assert again.cells == []


def test_a_cell_with_other_settings_is_another_one(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    measure([CELL], possible, task_of, Launches(), results)
    launch = Launches()
    measure([CELL], possible, lambda cell: {**task_of(cell), "steps": 5}, launch, results)
    assert launch.cells == [CELL]


def test_a_failed_cell_is_kept_and_run_again_only_with_retry(tmp_path):
    path = tmp_path / "r.jsonl"
    (failed,) = measure([CELL], possible, task_of, Launches(MEMORY), Results(path))
    assert (failed.failure, failed.step_ms) == (MEMORY, None)
    launch = Launches()
    assert measure([CELL], possible, task_of, launch, Results(path)) == [failed]
    assert launch.cells == []
    (done,) = measure([CELL], possible, task_of, launch, Results(path), retry=True)
    assert launch.cells == [CELL]
    assert done.step_ms == 5.0
    # the last line of a cell counts
    measure([CELL], possible, task_of, launch, Results(path), retry=True)
    assert launch.cells == [CELL]


@pytest.mark.parametrize(
    ("script", "failure", "reason"),
    [
        ("echo '[rank0]: torch.OutOfMemoryError: CUDA out of memory.'; exit 1", MEMORY, "CUDA"),
        ("echo 'worker (pid: 7) Signal 9 (SIGKILL) received'; exit 1", MEMORY, "exit status 1"),
        (
            "echo 'ValueError: seven'; echo 'ChildFailedError: x'; exit 1",
            ERROR,
            "ValueError: seven",
        ),
        ("exit 3", ERROR, "exit status 3"),
        ("exit 0", ERROR, "exit status 0"),
        ("exec sleep 60", TIMEOUT, "more than 0.3 s"),
    ],
)
def test_a_launch_that_fails_is_an_outcome_with_its_reason(script, failure, reason, tmp_path):
    launcher = f'sh -c "{script}" sh'
    timeout_s = 0.3 if failure == TIMEOUT else 30
    outcome = launch_cell(CELL, {"kind": "real"}, tmp_path, timeout_s, launcher)
    assert (outcome.step_ms, outcome.failure) == (None, failure)
    assert reason in outcome.reason


@pytest.mark.parametrize("cell", [Cell(4, 1, 128, 8), Cell(4, 4, 64, 1), Cell(8, 2, 256, 4)])
@pytest.mark.quick_cases(1)
def test_a_prediction_equals_the_planners_price_of_that_layout(v100, cell):
    hardware = replace(hardware_of(v100.config.hardware), nodes=cell.devices // 4)
    tokens = torch.zeros(16, 256, dtype=torch.long)
    plans = find_plans(
        transformer(20_002),
        (tokens, tokens.bool()),
        hardware,
        StepWork(cell.devices * cell.batch_per_device),
        choices=Choices(
            nb_part=[cell.nb_part],
            engine=["local"],
            chunks=[cell.chunks],
            schedule=["1f1b"],
            stages_per_device=[1],
            recompute=["never"],
            shard=["none"],
        ),
        best=1,
    )
    assert plans.prices[0].layout.replicas == cell.ntasks
    assert v100.outcome(cell).step_ms == pytest.approx(plans.prices[0].step_ms)


def test_a_cell_is_priced_on_as_many_nodes_as_it_needs(v100):
    shapes = [v100.machine_for(Cell(devices, 2, 32, 1)) for devices in (2, 4, 8)]
    assert [(m.nodes, m.devices_per_node) for m in shapes] == [(1, 2), (1, 4), (2, 4)]


def test_a_cell_that_does_not_fit_is_a_failure_with_its_memory():
    tight = make_predictor("jean-zay-v100", ["hardware.memory_gib=3"])
    assert tight.outcome(Cell(4, 4, 32, 1)).step_ms is not None
    full = tight.outcome(Cell(4, 4, 256, 1))
    assert (full.step_ms, full.failure) == (None, MEMORY)
    assert "of 1.8 GiB" in full.reason


def test_the_table_holds_every_cell(v100):
    cells = grid()
    lines = rows([v100.outcome(cell) for cell in cells])
    text = io.StringIO(as_csv(lines))
    found = list(csv.DictReader(text))
    numbers = ("devices", "ntasks", "batch per device", "chunks")
    assert [Cell(*(int(line[name]) for name in numbers)) for line in found] == cells
    # each has either a value or a reason
    assert all(bool(line["samples/s"]) != bool(line["blank because"]) for line in found)
    assert len(as_markdown(lines).splitlines()) == 2 + len(cells)
    value = float(found[0]["samples/s"])
    assert value == pytest.approx(cells[0].samples / v100.outcome(cells[0]).step_ms * 1e3, rel=1e-3)


def run_worker(task, tmp_path, monkeypatch):
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["worker", json.dumps(task), str(result)])
    worker.main()
    return json.loads(result.read_text())


@pytest.mark.thorough
def test_real_cells_train_on_synthetic_reviews_where_there_is_no_data_set(
    small, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    task = real_task(small, CELL, steps=1, overrides=[*SMALL, "world.devices=cpu"])
    found = run_worker(task, tmp_path, monkeypatch)
    assert found["facts"] == {"device": "CPU stages", "synthetic": True}
    assert found["step_ms"] > 0


def test_emulated_cells_report_the_time_without_the_stretch(small, tmp_path, monkeypatch):
    task = emulated_task(small, CELL, steps=1, step_s=0.2)
    assert len(task["stage_ms"][0]) == CELL.nb_part
    assert task["stretch"] == pytest.approx(200 / small.emulated_ms(CELL))
    found = run_worker(task, tmp_path, monkeypatch)
    # sleeps are never shorter than asked for, and 0.2 s are a thousand times the predicted step
    assert small.emulated_ms(CELL) * 0.999 <= found["step_ms"] < 200


@pytest.mark.thorough
def test_the_command_writes_a_figure_and_a_table(tmp_path, monkeypatch, capsys):
    command.main(["--predict", "--devices", "4", "8", "--out", str(tmp_path)])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"predicted-4.png", "predicted-8.png", "predicted.csv", "predicted.md"}
    assert "| 8 | 8 | 1 | 256 | 1 |" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_machine_whose_layers_are_measured_predicts_but_is_not_emulated(tmp_path):
    # measured times differ between two runs, so that no emulated cell would be done
    path = tmp_path / "measured.yaml"
    path.write_text("{costs: measured, device: cpu, devices_per_node: 2}")
    options = ["--hardware", str(path), "--devices", "2", "--out", str(tmp_path), *SMALL]
    with pytest.raises(ConfigError, match="costs=estimated"):
        command.main(["--predict", "--emulated", *options])
    assert (tmp_path / "predicted.csv").exists()
