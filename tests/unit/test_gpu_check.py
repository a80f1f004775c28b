"""scripts/gpu_check.sh, tried on the CPU: its parts, and what it needs to be installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import environment

from scripts import gpu_parts

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

SLOW = ("compile",)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name in SLOW else [])
        for name in gpu_parts.PARTS
    ],
)
@pytest.mark.quick_cases("DDP, one rank", "no waits in a step")
def test_each_part_runs_on_the_cpu(part: str) -> None:
    assert gpu_parts.PARTS[part]("cpu")


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


@pytest.mark.thorough
def test_the_script_needs_only_what_it_imports(tmp_path: Path) -> None:
    code, said = check(tmp_path, "--device", "cpu", "--small", "--seconds", "0")
    assert code == 0, said
    assert "\nok; not run to the end: " in said
    table = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(gpu_parts.PARTS) < {line["check"] for line in table["rows"]}


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
