"""Prices on the command line: `plan` for a machine, `measure-machine`, and keys that are `auto`."""

import json
import os
import re
import shlex

import pytest
import torch
import yaml
from cli_runs import fail, succeed
from PIL import Image
from support.cases import thinned
from support.launch import SMALL, torchrun

from hybridtrain.cli import main
from hybridtrain.cli.config.schema import HardwareConfig
from hybridtrain.cli.run import auto
from hybridtrain.partitioning import LayerCost, given_costs


def words_of(told):
    """Returns the words after `hybridtrain` of the command that a plan ends with."""
    command = shlex.split(told.rsplit("to train with it:", 1)[1].strip().splitlines()[0])
    return command[command.index("hybridtrain") + 1 :]


@pytest.mark.thorough
def test_plan_for_a_cluster_writes_what_train_takes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    keys = ["hardware=h100", "hardware.nodes=1", "hardware.devices_per_node=2", "run_name=priced"]
    told = succeed(capfd, "plan", *SMALL, *keys, "pipeline.nb_part=2", "world.engine=local")
    assert "step ms" in told
    assert "predicted from estimated costs" in told
    assert "plan.png next to it" in told
    assert Image.open(tmp_path / "outputs/priced/plan.png").format == "PNG"
    trained = succeed(capfd, *words_of(told), "world.devices=cpu", "run_name=run")
    assert "done: " in trained
    cut = yaml.safe_load((tmp_path / "outputs/priced/plan.yaml").read_text())
    run = yaml.safe_load((tmp_path / "outputs/run/plan.yaml").read_text())
    assert [len(s["layers"]) for s in cut["stages"]] == [len(s["layers"]) for s in run["stages"]]


@pytest.mark.thorough
def test_a_plan_that_recomputes_single_layers_is_trained_and_priced_by_its_command(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 256, "n_layer": 6, "d_model": 64, "n_head": 2}
    keys = [f"model.{key}={value}" for key, value in sizes.items()]
    keys += ["data.seq_len=128", "data.batch_size=16", "trainer.steps=2"]
    layout = ["nb_part=2", "chunks=2", "schedule=1f1b", "memory_limit_gib=0.022"]
    told = succeed(
        capfd,
        *("plan", "recipe=python_source_gpt", *keys, "run_name=priced", "world.engine=local"),
        *("hardware=h100", "hardware.devices_per_node=2", "pipeline.stages_per_device=1"),
        *("hardware.library_gib=0", "hardware.library_gib_per_stage=0"),  # more than the limit
        *(f"pipeline.{key}" for key in layout),
    )
    succeed(capfd, *words_of(told), "world.devices=cpu", "run_name=run", "hardware.device=cpu")
    run = yaml.safe_load((tmp_path / "outputs/run/config.yaml").read_text())["pipeline"]
    assert run["recompute"]
    assert set(run["recompute"]) <= {f"blocks.{i}" for i in range(6)}
    compared = json.loads((tmp_path / "outputs/run/summary.json").read_text())
    memory = [compared[key]["memory_bytes"] for key in ("predicted", "measured")]
    # a recomputed layer at the end of a stage is counted with its output, which is not kept
    assert memory[0] == pytest.approx(memory[1], rel=0.05)


@pytest.mark.thorough
def test_a_batch_that_is_larger_than_the_data_set_is_predicted_as_what_it_is(tmp_path, capfd):
    small = ["recipe=digits", "world.devices=cpu", "data.batch_size=2048", "trainer.epochs=1"]
    said = succeed(capfd, *small, "run_name=small")
    assert "no prediction:" not in said
    summary = json.loads((tmp_path / "outputs/small/summary.json").read_text())
    memory = [summary[key]["memory_bytes"] for key in ("predicted", "measured")]
    assert memory[0] == pytest.approx(memory[1], rel=0.1)


AUTO = [f"pipeline.{key}=auto" for key in ("nb_part", "chunks", "schedule")]


