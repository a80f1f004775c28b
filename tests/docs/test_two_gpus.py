"""The notebook for two GPUs, on two devices of the CPU: its code cells in one namespace."""

import json
from functools import partial

import pytest
import torch
from pages import ROOT
from support.hf import on_devices

from hybridtrain.piped import is_pipelined

NOTEBOOK = json.loads((ROOT / "examples" / "two_gpus.ipynb").read_text(encoding="utf-8"))
MAP = {
    "model.embed_tokens": "cpu:0",
    "model.layers.0": "cpu:0",
    "model.layers.1": "cpu:0",
    "model.layers.2": "cpu:1",
    "model.layers.3": "cpu:1",
    "model.norm": "cpu:1",
    "model.rotary_emb": "cpu:1",
    "lm_head": "cpu:1",
}


def source_of(kind):
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


def loaded_on_two_devices(load):
    return on_devices(load(), MAP)


def test_its_cells_train_the_same_model_twice(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for name, value in (("MODEL", ""), ("STEPS", "5")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    install, *cells = source_of("code")
    assert install.startswith("%pip install")
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "two_gpus.ipynb", "exec"), names)
        if "def load()" in cell:
            names["load"] = partial(loaded_on_two_devices, names["load"])
    losses = names["losses"]
    assert len(losses["pipelined"]) == 5
    assert losses["pipelined"][-1] < losses["pipelined"][0]
    ours, theirs = (torch.tensor(losses[way]) for way in ("pipelined", "device after device"))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert is_pipelined(names["model"])
    assert "s per step" in capsys.readouterr().out


def test_it_says_that_it_has_not_run_on_t4s():
    assert "It has not run on T4s yet" in "".join(source_of("markdown"))
