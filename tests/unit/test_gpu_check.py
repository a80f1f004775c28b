"""scripts/gpu_check.sh, tried on the CPU: its parts, and what it needs to be installed."""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import environment
from support.stand_in_gpus import stand_in_gpus

from scripts import gpu_check, gpu_parts, gpu_processes
from tests.support.matrix import random_cells

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

ROOT = Path(__file__).parents[2]

# what a GPU machine with PyTorch often lacks
NOT_NEEDED = ("hydra", "omegaconf", "antlr4", "torchvision", "torchmetrics", "tensorboard")

# run by the interpreter at its start
NOT_INSTALLED = """
import importlib.metadata as metadata
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
known = metadata.Distribution.from_name
def from_name(name):
    if name.replace("-core", "").partition("-python3")[0] in {names}:
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.Distribution.from_name = from_name
"""

# these drive streams and read counters of memory, which the stand-ins have and a CPU does not
ON_STAND_INS = (
    "copies on side streams",
    "no waits in a step",
    "timeline",
    "measured splits",
    "peak memory",
)


@pytest.mark.parametrize("part", [name for name in gpu_parts.PARTS if name != "compile"])
def test_each_part_runs_on_the_cpu(part: str) -> None:
    assert gpu_parts.PARTS[part]("cpu")


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_the_part_with_compiled_layers_runs_on_the_cpu(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    assert gpu_parts.PARTS["compile"]("cpu")


@pytest.mark.parametrize("part", ON_STAND_INS)
@pytest.mark.quick_cases("peak memory")
def test_a_part_with_streams_or_counters_runs_on_devices_that_have_them(part: str) -> None:
    with stand_in_gpus(1):
        said = gpu_parts.PARTS[part]("cpu:0")
    assert said
    assert "no counter" not in said


def test_the_exactness_and_the_costs_run_on_the_cpu(tmp_path: Path) -> None:
    table = gpu_check.Check("cpu", True, math.inf, file=tmp_path / "table.json")
    gpu_check.exactness(table, random_cells(2), until=0)
    for cost in gpu_check.COSTS:
        cost(table)
    assert not table.failed
    assert not table.cut_off
    rows = json.loads(table.file.read_text())["rows"]
    assert [row["verdict"] for row in rows if row["check"].startswith("exact")] == ["ok", "ok"]
    assert sum(row["check"].startswith("GPT") for row in rows) == 4


def test_a_result_that_differs_from_the_unsplit_model_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    different = [("weights", torch.ones(2), torch.ones(2) + 0.5, False)]
    monkeypatch.setattr(gpu_check, "compared", lambda *_, **__: different)
    table = gpu_check.Check("cpu", True, math.inf, file=tmp_path / "table.json")
    gpu_check.exactness(table, random_cells(1), until=0)
    assert table.failed
    assert "weights" in " ".join(table.rows[-1])


def test_the_checks_of_a_process_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gpu_processes.py", "--device", "cpu", "--small", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_processes.main() == 0
    assert capsys.readouterr().out.endswith("exact\n")


def check(folder: Path, *arguments: str, missing: tuple[str, ...] = NOT_NEEDED) -> tuple[int, str]:
    """Runs the script where the `missing` packages are not; returns its status and output."""
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(NOT_INSTALLED.format(names=missing))
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment({"PYTHON": sys.executable, "PYTHONPATH": str(blocked)}),
    )
    return done.returncode, done.stdout


def test_the_script_needs_only_what_it_imports(tmp_path: Path) -> None:
    code, said = check(tmp_path, "--device", "cpu", "--small", "--seconds", "0")
    assert code == 0, said
    table = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(gpu_parts.PARTS) < {row["check"] for row in table["rows"]}
    assert set(gpu_parts.PARTS) < set(table["cut_off"])


@pytest.mark.thorough
def test_the_whole_script_ends_well_on_the_cpu(tmp_path: Path) -> None:
    code, said = check(tmp_path, "--device", "cpu", "--small")
    assert code == 0, said
    table = json.loads((tmp_path / "gpu_check.json").read_text())
    verdicts = {row["check"]: row["verdict"] for row in table["rows"]}
    assert {verdicts[name] for name in gpu_parts.PARTS} == {"ok"}


@pytest.mark.thorough
def test_the_checks_of_several_processes_need_only_what_they_import(tmp_path: Path) -> None:
    arguments = ["--processes", "2", "--device", "cpu", "--small", "--seconds", "20"]
    code, said = check(tmp_path, *arguments)
    assert code == 0, said
    assert said.endswith("exact\n")


@pytest.mark.thorough
def test_a_package_that_is_missing_is_one_line(tmp_path: Path) -> None:
    code, said = check(tmp_path, "--device", "cpu", "--small", missing=("safetensors", "hydra"))
    assert code == 1
    assert said.startswith("gpu_check: safetensors is not installed")
    assert len(said.splitlines()) == 1
