"""scripts/gpu_check.sh, tried on the CPU: its parts, and what it needs to be installed."""

import contextlib
import functools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.clock import Clock
from support.launch import environment
from support.stand_in_gpus import stand_in_gpus

from scripts import gpu_check, gpu_page, gpu_parts, gpu_processes
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
@pytest.mark.quick_cases(3)
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


@pytest.mark.thorough  # half a minute
def test_the_part_that_forbids_waits_looks_only_at_steps_that_compare_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = []
    with stand_in_gpus(1) as gpus:

        @contextlib.contextmanager
        def counting_waits(device: str) -> Iterator[None]:
            so_far = gpus.syncs
            yield
            waits.append(gpus.syncs - so_far)

        monkeypatch.setattr(gpu_parts, "forbidding_waits", counting_waits)
        assert gpu_parts.PARTS["no waits in a step"]("cpu:0")
        assert gpus.syncs > 0, "the first steps compare nothing"
    assert waits == [0, 0]


def table_of(folder: Path, **settings: Any) -> gpu_check.Check:
    return gpu_check.Check("cpu", True, math.inf, file=folder / "table.json", **settings)


@pytest.mark.thorough  # the parts run in the tests above
def test_the_exactness_and_the_costs_run_on_the_cpu(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    gpu_check.exactness(table, random_cells(2), until=0)
    gpu_check.run_checks(table, (gpu_check.speed, gpu_check.host_cost, gpu_check.memory))
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
    table = table_of(tmp_path)
    gpu_check.exactness(table, random_cells(1), until=0)
    assert table.failed
    assert "weights" in " ".join(table.rows[-1])


def test_the_main_figures_come_first() -> None:
    order = [check.__name__ for check in gpu_check.CHECKS]
    assert order == ["speed", "host_cost", "parts", "memory", "exactness_in_time"]


def test_exactness_goes_on_until_the_time_is_over_and_has_tried_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(gpu_check.time, "monotonic", clock)
    cells = gpu_check.random_cells(60)
    kinds = {(cell.case, cell.precision) for cell in cells}
    trained = []

    def compared(cell: Any, devices: Any) -> list[Any]:
        trained.append(cell)
        clock.now += 1.0
        return [("weights", torch.ones(2), torch.ones(2), True)]

    monkeypatch.setattr(gpu_check, "compared", compared)
    seconds = len(kinds) + 1 + gpu_check.CELL_S
    table = gpu_check.Check("cpu", True, clock() + seconds, seconds, file=tmp_path / "table.json")
    gpu_check.exactness_in_time(table)
    assert len(kinds) <= len(trained) <= len(kinds) + 2 < len(cells)
    assert {(cell.case, cell.precision) for cell in trained} == kinds
    assert not table.failed
    assert not table.cut_off
    assert len(table.rows) == len(kinds)


def test_a_check_that_raises_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    table, ran = table_of(tmp_path), []

    def broken(check: gpu_check.Check) -> None:
        raise RuntimeError("no such kernel")

    gpu_check.run_checks(table, (broken, ran.append))
    assert ran == [table]
    assert table.failed
    assert table.rows[0][4] == "FAILED RuntimeError: no such kernel"


def test_the_checks_of_a_rank_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_processes, "SCHEDULES", (("zb-v", 2),))
    rows: list[Any] = []
    left_out = gpu_processes.checks("cpu", math.inf, rows.append)
    torch.use_deterministic_algorithms(False)
    assert [row[0] for row in rows] == [
        *("pipeline of 1", "pipeline of 1", "1 replicas of 1 ranks", "save and resume")
    ]
    assert {row[-1] for row in rows} == {"ok"}
    assert not left_out


def test_checks_of_ranks_for_which_there_is_no_time_are_said() -> None:
    rows: list[Any] = []
    left_out = gpu_processes.checks("cpu", -math.inf, rows.append)
    torch.use_deterministic_algorithms(False)
    assert not rows
    assert left_out == [
        "pipelines",
        "late peer",
        "communicators",
        "replicas, {'nb_part': 1, 'replicas': 1}",
    ]


