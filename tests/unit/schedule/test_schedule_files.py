"""Schedules of one's own: a table, a plan, or a CSV file in the form of PyTorch's pipelining."""

import copy
import re

import pytest
import torch
import yaml
from support.compare import assert_same_gradients, hybrid, plain_step
from torch import nn
from torch.nn.functional import mse_loss

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule import (
    Schedule,
    actions_as_text,
    make_schedule,
    read_schedule,
    register_table,
    schedule_names,
    write_csv,
)

SHAPES = [("gpipe", 2, 1), ("1f1b", 2, 2), ("zb-h1", 3, 1), ("zb-v", 2, 2), ("v-min", 3, 2)]


def write(table, path):
    if path.suffix == ".csv":
        write_csv(table, path)
    else:
        path.write_text(yaml.safe_dump({"actions": actions_as_text(table)}))


def assert_trains_exactly(devices, per_device, schedule, ran=None):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    plain = copy.deepcopy(net)
    model = hybrid(net, devices, per_device, schedule=schedule)
    for rows in (9, 3):  # a short batch has three micro-batches
        x, y = torch.randn(2, rows, 8)
        result = model.train_step(x, y, mse_loss, timeline=True)
        plain_step(plain, x, y, mse_loss)
        assert_same_gradients(net, plain)
        if ran is not None and rows == 9:
            lanes = [tuple(span.action for span in lane) for lane in result.timeline.spans()]
            assert lanes == list(ran.lanes)


@pytest.mark.parametrize("form", ["csv", "yaml"])
@pytest.mark.parametrize(("name", "devices", "per_device"), SHAPES)
@pytest.mark.quick_cases("1f1b-2-2-csv", "zb-v-2-2-yaml")
def test_an_exported_schedule_is_read_again_and_trains_exactly(
    name, devices, per_device, form, tmp_path
):
    table, path = make_schedule(name, devices, 4, per_device), tmp_path / f"table.{form}"
    write(table, path)
    assert read_schedule(path).lanes == table.lanes
    assert_trains_exactly(devices, per_device, str(path), ran=table)


def test_an_exported_schedule_with_an_edited_line_trains_exactly(tmp_path):
    path = tmp_path / "edited.csv"
    write_csv(make_schedule("1f1b", 2, 4), path)
    before = path.read_text()
    edited = before.replace("0F0,0F1,0B0,0F2", "0F0,0F1,0F2,0B0")
    assert edited != before
    path.write_text(edited)
    assert_trains_exactly(2, 1, str(path), ran=read_schedule(path))


@pytest.mark.parametrize("rows", [9, 4])  # of different and of equal micro-batches
def test_a_table_that_divides_the_first_stages_backward_gives_the_batch_its_gradient(
    rows, tmp_path
):
    path = tmp_path / "divided.csv"
    write_csv(make_schedule("1f1b", 2, 4), path)
    path.write_text(re.sub(r"(\d)B(\d)", r"\1I\2,\1W\2", path.read_text()))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    plain, (x, y) = copy.deepcopy(net), torch.randn(2, rows, 8)
    batches = [x.clone().requires_grad_() for _ in range(2)]
    hybrid(net, 2, schedule=str(path)).train_step(batches[0], y, mse_loss)
    plain_step(plain, batches[1], y, mse_loss)
    assert_same_gradients(net, plain)
    assert torch.equal(batches[0].grad, batches[1].grad)


def test_a_plan_is_a_file_of_the_schedule_that_it_was_made_for(tmp_path):
    path = tmp_path / "plan.yaml"
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    plan = hybrid(net, 2, 2, chunks=4, schedule="zb-v").plan
    plan.write(path)
    table = make_schedule("zb-v", 2, 4, 2)
    assert read_schedule(path).lanes == table.lanes
    before, after = "F1@0 F2@0", "F2@0 F1@0"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ScheduleError, match=r"plan\.yaml: F2@0 is out of order; stage 0 must take"):
        read_schedule(path)
    plan.write(path)
    assert_trains_exactly(2, 2, str(path), ran=table)


