"""Checkpoints that all processes write together."""

import pytest
import torch
from support.launch import each_cell, forked_script
from support.nets import CLASSES
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint import CheckpointStore, state


@each_cell({"joint_saves": [4, 2]})
def test_joint_saves(worker, processes, cell, launched):
    launched(worker, processes).check(cell)


@pytest.mark.parametrize(
    "when", [pytest.param("foreground", marks=pytest.mark.thorough), "background"]
)
def test_a_process_killed_in_its_write_ends_the_run_and_costs_that_save_only(when, tmp_path):
    said, folder = tmp_path / "said", tmp_path / "checkpoints"
    said.mkdir()
    status, output = forked_script(2, "killed_save.py", said, folder, when)
    assert status != 0
    assert "the end was reached" not in output
    store = CheckpointStore(folder)
    assert store.steps() == [1, 2]
    # the same state in one process, which goes on
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model = HybridModel(net, World(), chunks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = state.restore_checkpoint(store.newest(), model, optimizer)
    assert saved["step"] == 2
    assert len(optimizer.state) == 4
    store.save(3, state.checkpoint_files(model, optimizer, {}))
    assert store.steps() == [1, 2, 3]
    assert list(folder.glob(".tmp-*")) == []
