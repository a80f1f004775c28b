"""The notebook for a laptop, in a kernel, as a reader runs it after the installation."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pages import ROOT
from support.launch import environment


@pytest.mark.thorough
def test_its_cells_train_the_same_model_twice_and_a_recipe(tmp_path, monkeypatch):
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in environment({"STEPS": "5", "PATH": programs}).items():
        monkeypatch.setenv(name, value)
    book = nbformat.read(ROOT / "examples" / "laptop.ipynb", as_version=4)
    (install,) = (cell for cell in book.cells if cell.source.startswith("%pip install"))
    book.cells.remove(install)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert float(re.search(r"difference of a weight: (\S+)", text)[1]) < 1e-6
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    summary = json.loads((tmp_path / "outputs" / "digits" / "summary.json").read_text())
    assert summary["eval"]["samples"] == 355
