"""Unequal devices on the command line."""

import json

import pytest
import yaml
from cli_runs import fail, succeed
from support.launch import SMALL, forked_command


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_over_unequal_devices_shows_and_keeps_their_speeds(tmp_path, capfd):
    keys = ["pipeline.nb_part=2", "pipeline.device_speeds=[1,4]", "run_name=unequal"]
    told = succeed(capfd, "train", *SMALL, *keys, "pipeline.memory_limit_gib=[1,2]")
    assert "speed" in told
    stages = yaml.safe_load((tmp_path / "outputs/unequal/plan.yaml").read_text())["stages"]
    assert [stage.get("speed", 1) for stage in stages] == [1, 4]
    assert len(stages[0]["layers"]) < len(stages[1]["layers"])
    predicted = json.loads((tmp_path / "outputs/unequal/summary.json").read_text())["predicted"]
    assert len(predicted["memory_bytes"]) == 2


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["pipeline.device_speeds=[1]"], ["pipeline.device_speeds=[1]", "pipeline.nb_part"]),
        (["pipeline.device_speeds=[1,0]"], ["pipeline.device_speeds", "0"]),
        (["pipeline.memory_limit_gib=[1,-1]"], ["pipeline.memory_limit_gib", "-1"]),
        (["world.replica_shares=[1,2]"], ["world.replica_shares=[1, 2]", "1 replica"]),
        (["world.replica_shares=[0]"], ["world.replica_shares=[0]"]),
        (
            ["world.replica_shares=[1]", "world.replicas=2"],
            ["world.replica_shares", "world.replicas=2"],
        ),
        (
            ["pipeline.nb_part=auto", "pipeline.device_speeds=[1,2]"],
            ["pipeline.device_speeds", "pipeline.nb_part=2"],
        ),
        (
            ["pipeline.nb_part=auto", "world.engine=distributed", "world.replica_shares=[1,2]"],
            ["pipeline.nb_part=auto", "world.engine=distributed", "world.replica_shares=[1, 2]"],
        ),
        (["pipeline.device_speeds=fast"], ["pipeline.device_speeds='fast'", "'auto'"]),
        (
            ["pipeline.memory_limit_gib=0"],
            ["pipeline.memory_limit_gib=0", "pipeline.memory_limit_gib=null"],
        ),
    ],
    ids=[
        "length",
        "zero",
        "negative",
        "replicas",
        "share of zero",
        "with world.replicas",
        "auto",
        "auto replicas",
        "a word",
        "a limit of zero",
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_error_that_names_the_key(keys, names, capfd):
    told = fail(capfd, "train", *SMALL, "pipeline.nb_part=2", *keys)
    assert len(told.strip().splitlines()) == 1
    for name in names:
        assert name in told


@pytest.mark.thorough
def test_a_plan_for_unequal_gpus_is_trained_by_its_command(tmp_path, capfd):
    (tmp_path / "mixed.yaml").write_text(
        "device: cuda\ndevices_per_node: 4\nmemory_gib: 48\nflops_per_s: {fp32: 1.0e+13}\n"
        "device_speeds: [2, 2, 1, 1]\ndevice_memory_gib: [48, 48, 16, 16]\n"
    )
    keys = ["hardware=mixed.yaml", "run_name=priced", "pipeline.nb_part=2"]
    told = succeed(capfd, "plan", *SMALL, *keys)
    assert "unequal" in told
    assert "world.replica_shares=[2,1]" in told or "world.devices=[cuda:0,cuda:2" in told


@pytest.mark.thorough
def test_a_run_with_unequal_shares_is_evaluated_and_resumed_on_another_number_of_processes(
    tmp_path, capfd
):
    shares = ["run_name=unequal", f"output_dir={tmp_path}/outputs", "world.replica_shares=[1,3]"]
    forked_command(2, ["train", *SMALL, *shares], tmp_path / "run")
    succeed(capfd, "evaluate", "run_name=unequal")
    said = fail(capfd, "train", "run_name=unequal", "trainer.steps=8")
    assert "world.replica_shares=[1, 3]" in said
    assert "world.replica_shares=null" in said
    succeed(capfd, "train", "run_name=unequal", "trainer.steps=8", "world.replica_shares=null")


@pytest.mark.thorough
def test_shares_of_two_processes_are_in_their_logs(tmp_path):
    told = forked_command(2, ["train", *SMALL, "world.replica_shares=[1,3]"], tmp_path / "run")
    assert "done: " in told
