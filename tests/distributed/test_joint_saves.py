"""Checkpoints that all processes write together."""

import functools

import pytest
import torch
from support.launch import WORKERS, Results, torchrun_script, worker_module
from support.nets import CLASSES
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint import state
from hybridtrain.checkpoint.store import CheckpointStore

CELLS = worker_module("joint_saves").cells.cells


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Launches the worker once for each number of processes, at its first cell."""
    return functools.cache(
        lambda processes: Results("joint_saves", processes, tmp_path_factory.mktemp("joint"))
    )


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_joint_saves(cell, processes, results):
    results(processes).check(cell)


@pytest.mark.parametrize(
    "when", [pytest.param("foreground", marks=pytest.mark.thorough), "background"]
)
def test_a_process_killed_in_its_write_ends_the_run_and_costs_that_save_only(when, tmp_path):
    output = torchrun_script(2, WORKERS / "killed_save.py", tmp_path, when, ok=False, timeout=300)
    assert "the end was reached" not in output
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1, 2]
    # the same state in one process, which goes on
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model = HybridModel(net, World(), chunks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = state.restore_checkpoint(store.newest(), model, optimizer)
    assert saved["step"] == 2
    assert len(optimizer.state) == 4
    store.save(3, state.writers(model, optimizer, {}))
    assert store.steps() == [1, 2, 3]
    assert list(tmp_path.glob(".tmp-*")) == []
