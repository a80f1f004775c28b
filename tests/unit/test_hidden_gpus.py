"""Tests see no GPU, on any machine; those marked `gpu` see all of them, with `--gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpus import HIDDEN

TESTS = Path(__file__).parents[1]

# What a user's shell has where two GPUs of four are to be used.
SHELL = {"CUDA_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}

# Stands in for a machine with the GPUs that CUDA_VISIBLE_DEVICES lists, as PyTorch sees it.
MACHINE = """
import os
import torch

def device_count():
    return len(os.environ["CUDA_VISIBLE_DEVICES"].replace(",", " ").split())

torch.cuda.device_count = device_count
torch.cuda.is_available = lambda: device_count() > 0
"""

# One unmarked and one marked test, which write what they and a process of theirs see.
SUITE = """
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import environment

def seen(name):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    facts = {"count": torch.cuda.device_count(), "test": dict(os.environ)}
    for key, env in (("child", None), ("launched", environment())):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)
        facts[key] = json.loads(done.stdout)
    (Path(__file__).parent / name).write_text(json.dumps(facts))

def test_unmarked():
    seen("unmarked.json")

@pytest.mark.gpu
def test_marked():
    seen("marked.json")
"""


def run_suite(folder: Path, *options: str, machine: str = MACHINE) -> str:
    """Runs `SUITE` with the project's conftest.py, from a shell that shows two GPUs."""
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "machine.py").write_text(machine)
    command = [sys.executable, "-m", "pytest", "-c", str(TESTS.parent / "pyproject.toml")]
    command += ["-p", "machine", "-p", "conftest", "-p", "no:cacheprovider", "-rs", *options]
    paths = [str(folder), str(TESTS), str(TESTS.parent)]
    done = subprocess.run(
        [*command, str(folder / "test_suite.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        env={**os.environ, **SHELL, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_this_test_sees_no_gpu() -> None:
    assert {name: os.environ[name] for name in HIDDEN} == HIDDEN


@pytest.mark.thorough
@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.thorough)])
def test_a_test_and_its_processes_see_no_gpu_of_the_machine(tmp_path: Path, workers: str) -> None:
    run_suite(tmp_path, "-n", workers)
    assert not (tmp_path / "marked.json").exists()
    seen = json.loads((tmp_path / "unmarked.json").read_text())
    assert seen["count"] == 0
    for process in ("test", "child", "launched"):
        assert {name: seen[process][name] for name in HIDDEN} == HIDDEN


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.thorough)])
def test_marked_tests_and_their_processes_see_the_gpus(tmp_path: Path, workers: str) -> None:
    run_suite(tmp_path, "--gpu", "-n", workers)
    assert not (tmp_path / "unmarked.json").exists()
    seen = json.loads((tmp_path / "marked.json").read_text())
    assert seen["count"] == 2
    for process in ("test", "child", "launched"):
        assert {name: seen[process][name] for name in SHELL} == SHELL


@pytest.mark.thorough
def test_marked_tests_are_skipped_with_the_reason_where_there_is_no_gpu(tmp_path: Path) -> None:
    said = run_suite(tmp_path, "--gpu", machine="")
    assert "1 skipped" in said
    assert "sees no GPU on this machine" in said