@pytest.mark.thorough
def test_auto_says_what_was_chosen_and_why_and_a_run_that_goes_on_keeps_it(tmp_path, capfd):
    told = succeed(capfd, "train", *SMALL, *AUTO)
    (line,) = [line for line in told.splitlines() if "predicted from measured costs" in line]
    assert "ms per step" in line
    chosen = yaml.safe_load((tmp_path / "outputs/digits/config.yaml").read_text())["pipeline"]
    values = [f"pipeline.{key}={chosen[key]}" for key in ("nb_part", "chunks", "schedule")]
    assert all(f"{value}," in line or f"{value}:" in line for value in values)
    assert type(chosen["nb_part"]) is type(chosen["chunks"]) is int
    told = succeed(capfd, "train", *SMALL, *AUTO, "trainer.steps=7")
    assert "resumed from" in told
    assert "predicted from" not in told
    assert "-> auto" not in told
    again = yaml.safe_load((tmp_path / "outputs/digits/config.yaml").read_text())["pipeline"]
    assert again == chosen


@pytest.mark.thorough
def test_a_schedule_of_auto_fits_the_limit_and_says_the_smallest_that_would_do(tmp_path, capfd):
    def error_of(told):
        return re.search(r"at least pipeline\.memory_limit_gib=(\S+) \(", told)

    keys = [*(key for key in SMALL if "chunks" not in key), "pipeline.schedule=auto"]
    keys += ["pipeline.chunks=auto", "trainer.steps=1"]
    told = fail(capfd, "train", *keys, "pipeline.memory_limit_gib=1e-6")
    assert told.startswith("error: pipeline.chunks=auto, pipeline.schedule=auto: no plan fits: ")
    assert "no plan fits: pipeline.memory_limit_gib=1e-06 is too small; " in told
    limits = {"tight": float(error_of(told)[1]), "wide": 1.0}
    chosen = {}
    for name, limit in limits.items():
        run = [f"pipeline.memory_limit_gib={limit}", f"run_name={name}"]
        told = succeed(capfd, "train", *keys, *run)
        (line,) = [line for line in told.splitlines() if "predicted from measured costs" in line]
        assert line.count(" ms (") == {"tight": 0, "wide": 2}[name]  # the next two that fit
        config = yaml.safe_load((tmp_path / f"outputs/{name}/config.yaml").read_text())["pipeline"]
        names = ("chunks", "schedule", "stages_per_device", "recompute")
        chosen[name] = {key: config[key] for key in names}
        assert f"pipeline.schedule={config['schedule']}, " in line
        summary = json.loads((tmp_path / f"outputs/{name}/summary.json").read_text())
        assert max(summary["predicted"]["memory_bytes"]) <= limit * 2**30
    assert chosen["tight"] != chosen["wide"]


@pytest.mark.thorough
def test_a_schedule_of_auto_keeps_what_is_set(tmp_path, capfd):
    keys = ["pipeline.schedule=auto", "pipeline.recompute=always", "trainer.steps=1"]
    succeed(capfd, "train", *SMALL, *keys)
    config = yaml.safe_load((tmp_path / "outputs/digits/config.yaml").read_text())["pipeline"]
    assert (config["recompute"], config["chunks"]) == ("always", 4)


@pytest.mark.parametrize(
    ("cores", "busy_ms", "nb_part"), [(4, 3.0, 4), (2, 3.0, 2), (4, 0.0, 1), (3, 3.0, 3)]
)
@pytest.mark.thorough
def test_auto_takes_the_fastest_pipeline_that_the_cores_have_room_for(
    cores, busy_ms, nb_part, tmp_path, monkeypatch, capfd
):
    def costs(net, *_, **settings):  # a stage is no faster for the threads of the others
        one = [LayerCost(name, 1, busy_ms, busy_ms) for name, _ in net.named_children()]
        return given_costs(lambda samples: one)

    monkeypatch.setattr(auto, "model_costs", costs)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    keys = ["pipeline.nb_part=auto", "pipeline.chunks=4", "trainer.steps=1"]
    succeed(capfd, "train", *SMALL, *keys)
    config = yaml.safe_load((tmp_path / "outputs/digits/config.yaml").read_text())
    assert config["pipeline"]["nb_part"] == nb_part
    assert config["pipeline"]["chunks"] == 4