def test_torch_reads_the_actions_of_a_written_file(tmp_path):
    from torch.distributed.pipelining.schedules import _Action

    path = tmp_path / "table.csv"
    table = make_schedule("zb-v", 2, 4, 2)
    write_csv(table, path)
    for line, lane in zip(path.read_text().splitlines(), table.lanes, strict=True):
        for cell, action in zip(line.split(","), lane, strict=True):
            theirs = _Action.from_str(cell)
            assert (theirs.stage_index, theirs.microbatch_index) == (
                action.stage,
                action.microbatch,
            )
            assert str(theirs) == cell


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", r"table\.yaml: missing the key `actions`"),
        ("actions: F0@0", r"table\.yaml: actions='F0@0' must be a list of strings"),
        ("actions: [F0@0 0F1]", r"table\.yaml: device 0, action 2: '0F1' is not .* such as F1@0"),
        ("actions: [F0@0", r"table\.yaml: .*: while parsing"),
        ("0F0,0X0", r"table\.csv: device 0, column 2: '0X0' is not an action such as 0F1"),
        ("", r"table\.csv: contains no actions"),
        ("0F0,0B0\n1F0", r"table\.csv: stage 1 lacks a B or I"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            r"device 0: B0@0 needs B0@1, which is after F1@1 on device 1; "
            r"device 1: F1@1 needs F1@0, which is after B0@0 on device 0",
        ),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0", r"stage 1 is on device 0, but placement='loop'"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_before_the_run(text, message, tmp_path):
    path = tmp_path / ("table.yaml" if "yaml" in message else "table.csv")
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        hybrid(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, schedule=str(path))


@pytest.mark.parametrize("form", ["csv", "yaml"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_file_from_a_spreadsheet_or_another_system_is_read(form, separator, tmp_path):
    table, path = make_schedule("1f1b", 2, 3, 1, None), tmp_path / f"table.{form}"
    write(table, path)
    text = path.read_text()
    if form == "csv":
        text = text.replace(",", separator)
    path.write_bytes(f"\ufeff{text}\n\n".replace("\n", "\r\n").encode())
    assert read_schedule(path).lanes == table.lanes


@pytest.mark.parametrize("net", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_file_that_is_missing_is_refused_before_the_first_batch(net, tmp_path):
    with pytest.raises(ScheduleError, match=r"nowhere\.csv: cannot read"):
        hybrid(net, 1, schedule=str(tmp_path / "nowhere.csv"))


def test_a_table_for_other_devices_or_fewer_micro_batches_says_what_to_set(tmp_path):
    path = tmp_path / "table.csv"
    write_csv(make_schedule("1f1b", 2, 3), path)
    for devices, chunks in ((3, 3), (2, 4)):
        with pytest.raises(ScheduleError, match="2 devices and up to 3 micro-batches: set nb_part"):
            make_schedule(str(path), devices, chunks)


def test_a_table_is_a_schedule_once_it_is_registered():
    table = make_schedule("gpipe", 2, 4)
    register_table(Schedule("a table", table.stages, table.chunks, table.lanes))
    assert "a table" in schedule_names()
    assert_trains_exactly(2, 1, "a table", ran=table)
    with pytest.raises(ScheduleError, match=r"gpipe.*: give the table another name"):
        register_table(table)


def test_a_file_that_is_edited_in_a_run_does_not_change_its_schedule(tmp_path):
    path = tmp_path / "table.csv"
    write_csv(make_schedule("1f1b", 2, 3), path)
    table = make_schedule(str(path), 2, 3)
    write_csv(make_schedule("gpipe", 2, 3), path)
    assert read_schedule(path).lanes != table.lanes
    assert make_schedule(str(path), 2, 2).lanes == make_schedule("1f1b", 2, 2).lanes
