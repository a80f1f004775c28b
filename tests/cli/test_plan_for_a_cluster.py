"""Prices on the command line: `plan` for a machine, `measure-machine`, and keys that are `auto`."""

import shlex

import pytest
import torch
import yaml
from cli_runs import fail, succeed
from support.launch import SMALL

from hybridtrain.app import measure_machine
from hybridtrain.app.config import ClusterConfig


def test_plan_for_a_cluster_writes_what_train_takes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    keys = ["cluster=h100", "cluster.nodes=1", "cluster.devices_per_node=2", "run_name=priced"]
    told = succeed(capfd, "plan", *SMALL, *keys, "pipeline.nb_part=2", "world.engine=local")
    assert "step ms" in told
    assert "predicted, from estimated costs" in told
    overrides = shlex.split(told.rsplit("to train with it: ", 1)[1].splitlines()[0])
    trained = succeed(capfd, "train", *SMALL, *overrides, "world.devices=cpu", "run_name=run")
    assert "done: " in trained
    cut = yaml.safe_load((tmp_path / "outputs/priced/plan.yaml").read_text())
    run = yaml.safe_load((tmp_path / "outputs/run/plan.yaml").read_text())
    assert [len(s["layers"]) for s in cut["stages"]] == [len(s["layers"]) for s in run["stages"]]


def test_auto_says_what_was_chosen_and_why(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    keys = ["pipeline.nb_part=2", "pipeline.chunks=auto", "pipeline.schedule=auto"]
    told = succeed(capfd, "train", *SMALL, *keys, "world.devices=cpu")
    (line,) = [line for line in told.splitlines() if "pipeline.chunks=" in line]
    assert "pipeline.schedule=" in line
    assert "ms per step, predicted from measured costs" in line
    chosen = yaml.safe_load((tmp_path / "outputs/digits/config.yaml").read_text())["pipeline"]
    assert f"pipeline.chunks={chosen['chunks']}," in line
    assert type(chosen["chunks"]) is int


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["cluster=h10"], "cluster=h10 is unknown: did you mean 'h100'"),
        (["cluster=none/there.yaml"], "cluster=none/there.yaml: No such file"),
        (["cluster=this-machine"], "has not been measured yet"),
        (["cluster.nodes=2"], "cluster.nodes=2 changes a machine, but none is named"),
        (["cluster=h100", "cluster.nodez=2"], "did you mean cluster.nodes"),
        (["cluster=h100", "cluster.nodes=0"], "cluster.nodes=0 must be"),
        (["cluster=jean-zay-v100", "trainer.precision=bf16"], "no rate for bf16"),
        (["cluster=h100", "cluster.memory_gib=1.0001"], "no plan fits"),
        (["cluster=h100", "cluster.costs=guessed"], "cluster.costs=guessed is unknown"),
        (["cluster=h100", "cluster.costs=measured"], "set cluster.costs=estimated"),
    ],
)
def test_a_machine_that_cannot_be_priced_is_one_line(keys, told, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = fail(capfd, "plan", *SMALL, *keys)
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "outputs/digits/plan.yaml").exists()


def test_measure_machine_writes_what_this_machine_reads(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure_machine, "_SECONDS", 0.0)
    monkeypatch.setattr(measure_machine.measured, "__defaults__", (0.0,))
    assert measure_machine.measure_machine() == 0
    written = yaml.safe_load((tmp_path / "hybridtrain/this-machine.yaml").read_text())
    assert set(written) <= set(vars(ClusterConfig()))
    told = succeed(capfd, "plan", *SMALL, "cluster=this-machine")
    assert "predicted, from measured costs" in told