@pytest.mark.parametrize(
    ("command", "keys", "told"),
    [
        ("train", ["pipeline.split=[6,6]"], "pipeline.split=[6, 6]"),
        ("train", ["world.devices=[cpu,cpu]"], "world.devices=['cpu', 'cpu']"),
        ("train", ["pipeline.memory_limit_gib=1e-6"], "pipeline.nb_part=auto: no plan fits: "),
        ("plan", ["world.engine=distributed"], "with torchrun"),
    ],
)
@pytest.mark.quick_cases("plan-keys3-with torchrun")
def test_an_auto_that_cannot_be_chosen_is_one_line_with_its_key(command, keys, told, capfd):
    error = fail(capfd, command, *SMALL, "pipeline.nb_part=auto", *keys)
    assert error.startswith("error: pipeline.nb_part=auto")
    assert told in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.thorough
def test_a_batch_size_of_auto_is_the_largest_that_fits_and_a_run_that_goes_on_keeps_it(
    tmp_path, capfd
):
    limit_gib = 0.002
    keys = ["data.batch_size=auto", "data.first_batches=1", "pipeline.chunks=2"]
    keys.append(f"pipeline.memory_limit_gib={limit_gib}")
    told = succeed(capfd, "train", *SMALL, *keys, "trainer.steps=1")
    config = yaml.safe_load((tmp_path / "outputs/digits/config.yaml").read_text())
    size = config["data"]["batch_size"]
    assert f"data.batch_size={size}: " in told
    assert f"; {2 * size} would need " in told
    fits = json.loads((tmp_path / "outputs/digits/summary.json").read_text())
    told = succeed(capfd, "train", *SMALL, *keys, "trainer.steps=2")
    assert "resumed from" in told
    assert f"; {2 * size} would need " not in told
    fixed = [f"data.batch_size={2 * size}", *keys[1:], "run_name=twice", "trainer.steps=1"]
    succeed(capfd, "train", *SMALL, *fixed)
    twice = json.loads((tmp_path / "outputs/twice/summary.json").read_text())
    peaks = [max(s["peak_memory_bytes"] for s in run["stages"]) for run in (fits, twice)]
    assert peaks[0] <= limit_gib * 2**30 < peaks[1]


@pytest.mark.thorough
def test_a_batch_size_of_auto_counts_the_layers_that_are_recomputed_as_its_run_does(capfd):
    keys = ["data.batch_size=auto", "data.first_batches=1", "pipeline.chunks=2"]
    keys += ["pipeline.memory_limit_gib=0.002", "pipeline.recompute={every: 2}"]
    told = succeed(capfd, "train", *SMALL, *keys, "trainer.steps=1")
    chosen = re.search(r"micro-batch, (.*) of .* predicted per device", told)
    predicted = re.search(r"memory of device \d: (.*) predicted", told)
    assert chosen[1] == predicted[1]


