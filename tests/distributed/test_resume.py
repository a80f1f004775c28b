"""A run resumed with another number of processes and stages equals the uninterrupted one."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint_files import optimizer_in
from support.launch import forked_script, worker_module

worker = worker_module("resume")

# Replicas add up the same gradients in another order than one process does, and AdamW, which
# divides by their size, makes the last bits of small ones count: after 6 steps of about 0.01.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
HALF = worker.STEPS // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs: of one process with 3 stages here, of 2 processes with 2 stages in the worker."""
    folder = tmp_path_factory.mktemp("resume")
    worker.run(folder / "one", 3, worker.STEPS)
    worker.run(folder / "one_then_two", 3, HALF)
    status, output = forked_script(2, "resume.py", folder)
    assert status == 0, output
    worker.run(folder / "two_then_one", 3, worker.STEPS, since=HALF)
    return folder


def load(folder, run, step=worker.STEPS):
    path = folder / run / f"step_{step:08d}"
    return (
        load_file(path / "model.safetensors"),
        optimizer_in(path),
        json.loads((path / "state.json").read_text()),
    )


@pytest.mark.parametrize("run", ["whole", "two_then_one", "one_then_two"])
def test_weights_and_optimizer_equal_those_of_one_uninterrupted_process(run, folder):
    (model, optimizer, state), (plain, moments, progress) = load(folder, run), load(folder, "one")
    assert model.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(model[name], value, **CLOSE, msg=name)
    assert optimizer["param_groups"] == moments["param_groups"]
    assert optimizer["state"].keys() == moments["state"].keys()
    for name, entry in moments["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(
                optimizer["state"][name][key], value, **CLOSE, msg=f"{name} {key}"
            )
    assert state == progress


def test_the_halves_were_different_from_the_whole(folder):
    # or the comparison above would be of nothing
    half, _, state = load(folder, "two_then_one", HALF)
    whole, _, _ = load(folder, "one")
    assert state["step"] == HALF
    assert not torch.allclose(half["0.weight"], whole["0.weight"], **CLOSE)


@pytest.mark.parametrize("samples", [5, 1])
def test_evaluation_counts_every_sample_once_also_if_a_replica_has_none(samples, folder):
    rounds = json.loads((folder / "evaluations.json").read_text())
    (of,) = [each for each in rounds if each["expected"]["samples"] == samples]
    for found in of["found"]:
        assert found == pytest.approx(of["expected"], rel=1e-6)