def test_weights_that_differ_are_a_failure() -> None:
    assert gpu_processes.verdict("a", "b", 1e-9, "c")[-1] == "FAILED"


def test_replicas_are_tried_in_every_shape_that_fits_the_ranks() -> None:
    of_four = [(shape["nb_part"], shape.get("inner")) for shape in gpu_processes.shapes(4)]
    assert of_four == [(1, None), (2, "pp"), (2, "dp")]
    assert len(gpu_processes.shapes(3)) == 1


SAID = {
    "error": "rank 1 (stage 1, vm) failed: ValueError: planted by gpu_check",
    "hang": "rank 1 (stage 1, vm) has made no progress for 15 s",
}


@pytest.mark.parametrize("kind", gpu_processes.FAULTS)
@pytest.mark.parametrize(
    ("said", "status", "good"), [(SAID, 1, True), (SAID, 0, False), ({}, 1, False)]
)
def test_a_fault_must_end_the_run_and_name_its_rank(
    monkeypatch: pytest.MonkeyPatch, kind: str, said: dict[str, str], status: int, good: bool
) -> None:
    done = SimpleNamespace(returncode=status, stdout=said.get(kind, "rank 0 failed"))
    monkeypatch.setattr(gpu_processes.subprocess, "run", lambda *_, **__: done)
    row = gpu_processes.fault_row(SimpleNamespace(processes=2, device="cpu"), kind)
    assert (row[-1] == "ok") == good


@pytest.mark.parametrize(("status", "said"), [(0, "exact\n"), (1, "FAILED\n")])
def test_the_table_of_the_ranks_has_what_the_page_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    said: str,
) -> None:
    file = tmp_path / "table.json"

    def ranks(*_: Any, **__: Any) -> Any:
        table = {"rows": [dict.fromkeys(gpu_check.COLUMNS, "ok")], "cut_off": ["replicas"]}
        file.write_text(json.dumps(table))
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(gpu_processes.subprocess, "run", ranks)
    words = ["--processes", "2", "--device", "cpu", "--small", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_processes.py", *words])
    assert gpu_processes.main() == status
    assert capsys.readouterr().out.endswith(said)
    assert "2 ranks." in gpu_page.section([json.loads(file.read_text())])


def test_the_page_has_what_was_measured() -> None:
    assert gpu_page.main(["--check"]) == 0, "run scripts/gpu_page.py"


def test_a_table_is_added_to_the_page(tmp_path: Path) -> None:
    source, page, table = (tmp_path / name for name in ("gpu.json", "page.md", "check.json"))
    source.write_text("[]")
    page.write_text(f"# Before\n{gpu_page.BEGIN}{gpu_page.END}\nafter\n")
    check = table_of(tmp_path, facts={"gpus": "1 x T4", "torch": "2.14", "cuda": "13.0"})
    check.facts |= {"not_shown": ["NCCL"], "date": "2026-12-01", "version": "0.3.0"}
    check.file = table
    check.add("GPT", "1 stage", "9 tokens/s", "0.9 of the plain loop")
    check.add("exact: conv", "fp32", "differs by 1", "", "FAILED conv | 2")
    assert gpu_page.main([str(table)], source, page) == 0
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\nafter\n")
    assert "| GPT | 1 stage | 9 tokens/s | 0.9 of the plain loop |" in text
    assert "**FAILED conv \\| 2**" in text
    assert gpu_page.main(["--check"], source, page) == 0
    page.write_text(text.replace("9 tokens/s", "8 tokens/s"))
    assert gpu_page.main(["--check"], source, page) == 1


@pytest.mark.parametrize(
    ("arguments", "script", "seconds"),
    [
        ([], "gpu_check.py", "450"),
        (["--quick"], "gpu_check.py", "165"),
        (["--quick", "--processes=3"], "gpu_processes.py --processes 3", "165"),
    ],
)
def test_the_script_takes_its_time_or_is_quick(
    tmp_path: Path, arguments: list[str], script: str, seconds: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = - ] || echo "$@"\n')
    python.chmod(0o755)
    said = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        env=environment({"PYTHON": str(python)}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"scripts/{script} --seconds {seconds}" in said


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