@pytest.mark.thorough
def test_the_length_of_a_planned_run_is_that_of_its_first_batches(capfd):
    length = ["trainer.steps=null", "trainer.epochs=3", "data.first_batches=2"]
    told = succeed(capfd, "plan", *SMALL, "hardware=h100", *length)
    assert "6 steps" in told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["pipeline.memory_limit_gib=1e-4"], "4 would need "),
        (["pipeline.chunks=2000"], "1442 samples, fewer than the 2000 micro-batches"),
        (["pipeline.chunks=auto"], "pipeline.chunks=auto depend on each other"),
        (["pipeline.max_inflight=2"], "max_inflight=2 is not priced"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_batch_size_of_auto_that_cannot_be_found_is_one_line(keys, told, capfd):
    error = fail(capfd, "train", *SMALL, "data.batch_size=auto", *keys)
    assert error.startswith("error: data.batch_size=auto")
    assert told in error


@pytest.mark.parametrize(
    ("keys", "told"),
    thinned(
        [
            (["hardware=h10"], "hardware=h10 is unknown: did you mean 'h100'"),
            (["hardware=none/there.yaml"], "hardware=none/there.yaml: No such file"),
            (["hardware=this-machine"], "has not been measured yet"),
            (["hardware.nodes=2"], "hardware.nodes=2 needs a machine"),
            (["hardware=h100", "pipeline.nb_part=two"], "pipeline.nb_part='two' must be a number"),
            (["hardware=h100", "pipeline.nb_part=3"], "no layout uses all 8 devices"),
            (["hardware=h100", "data.batch_size=1"], "data.batch_size=1: "),
            (["hardware=[1,2]"], "hardware=[1,2] must be the name of a machine"),
            (["hardware=list.yaml"], "hardware=list.yaml must be a mapping"),
            (["hardware=broken.yaml"], "hardware=broken.yaml is not YAML: "),
            (["hardware=typed.yaml"], "hardware.nodes=many must be a whole number"),
            (["hardware=unknown.yaml"], "hardware.noodes"),
            (["hardware=h100", "hardware.nodez=2"], "did you mean hardware.nodes"),
            (["hardware=h100", "hardware.nodes=0"], "hardware.nodes=0 must be"),
            (["hardware=jean-zay-v100", "trainer.precision=bf16"], "no rate for bf16"),
            (["hardware=h100", "hardware.memory_gib=1.0001"], "no plan fits"),
            (["hardware=h100", "pipeline.memory_limit_gib=1e-5"], "no plan fits: "),
            (["hardware=h100", "pipeline.memory_limit_gib=-1"], "memory_limit_gib=-1"),
            (["hardware=h100", "hardware.costs=guessed"], "hardware.costs=guessed is unknown"),
            (["hardware=h100", "hardware.costs=measured"], "set hardware.costs=estimated"),
            (
                ["hardware=h100", "hardware.costs=calibrated"],
                "hardware.costs=calibrated is unknown",
            ),
        ],
        3,
    ),
)
@pytest.mark.thorough
def test_a_machine_that_cannot_be_priced_is_one_line(keys, told, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = {
        "list.yaml": "[1, 2]",
        "broken.yaml": "nodes: [1",
        "typed.yaml": "nodes: many",
        "unknown.yaml": "noodes: 2",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    error = fail(capfd, "plan", *SMALL, *keys)
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "outputs/digits/plan.yaml").exists()


@pytest.mark.thorough
def test_measure_machine_writes_what_this_machine_reads(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["measure-machine", "seconds=0"]) == 0
    capfd.readouterr()
    written = yaml.safe_load((tmp_path / "hybridtrain/this-machine.yaml").read_text())
    assert set(written) <= set(vars(HardwareConfig()))
    told = succeed(capfd, "plan", *SMALL, "hardware=this-machine")
    assert "predicted from measured costs" in told


@pytest.mark.thorough
def test_measure_machine_under_torchrun_is_one_clear_line(tmp_path):
    ended = torchrun(2, ["measure-machine", "seconds=0"], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert ended.returncode != 0
    errors = re.findall(r"^error: .*", ended.stderr, re.MULTILINE)
    assert errors == [
        "error: measure-machine runs in one process: start it without torchrun or srun"
    ]
    assert not (tmp_path / "hybridtrain").exists()


def test_a_plan_says_that_the_host_is_the_limit_and_that_compile_is_not_priced(tmp_path, capfd):
    keys = ["hardware=h100", "hardware.devices_per_node=1", "hardware.nodes=1"]
    keys += ["pipeline.nb_part=1", f"output_dir={tmp_path}"]
    slow = ["hardware.operator_s=1e-4", "hardware.backward_operator_s=2e-4", "trainer.compile=true"]
    told = succeed(capfd, "plan", *SMALL, *keys, *slow)
    assert len(re.findall(r"^  host +the host is the limit: ", told, re.MULTILINE)) == 1
    assert "trainer.compile=true is not priced: the times" in told
    fast = ["hardware.operator_s=0", "hardware.backward_operator_s=0", "hardware.action_s=0"]
    told = succeed(capfd, "plan", *SMALL, *keys, *fast)
    assert "the host is the limit" not in told
    assert "not priced" not in told


@pytest.mark.thorough
def test_a_plan_says_first_whether_fsdp2_is_the_better_choice(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sizes = ["model.n_layer=24", "model.d_model=1024", "model.n_head=16"]
    machine = ["hardware=h100", "hardware.memory_gib=5", "hardware.devices_per_node=2"]
    for link, is_better in (("300e9", True), ("1e9", False)):
        link = f"hardware.node_bytes_per_s={link}"
        said = succeed(capfd, "plan", "recipe=python_source_gpt", *sizes, *machine, link)
        # the line before the first plan, which begins with its spread
        lines = said.splitlines()
        above = next(n for n, line in enumerate(lines) if line.split()[:1] == ["spread"]) - 1
        assert ("FSDP2" in lines[above]) is is_better
