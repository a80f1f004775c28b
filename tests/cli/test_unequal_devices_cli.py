"""Unequal devices on the command line."""

import json
import re

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
        (["pipeline.device_speeds=[1,0]"], ["pipeline.device_speeds=[1, 0]"]),
        (["pipeline.memory_limit_gib=[1,-1]"], ["pipeline.memory_limit_gib=[1, -1]"]),
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
        (["pipeline.device_speeds=fast"], ["pipeline.device_speeds=fast", "'auto'"]),
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


MIXED = (
    "costs: estimated\ndevice: {device}\ndevices_per_node: 4\nmemory_gib: 48\n"
    "flops_per_s: {{fp32: 1.0e+13}}\ndevice_speeds: [2, 2, 1, 1]\n"
    "device_memory_gib: [48, 48, 16, 16]\n"
)


def plan_of_mixed(tmp_path, capfd, *keys, device="cuda"):
    """Returns the words of the command that `plan` prints for a node of unequal devices."""
    (tmp_path / "mixed.yaml").write_text(MIXED.format(device=device))
    told = succeed(
        capfd, "plan", *SMALL, "hardware=mixed.yaml", "pipeline.nb_part=2", *keys, "run_name=priced"
    )
    return told.rpartition("to train with it:")[2].split()


@pytest.mark.thorough
def test_a_plan_for_unequal_devices_prints_how_to_place_them(tmp_path, capfd):
    def placed(words):
        keys = "world.replica_shares=[", "world.devices=["
        return [word for word in words if word.strip("'").startswith(keys)]

    assert len(placed(plan_of_mixed(tmp_path, capfd))) == 1
    on_cpu = plan_of_mixed(tmp_path, capfd, device="cpu")
    # CPU devices have no numbers, so only shares even them out
    (shares,) = placed(on_cpu)
    assert "world.replica_shares=[" in shares


def test_a_plan_keeps_the_given_shares(tmp_path, capfd):
    words = plan_of_mixed(tmp_path, capfd, "world.replica_shares=[1,3]")
    given = [word for word in words if "replica_shares" in word]
    assert [word.strip("'") for word in given] in (
        ["world.replica_shares=[1,3]"], ["world.replica_shares=[1.0,3.0]"],
    )  # fmt: skip


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
def test_a_run_with_unequal_shares_chooses_its_micro_batches_and_ends(tmp_path):
    shares = ["world.replica_shares=[1,7]", "data.batch_size=16", "pipeline.chunks=auto"]
    told = forked_command(2, ["train", *SMALL, *shares], tmp_path / "run")
    assert "done: " in told
    assert re.search(r"pipeline\.chunks=\d+: ", told)
